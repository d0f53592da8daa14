"""The run directory: one run at a time, whose holder is named, and a result that is whole or absent."""

from __future__ import annotations

import json
import math
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from speechtrain import run_directory
from speechtrain.errors import RunError
from speechtrain.files import write_json
from speechtrain.run_directory import (
    RESULT,
    About,
    BestCheckpoint,
    CheckpointManifest,
    DeviceRecord,
    Log,
    RunLock,
    RunResult,
    git_state,
    is_error_rate,
    note_environment,
    origin,
    provenance,
    read_about,
    read_best,
    read_device,
    read_manifest,
    read_metrics,
    read_result,
    read_validations,
    result_text,
    timing_start,
    write_manifest,
)


def test_the_lock_names_its_holder_and_dies_with_it(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from speechtrain.run_directory import RunLock\n"
        f"lock = RunLock(pathlib.Path({str(tmp_path)!r})).acquire()\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(RunError, match=f"in use by pid {holder.pid} on {platform.node()}"):
        RunLock(tmp_path).acquire()
    holder.kill()
    holder.communicate()
    lock = RunLock(tmp_path).acquire()
    assert (tmp_path / "lock").read_text() == f"pid {os.getpid()} on {platform.node()}\n"
    lock.release()
    lock.release()
    RunLock(tmp_path).acquire().release()


def test_what_a_killed_process_left_half_written_is_removed(tmp_path: Path) -> None:
    path, own = tmp_path / RESULT, tmp_path / ".notes.txt"
    own.touch()
    code = (
        "import os, pathlib, signal; from speechtrain.files import atomic\n"
        f"with atomic(pathlib.Path({str(path)!r})): os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob(f".{RESULT}.*"))) == 1
    RunLock(tmp_path).acquire().release()
    assert {file.name for file in tmp_path.iterdir()} == {"lock", own.name}


def test_a_child_does_not_inherit_the_lock(tmp_path: Path) -> None:
    """A data worker that outlives a killed rank must not keep the run busy."""
    lock = RunLock(tmp_path).acquire()
    program = [sys.executable, "-c", "print(flush=True); input()"]
    child = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False)
    assert child.stdout is not None
    child.stdout.readline()  # it runs: its copy of the lock was closed on the way
    lock.release()
    RunLock(tmp_path).acquire().release()
    child.kill()
    child.communicate()


@pytest.mark.parametrize("content", [None, "", '{"status": "fin', "[1]", "\x00"])
def test_a_result_that_cannot_be_read_is_none(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / RESULT).write_text(content)
    assert read_result(tmp_path) is None


def test_outcome_text_is_of_the_best_and_then_of_the_last() -> None:
    metrics = {"wer": 0.1, "dev/wer": 0.1}
    assert result_text(None, None, None) == ""
    assert result_text(metrics, None, None) == "dev/wer 10.00 %"
    assert result_text(metrics, metrics, None) == "dev/wer 10.00 %"
    latest = {"wer": 0.2, "dev/wer": None}
    assert result_text(metrics, latest, "step-00000012") == "best at step 12: dev/wer 10.00 %; last dev/wer -"


@pytest.mark.parametrize(
    ("name", "is_rate"),
    [
        ("wer", True),
        ("final/dev/cer", True),
        ("ctc_wer", True),
        ("dev/wer_160ms", True),
        ("delay_160ms", False),
        ("delay_160ms_90", False),
        ("dev_160ms/loss", False),
    ],
)
def test_error_rates_are_known_by_their_names(name: str, is_rate: bool) -> None:
    assert is_error_rate(name) == is_rate


def test_note_environment_leaves_the_rest_of_the_file(tmp_path: Path) -> None:
    about = About(["a=1"], ["a"])
    path = tmp_path / "run.json"
    for is_private in (True, False):
        write_json(path, asdict(about), private=is_private)
        mode = path.stat().st_mode
        note_environment(tmp_path, "node-7", {"threads": "2"})
        assert read_about(tmp_path) == replace(about, hosts={"node-7": {"threads": "2"}})
        assert path.stat().st_mode == mode
    note_environment(tmp_path / "ranks" / "8", "node-8", {"threads": "4"})
    assert read_about(tmp_path / "ranks" / "8").hosts == {"node-8": {"threads": "4"}}


@pytest.mark.parametrize("text", ["", "STARTING TIMING RUN AT noon\n", ":::MLLOG {}\n", "\udcff"])
def test_a_log_without_a_date_has_not_started(tmp_path: Path, text: str) -> None:
    assert timing_start(tmp_path) is None
    (tmp_path / "mlperf.log").write_text(text, errors="surrogateescape")
    assert timing_start(tmp_path) is None


def test_the_date_of_a_log_is_in_utc(tmp_path: Path) -> None:
    (tmp_path / "mlperf.log").write_text("STARTING TIMING RUN AT 2026-11-25 01:02:03 PM\n:::MLLOG {}\n")
    assert timing_start(tmp_path) == datetime(2026, 11, 25, 13, 2, 3, tzinfo=UTC)


def test_about_says_how_a_run_came_to_be(tmp_path: Path) -> None:
    said = origin(["seed=2"])
    assert said["argv"] == ["seed=2"]
    assert {"python", "torch", "lhotse", "speechtrain"} <= set(said["versions"])
    assert said["host"] == platform.node()
    assert git_state(tmp_path) == {}
    about = About([], versions={"speechtrain": "0.1.0", "torch": "2.13"}, git={"commit": "abc"})
    write_json(tmp_path / "run.json", asdict(about))
    assert provenance(tmp_path) == {"speechtrain": "0.1.0", "commit": "abc", "run": tmp_path.name}


WRONG_VALUES = (7, 1.5, True, "x", [7], [None], {"a": [1]}, {"a": {"b": {}}}, [["a"]], 10**400)
READERS: dict[str, tuple[Callable[[Path], Any], Any, Any]] = {
    "run.json": (
        read_about,
        About(
            ["a=1"],
            ["a"],
            {"dirty": True},
            parts={"a.b": {"dirty": True}},
            latest={"argv": ["a"]},
            hosts={"node-7": {"threads": "2"}},
        ),
        About([]),
    ),
    "device.json": (
        read_device,
        DeviceRecord("cpu", "one", "fp32", {"lstm": "loop"}, "fp32 lstm=loop", {"fp32": 1.5}),
        None,
    ),
    "result.json": (
        read_result,
        RunResult("finished", 0.5, {"wer": 0.5, "x": None}, speed={"epoch_s": 1.5}, limits={"keep": 2}),
        None,
    ),
    "checkpoint.json": (
        read_manifest,
        CheckpointManifest(1, 7, {"state.safetensors": "ab"}, 0.5, {"wer": 0.5}),
        None,
    ),
    "checkpoints/best.json": (read_best, BestCheckpoint("step-00000007", 0.5), None),
}
"""The reader of each JSON file of a run, a record, and what stands for a file that does not fit."""


@pytest.mark.parametrize("name", READERS)
def test_a_record_reads_back_and_its_unknown_keys_are_ignored(name: str, tmp_path: Path) -> None:
    read, record, empty = READERS[name]
    assert read(tmp_path) == empty
    write_json(tmp_path / name, {**asdict(record), "of a later release": [1]})
    assert read(tmp_path) == record


@pytest.mark.parametrize("name", READERS)
def test_each_field_of_another_type_is_one_warning(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    read, record, empty = READERS[name]
    path = tmp_path / name
    for key in asdict(record):
        misfits = 0
        for value in WRONG_VALUES:
            write_json(path, {**asdict(record), key: value})
            misfits += read(tmp_path) == empty
        assert misfits >= len(WRONG_VALUES) - 3, key  # An integer is a float, and some texts fit.
        assert f"{path} is damaged and not used ({key} has a value of another type)" in caplog.messages
    assert len(caplog.messages) == len({*caplog.messages})


def test_numbers_that_are_not_finite_and_deep_nesting_are_damage(tmp_path: Path) -> None:
    path = tmp_path / RESULT
    brackets = "[" * 5_000 + "]" * 5_000
    for text in ("NaN", "-Infinity", "1e999", "1" + "0" * 400, brackets):
        path.write_text(f'{{"status": "finished", "metric": {text}}}')
        assert read_result(tmp_path) is None
    brackets = "[" * 900 + "]" * 900
    path.write_text(f'{{"status": "finished", "limits": {{"a": {brackets}}}}}')
    assert read_result(tmp_path) is None


def test_read_manifest_checks_a_digest_if_there_is_one(tmp_path: Path) -> None:
    write_manifest(tmp_path, CheckpointManifest(1, 7, {}))
    text = (tmp_path / "checkpoint.json").read_text()
    assert read_manifest(tmp_path) == CheckpointManifest(1, 7, {})
    (tmp_path / "checkpoint.json").write_text(text.replace(": 7", ": 8"))
    assert read_manifest(tmp_path) is None
    (tmp_path / "checkpoint.json").write_text('{"format": 1, "step": 7, "files": {}}')
    assert read_manifest(tmp_path) == CheckpointManifest(1, 7, {})


def test_a_log_is_read_up_to_a_number_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"event": "train", "step": step} for step in range(5)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read_metrics(tmp_path) == Log(rows)
    monkeypatch.setattr(run_directory, "_MAX_ROWS", 3)
    assert read_metrics(tmp_path) == Log(rows[:3], 2)


def test_restarts_take_linear_time(tmp_path: Path) -> None:
    """Each restart goes one step back. A quadratic reader takes minutes, and the time limit ends it."""
    lines = []
    for step in range(1, 50_001):
        lines += [json.dumps({"event": "train", "step": number}) for number in (step + 1, step)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert [row["step"] for row in read_metrics(tmp_path).rows] == [*range(1, 50_001)]


def test_validations_are_read_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_validations(tmp_path, "wer") == []

    def append(*rows: dict[str, object]) -> None:
        with path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    first = {"event": "valid", "step": 2, "set": "dev", "wer": 0.9}
    append({"event": "train", "step": 1, "wer": 1.0}, first, {**first, "set": "other"}, {**first, "step": 4})
    with path.open("a") as file:
        file.write('{"event": "valid", "step": 6, "set": "dev", "w')  # a line that is still being written
    assert read_validations(tmp_path, "wer") == [0.9, 0.9]
    with path.open("a") as file:
        file.write('er": null}\n')
    append(
        {"event": "resume", "step": 4}, {**first, "step": 6, "wer": 0.5}, {**first, "step": 8, "wer": None}
    )
    values = read_validations(tmp_path, "wer")
    assert values[:3] == [0.9, 0.9, 0.5]
    assert math.isnan(values[3])
