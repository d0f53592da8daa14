from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from speechtrain.batch import Batch
from speechtrain.data.index import open_index
from speechtrain.data.loader import BatchLoader, EvaluationLoader, TrainingLoader
from speechtrain.data.sampler import MicroBatch
from speechtrain.data.sources import open_source
from speechtrain.data.workers import Workers
from speechtrain.errors import DataError, MachineError, Preempted
from speechtrain.text.vocabulary import Characters


def planned(count: int, first: int = 0) -> Iterator[MicroBatch]:
    for i in range(first, first + count):
        yield MicroBatch(np.array([i % 4], np.int32), np.array([100 + i % 5], np.int16), None, 0, i)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"


def wait_for_the_end_of(pids: list[int]) -> bool:
    for _ in range(300):
        if not any(is_alive(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def kill_and_close(pool: Workers) -> None:
    pids = pool.pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    pool.close()
    assert wait_for_the_end_of(pids)


@pytest.fixture
def loader(cache: Path, recordings: Any) -> BatchLoader:
    return TrainingLoader(open_index(open_source(recordings.corpus("m", 4))), Characters())


@pytest.fixture
def workers() -> Iterator[Workers]:
    pool = Workers(2, timeout_seconds=60)
    yield pool
    pool.close()


LOADERS = """
import os
import signal
import time
from multiprocessing.connection import Connection
import torch
from speechtrain.batch import Batch
from speechtrain.errors import DataError

def stuck(item):
    time.sleep(60)

def broken(item):
    if item.index == 2:
        raise DataError("the file is bad")
    raise ZeroDivisionError("a bug")

def half(item):
    send = Connection._send
    def send_half(link, content, *rest):
        if len(content) < 1000:
            return send(link, content, *rest)
        send(link, content[: len(content) // 2])
        os.kill(os.getpid(), signal.SIGSTOP)
    Connection._send = send_half
    return large(item)

def large(item):
    audio = torch.full((2, 400_000), float(item.index))
    ones = torch.ones(2)
    ids, texts = ("x" * 40_000, ""), ("y" * 40_000, "")
    return Batch(audio, ones, ones, ones, ones, ones, ids, texts, index=item.index)
"""


@pytest.fixture
def loaders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Loaders that misbehave, in a module that workers can import."""
    (tmp_path / "loaders_under_test.py").write_text(LOADERS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "loaders_under_test", raising=False)
    return importlib.import_module("loaders_under_test")


def unknown(item: MicroBatch) -> Batch:
    """A loader whose module the workers cannot import, wherever the tests were started from."""
    raise AssertionError


unknown.__module__ = "known_to_this_process_only"
sys.modules[unknown.__module__] = sys.modules[__name__]


def ready(pool: Workers) -> Workers:
    """The pool once its processes run."""
    pool.wait_until_ready()
    assert len(pool.pids) == pool.count
    return pool


def test_batches_are_the_same_and_in_order_wherever_they_are_loaded(
    loader: BatchLoader, workers: Workers
) -> None:
    expected = list(Workers().map(loader, planned(12)))
    stream = workers.map(loader, planned(12))
    first = [next(stream) for _ in range(3)]  # loaded here, or there, as it happens
    workers.wait_until_ready()
    found = first + list(stream)
    assert [batch.index for batch in found] == list(range(12))
    for ours, theirs in zip(expected, found, strict=True):
        assert ours.ids == theirs.ids
        assert torch.equal(ours.audio, theirs.audio)
        assert torch.equal(ours.labels, theirs.labels)
        theirs.audio.add_(1)  # writable, as the trainer may want


def test_streams_take_turns(loader: BatchLoader, workers: Workers) -> None:
    """Validation in the midst of training, and a validation that is given up."""
    ready(workers)
    training = workers.map(loader, planned(100))
    other = EvaluationLoader(loader.index, loader.tokenizer)
    found = [next(training).index for _ in range(5)]
    assert [batch.index for batch in workers.map(other, planned(9, 50))] == list(range(50, 59))
    given_up = workers.map(other, planned(50))
    next(given_up)
    del given_up
    found += [batch.index for batch in islice(training, 20)]
    assert found == list(range(25))
    assert len(workers._results) == 0


def test_large_batches_and_long_names_do_not_block(workers: Workers, loaders: Any) -> None:
    ready(workers)
    training, evaluation = workers.map(loaders.large, planned(20)), workers.map(loaders.large, planned(20))
    for i in range(20):
        for stream in (training, evaluation):
            batch = next(stream)
            assert (batch.index, float(batch.audio[1, -1]), len(batch.ids[0])) == (i, float(i), 40_000)


def test_errors_come_back_where_they_belong(workers: Workers, loaders: Any) -> None:
    ready(workers)
    stream = workers.map(loaders.broken, planned(3, 2))
    with pytest.raises(DataError, match="the file is bad"):
        next(stream)
    with pytest.raises(RuntimeError, match=r"ZeroDivisionError: a bug \(.*loaders_under_test\.py:\d+\)"):
        next(workers.map(loaders.broken, planned(1)))


def test_a_loader_that_does_not_travel_is_an_error(workers: Workers, loader: BatchLoader) -> None:
    ready(workers)
    with pytest.raises(MachineError, match=r"cannot import its loader.*data\.workers=0"):
        next(workers.map(unknown, planned(1)))
    assert next(workers.map(loader, planned(1))).index == 0


def test_a_killed_worker_is_an_error_that_says_so(loader: BatchLoader, workers: Workers) -> None:
    ready(workers)
    stream = workers.map(loader, planned(1000))
    next(stream)
    os.kill(workers.pids[1], signal.SIGKILL)
    with pytest.raises(MachineError, match=r"was killed by signal 9 .*lower data\.workers") as caught:
        list(stream)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("is_stopping", [False, True])
def test_a_worker_that_stops_in_the_middle_of_an_answer_is_an_error(
    loaders: Any, monkeypatch: pytest.MonkeyPatch, is_stopping: bool
) -> None:
    """An answer below 1 MiB is longer than the link's buffer, so half of it waits there."""
    pool = Workers(1, timeout_seconds=60 if is_stopping else 2, stop_requested=lambda: is_stopping)
    monkeypatch.setattr("speechtrain.data.workers._STOP_SECONDS", 1.0)
    expected, after = (Preempted, "1 s after a stop request") if is_stopping else (MachineError, "2 s")
    try:
        ready(pool)
        with pytest.raises(expected, match=f"data worker {pool.pids[0]} gave no answer for {after}"):
            next(pool.map(loaders.half, planned(1)))
    finally:
        kill_and_close(pool)


def test_a_time_out_names_the_recordings(
    loader: BatchLoader, recordings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Workers(1, timeout_seconds=0.5)
    try:
        ready(pool)
        os.kill(pool.pids[0], signal.SIGSTOP)
        item = MicroBatch(np.arange(4, dtype=np.int32), np.full(4, 100, np.int16), epoch=1, index=7)
        names = loader.recordings(item)
        with pytest.raises(MachineError) as caught:
            next(pool.map(loader, iter([item])))
    finally:
        kill_and_close(pool)
    assert f"at micro-batch 7 of epoch 1, {', '.join(names[:3])}, and 1 more" in str(caught.value)
    assert all(Path(name.partition("(")[2].rstrip(")")).is_file() for name in names)
    assert "\n" not in str(caught.value)


def test_a_worker_outlives_the_signals_of_its_group(loader: BatchLoader, workers: Workers) -> None:
    """Ctrl-C and Slurm signal every process; the rank still needs batches up to its last step."""
    ready(workers)
    stream = workers.map(loader, planned(50))
    next(stream)
    for pid in workers.pids:
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    assert len(list(stream)) == 49


def test_workers_that_cannot_be_started_are_done_without(
    loader: BatchLoader,
    workers: Workers,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("speechtrain.data.workers._run_worker", unknown)  # its module is unknown to them
    assert [batch.index for batch in workers.map(loader, planned(1))] == [0]
    workers.wait_until_ready()
    assert workers.pids == []
    assert [batch.index for batch in workers.map(loader, planned(3))] == [0, 1, 2]
    assert any("cannot start" in record.message for record in caplog.records)


def test_a_worker_whose_program_has_ended_is_silent(tmp_path: Path) -> None:
    code = (
        "from multiprocessing import Pipe\n"
        "from speechtrain.data.workers import _run_worker\n"
        "program, worker = Pipe()\n"
        "program.close()\n"
        f"_run_worker(worker, {str(tmp_path / 'none')!r})\n"
    )
    worker = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (worker.returncode, worker.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("end", ["kill", "error"])
def test_no_worker_outlives_its_program(cache: Path, recordings: Any, tmp_path: Path, end: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import itertools, os, sys, time\n"
        "from speechtrain.data.module import SpeechData\n"
        "from speechtrain.text.vocabulary import Characters\n"
        "if __name__ == '__main__':\n"
        "    data = SpeechData(sys.argv[1], {}, Characters(), workers=2)\n"
        "    stream = data.train()\n"
        "    next(stream)\n"
        "    data.workers.wait_until_ready()\n"
        "    next(stream)\n"
        "    print(*data.workers.pids, flush=True)\n"
        "    if sys.argv[2] == 'kill': time.sleep(60)\n"
        "    if sys.argv[2] == 'error': raise ValueError('on purpose')\n"
    )
    command = [sys.executable, str(program), recordings.corpus("m", 4), end]
    folder = Path(tempfile.mkdtemp())  # a short name: a socket's path has at most 107 letters
    environment = {**os.environ, "TMPDIR": str(folder)}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 2, process.stderr and process.stderr.read()
    if end == "kill":
        process.kill()
    _, errors = process.communicate(timeout=60)
    assert wait_for_the_end_of(pids)
    folder.rmdir()  # empty: the fork server removes its own
    assert ("on purpose" in errors) == (end == "error")


HANGS_AT_START = """
import os
import sys
import time
from speechtrain.data.workers import Workers

if __name__ == "__mp_main__":  # a worker that imports this program never becomes ready
    server = os.getppid()
    open(sys.argv[2], "w").close()
    while os.getppid() == server:  # it ends with the program
        time.sleep(0.1)
if __name__ == "__main__":
    pool = Workers(1, timeout_seconds=600)
    pool.start()
    while sys.argv[1] == "later" and not os.path.exists(sys.argv[2]):
        time.sleep(0.05)
    pool.close()
    print(pool.pids)
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["at once", "later"])
def test_closing_does_not_wait_for_a_worker_that_hangs_at_its_start(tmp_path: Path, moment: str) -> None:
    """A run that is asked to stop would end by its second signal, and not with the code that requeues it."""
    program = tmp_path / "program.py"
    program.write_text(HANGS_AT_START)
    command = [sys.executable, str(program), moment, str(tmp_path / "hangs")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "[]\n"
    assert "cannot start" not in result.stderr
