"""The boundary of a rank: whatever happens, the parent is told, and never by another run's result."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file
from torch import Tensor

from speechtrain.config.build import build_data, build_device, build_tokenizer
from speechtrain.config.resolved import dump, load
from speechtrain.devices.cpu import CPU
from speechtrain.distributed.group import SingleProcess
from speechtrain.errors import ConfigError, MachineError
from speechtrain.launcher import Result, World
from speechtrain.optim.schedules import Schedule
from speechtrain.rank.batch_memory import choose_batch_memory, free_batch_memory
from speechtrain.rank.build import build_task, load_initial_weights, plan_updates, trainer_config_for
from speechtrain.rank.main import _restart
from speechtrain.rank.stop import StopRequest
from speechtrain.run_directory import RunLock
from speechtrain.runs.compose import compose
from speechtrain.runs.start import _outcome
from speechtrain.tracking.console import start_line
from speechtrain.trainer_config import TrainerConfig
from tests.support.tiny_run import TINY, untrained

from ...conftest import Disk


def rank(run_dir: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    config = run_dir / "config.yaml"
    if not config.exists():
        config.write_text("[]")
    line = [sys.executable, "-m", "speechtrain.train_rank", str(config)]
    return subprocess.run(
        line, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )


def test_a_failure_is_a_result_with_a_code_and_a_trace(tmp_path: Path) -> None:
    done = rank(tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (5, "", "")
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["status"] == "failed"
    assert result["exit_code"] == 5
    assert "config.yaml is damaged" in result["error"]
    assert result["steps"] == 0
    assert "Traceback" in (tmp_path / "error.log").read_text()


RESTARTS = """
import json, os, pathlib, sys
from speechtrain.rank import main as train_rank
folder = pathlib.Path(sys.argv[1])
for count in ("0", "1", "2"):
    if not os.fork():
        os.environ["TORCHELASTIC_RESTART_COUNT"] = count
        os._exit(train_rank.main([str(folder / "config.yaml")]))
    os.wait()
    print(json.dumps(json.loads((folder / "result.json").read_text())), flush=True)
"""
"""Three ranks in turn, forked from one process: an import of torch takes seconds."""


@pytest.mark.slow
def test_a_failure_under_torchrun_says_which_restart_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    (tmp_path / "config.yaml").write_text("[]")
    line = [sys.executable, "-c", RESTARTS, str(tmp_path)]
    process = subprocess.run(line, capture_output=True, text=True, check=True)
    errors = [json.loads(result)["error"] for result in process.stdout.splitlines()]
    assert errors[0] == f"{errors[2]} (restart 1 of 2 follows)"
    assert errors[1] == f"{errors[2]} (restart 2 of 2 follows)"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert start_line(_restart()) == "start    restart 1 of 2"


@pytest.mark.slow
def test_a_disk_without_room_for_a_file_of_a_rank_is_the_machines_fault(disk: Disk) -> None:
    config = compose(["recipe=demo", "tracking=jsonl", "data.workers=0"])
    config.run_dir = str(disk.path / "run")
    Path(config.run_dir).mkdir()
    (Path(config.run_dir) / "config.yaml").write_text(dump(config))
    disk.mount("remount,nr_inodes=3")
    done = rank(Path(config.run_dir))
    assert done.returncode == 4
    assert "lock" in done.stderr
    disk.mount("remount,nr_inodes=4")  # device.json has no room
    done = rank(Path(config.run_dir))
    assert done.returncode == 4
    assert "result.json cannot be written: [Errno 28] No space left on device" in done.stderr
    with pytest.raises(OSError, match="No space left on device"):  # which is code 4, whatever the agent's is
        _outcome(Result(1), Path(config.run_dir))


def test_a_rank_but_the_first_keeps_its_outcome_to_itself(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("of rank 0")
    done = rank(tmp_path, RANK="1", WORLD_SIZE="2")
    assert (done.returncode, done.stdout, done.stderr) == (5, "", "")
    assert (tmp_path / "result.json").read_text() == "of rank 0"
    assert not (tmp_path / "lock").exists()
    own = tmp_path / "ranks" / "1"
    result = json.loads((own / "result.json").read_text())
    assert (result["status"], result["rank"], result["is_cause"]) == ("failed", 1, True)
    assert "Traceback" in (own / "error.log").read_text()
    assert (own / "output.log").read_text() == ""


def test_a_world_that_the_run_does_not_have_is_refused() -> None:
    config = OmegaConf.create({"world_size": 1, "trainer": {"simulate_world": 6}})
    assert trainer_config_for(config, World()).accumulate == 6
    with pytest.raises(MachineError, match="WORLD_SIZE=2 in the environment, but the run has world_size=1"):
        trainer_config_for(config, World(0, 2))
    config.world_size = 4
    with pytest.raises(ConfigError, match="is not a multiple of world_size=4"):
        trainer_config_for(config, World(0, 4))


def test_a_run_of_another_is_left_alone(tmp_path: Path) -> None:
    lock = RunLock(tmp_path).acquire()
    (tmp_path / "result.json").write_text("theirs")
    done = rank(tmp_path)
    lock.release()
    assert done.returncode == 5
    assert f"in use by pid {os.getpid()}" in done.stderr
    assert (tmp_path / "result.json").read_text() == "theirs"


def test_a_rank_that_outlived_its_command_before_it_could_ask_stops(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from speechtrain.launcher import PARENT\n"
        "from speechtrain.rank.stop import StopRequest, stop_with_parent\n"
        "for parent in sys.argv[1:]:\n"
        "    os.environ[PARENT] = parent\n"
        "    stop = StopRequest(); stop_with_parent(stop); print(stop())"
    )
    expected = {
        str(os.getpid()): "False",
        "999999999": "True",  # it has gone
        "": "False",
        str(os.getppid()): "False",  # this process is the agent between
    }
    line = [sys.executable, "-c", code, *expected]
    process = subprocess.run(line, capture_output=True, text=True)
    assert process.stdout.split() == [*expected.values()], process.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_request(number: int) -> None:
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, before)
        signal.pthread_kill(
            threading.get_ident(), number
        )  # waits, as it does while a rank imports its libraries
        stop = StopRequest()
        assert stop()
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)


@pytest.mark.parametrize(
    "environ",
    [
        *({"RANK": "0"}, {"WORLD_SIZE": "2"}, {"RANK": "x", "WORLD_SIZE": "2"}),
        *({"RANK": "2", "WORLD_SIZE": "2"}, {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "2"}),
    ],
)
def test_half_a_world_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(MachineError, match="environment variable"):
        World.from_environment(environ)


FORWARD, BACKWARD = (f"tokenizer.alphabet='{letters}'" for letters in ("abcdefgh ", " hgfedcba"))
OF_THE_VOCABULARY = {"prediction.embedding.weight"} | {
    f"{layer}.{kind}" for layer in ("joint.output", "ctc") for kind in ("weight", "bias")
}


@pytest.mark.parametrize(
    "part", [".", "checkpoints/step-00000001", "checkpoints/step-00000001/model.safetensors"]
)
def test_weights_of_another_vocabulary_are_not_taken_over(tmp_path: Path, part: str) -> None:
    run = untrained(tmp_path / "run", *TINY, FORWARD, "seed=7")
    (run / "checkpoints/step-00000001/state.pt").unlink()  # it holds nothing that init_from reads
    before = load_file(run / "checkpoints/step-00000001/model.safetensors")
    config = compose([*TINY, BACKWARD, f"init_from={run / part}"])
    task, tokenizer = build_task(config)
    fresh = {name: value.clone() for name, value in task.state_dict().items()}
    line = start_line(load_initial_weights(config, task, tokenizer))
    assert all(name in line for name in OF_THE_VOCABULARY), line
    for name, value in task.state_dict().items():
        assert value.equal(fresh[name] if name in OF_THE_VOCABULARY else before[name]), name


def test_weights_of_the_same_vocabulary_are_taken_over_and_not_of_one_that_is_unknown(tmp_path: Path) -> None:
    run = untrained(tmp_path / "run", *TINY, FORWARD, "seed=7")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.yaml").write_text("another: program's")
    bare = tmp_path / "checkpoints/bare.safetensors"
    shutil.copy(run / "checkpoints/step-00000001/model.safetensors", bare)
    before = load_file(bare)
    for start, lost in ((run, set[str]()), (bare, OF_THE_VOCABULARY)):
        config = compose([*TINY, FORWARD, "tokenizer.normaliser=none", f"init_from={start}"])
        task, tokenizer = build_task(config)
        told = load_initial_weights(config, task, tokenizer)
        assert (told["tensors taken over"], told["fresh"]) == (len(before) - len(lost), len(lost))
        assert set(told.get("fresh for another vocabulary", "").split(", ")) - {""} == lost
        kept = {name: value for name, value in task.state_dict().items() if name not in lost}
        assert all(value.equal(before[name]) for name, value in kept.items())


def planned(*overrides: str) -> tuple[Schedule, int | None]:
    """The plan of a run on the embedded corpus."""
    config = compose(["data.workers=0", *overrides])
    return plan_updates(config, TrainerConfig(**config.trainer), build_data(config, build_tokenizer(config)))


def test_a_plan_that_cannot_do_its_work_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    assert planned()[1] == 375
    assert not caplog.messages
    planned("~data.valid.unheard")
    planned("trainer.max_steps=20", "schedule.warmup_steps=20")
    nothing, warmup = caplog.messages
    assert nothing.startswith("data.valid is empty: nothing chooses the best checkpoint")
    assert warmup.startswith("the warm-up takes 20 of 20 updates")


class Rank(SingleProcess):
    """A rank that hears ``told`` from rank 0."""

    def __init__(self, rank: int, told: float = 0.0) -> None:
        self.world, self.told = World(rank, 2, rank, 2), told

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor + self.told


class Roomy(CPU):
    """A CPU with so much free memory."""

    free = 10 * 2**30

    def free_memory(self, processes: int) -> int:
        return self.free // processes


def run_with_auto(run_dir: Path, *more: str) -> DictConfig:
    keys = ["data.batch.memory_gib=auto", "data.batch.count=null", f"run_dir={run_dir}"]
    config = compose([*keys, *more])
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(dump(config))
    return load(run_dir / "config.yaml")


def test_rank_0_divides_the_free_memory_once_for_all_ranks_and_starts(tmp_path: Path) -> None:
    config = run_with_auto(tmp_path / "run", "data.valid_batch.memory_gib=auto")
    task, tokenizer = build_task(config)
    other = load(tmp_path / "run" / "config.yaml")  # rank 1's
    note = choose_batch_memory(config, Roomy(), Rank(0), task=task)
    values = sum(p.numel() for p in task.parameters())
    half = (10 * 2**30 - 5 * 4 * values) / 2 / 2**30  # weights, gradients, two moments, average
    chosen = config.data.batch.memory_gib
    assert chosen == pytest.approx(half, abs=1e-3)
    assert start_line(note) == f"start    memory of a batch {chosen} GiB"
    assert load(tmp_path / "run" / "config.yaml") == config
    assert build_data(config, tokenizer, task).batch.bytes == chosen * 2**30
    assert config.data.valid_batch.memory_gib == chosen

    before = (tmp_path / "run" / "config.yaml").read_bytes()
    little = Roomy()
    little.free = 2**20
    choose_batch_memory(other, little, Rank(1, chosen), task=task)
    assert other == config
    assert choose_batch_memory(other, little, Rank(0), task=task) == {}  # a later start chooses nothing
    assert (tmp_path / "run" / "config.yaml").read_bytes() == before


def test_a_rank_shares_its_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose(["data.batch.memory_gib=auto"])
    task, _ = build_task(config)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert free_batch_memory(config, Roomy(), task) < 2.5
    little = Roomy()
    little.free = 2**20
    with pytest.raises(
        MachineError, match=r"memory_gib=auto: 0\.\d\d GiB of weights, gradients and state, 0\.00 GiB free"
    ):
        free_batch_memory(config, little, task)
    assert 0 < CPU().free_memory(2) < CPU().free_memory(1)


def test_a_device_that_does_not_tell_its_memory_is_named() -> None:
    config = compose(["data.batch.memory_gib=auto", "device=lazy", "data.shapes=2"])
    with pytest.raises(
        MachineError, match=r"memory_gib=auto: device=lazy does not tell its free memory; set GiB"
    ):
        free_batch_memory(config, build_device(config), build_task(config)[0])


def test_a_word_that_is_no_limit_is_refused() -> None:
    config = compose(["data.batch.memory_gib=most"])
    with pytest.raises(
        ConfigError, match=r"data.batch.memory_gib=most: it must be above 0, or null for no limit"
    ):
        build_data(config, build_tokenizer(config))
