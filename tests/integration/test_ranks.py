"""Two ranks train what one process does: same samples, same losses, one voice; and they end together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from speechtrain.launch.process_tree import children_of

from .conftest import RECORDED, Command, beyond_loopback, finish, wait_for
from .engines import TOLERANCE, figures
from .forked import Forks

STEPS = 20
LONGER = 60  # of the run in one process, to which a run that was stopped at some time is compared, too
EXTRA = [
    *("trainer.save_every=5000", "trainer.validate_every=5000", *RECORDED),
    "schedule=constant",  # others depend on the planned length
    "data.valid_batch.count=2",  # three batches: of two ranks one has two of them, the other one and a filler
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str], forks: Forks) -> Command:
    """One process that accumulates two micro-batches."""
    sizes = [*EXTRA, "trainer.accumulate=2", f"trainer.max_steps={LONGER}", f"trainer.validate_every={STEPS}"]
    run = Command(tmp_path_factory.mktemp("alone") / "run", environment, sizes)
    assert forks.run(run.write()) == [0], run.result()
    return run


def assert_same(run: Command, alone: Command) -> None:
    """Same losses, gradient norms and samples, as far as both have come."""
    steps = min(len(figures(run)), LONGER)
    np.testing.assert_allclose(figures(run)[:steps], figures(alone)[:steps], rtol=TOLERANCE)
    ours, theirs = sorted(run.handed()), sorted(alone.handed())
    assert ours[: 2 * steps] == theirs[: 2 * steps]


def test_two_ranks_train_what_one_process_does(command: Callable[..., Command], alone: Command) -> None:
    both = command("both", *EXTRA, "trainer.simulate_world=2", "world_size=2", f"trainer.max_steps={STEPS}")
    done = both.run()
    assert (done.returncode, done.stderr) == (0, "")
    assert "trainer.simulate_world=2: world_size 2 × accumulate 1" in done.stdout
    assert_same(both, alone)
    assert len(both.handed()) == 2 * STEPS

    # an evaluation has each utterance once, and its figures are those of one process
    ids = [f"digits-valid-0-{number:06d}" for number in range(6)]
    assert sorted(both.scored()) == ids
    (ours,) = both.events("valid")
    theirs = alone.events("valid")[0]
    assert ours["step"] == theirs["step"] == STEPS
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=TOLERANCE)
    assert (ours["wer"], ours["cer"]) == (theirs["wer"], theirs["cer"])

    # only rank 0 speaks
    assert [e["ranks"] for e in both.events("start")] == [2]
    assert len(both.events("train")) == STEPS
    assert (both.run_dir / "ranks" / "1" / "output.log").read_text() == ""
    assert json.loads((both.run_dir / "ranks" / "1" / "result.json").read_text())["steps"] == STEPS
    assert not list(both.run_dir.rglob("error.log"))


def test_a_signal_to_one_rank_stops_all_and_one_rank_goes_on(
    command: Callable[..., Command], alone: Command
) -> None:
    run = command("run", *EXTRA)
    process = run.start("world_size=2", "trainer.max_steps=5000")
    wait_for(lambda: len(run.events("train")) >= 2, process)
    assert beyond_loopback(process.pid) == []
    (agent,) = children_of(process.pid)
    (other,) = children_of(agent) - {run.pid()}
    os.kill(other, signal.SIGTERM)
    ended = finish(process)
    assert ended.returncode == 75, ended.stderr
    first = run.result()["steps"]
    assert (
        ended.stderr == f"speechtrain: saved at step {first} in {run.run_dir}. The same command continues\n"
    )
    assert run.checkpoints()[-1].name == f"step-{first:08d}"

    done = run.run_inline("world_size=1", f"trainer.max_steps={first + 3}")  # of the same global batch
    assert done.returncode == 0, done.stderr
    assert "trainer.simulate_world=2: world_size 1 × accumulate 2" in done.stdout
    assert [e["accumulate"] for e in run.events("start")] == [1, 2]
    assert [e["step"] for e in run.events("resume")] == [first]
    assert_same(run, alone)


def test_the_rank_that_failed_is_the_one_that_is_heard(command: Callable[..., Command]) -> None:
    run = command("run", "data._target_=recording.FailingData", "allow_targets=recording", "world_size=2")
    done = run.run()
    assert done.returncode == 3
    assert done.stderr == "speechtrain: error: rank 1 fails as it was told to\n"
    trace = (run.run_dir / "ranks" / "1" / "error.log").read_text()
    assert "DataError: rank 1 fails as it was told to" in trace
    assert json.loads((run.run_dir / "ranks" / "1" / "result.json").read_text())["is_cause"]
    result = run.result()  # of rank 0, which only lost its peer
    assert (result["status"], result["is_cause"]) == ("failed", False)
    assert "ChildFailedError" in (run.run_dir / "agent.log").read_text()


def test_no_rank_waits_for_the_data_check_of_another(command: Callable[..., Command], forks: Forks) -> None:
    """The index of a large set may take longer than a rank may wait for its peers."""
    meeting = ["data._target_=recording.MeetingData", "allow_targets=recording"]
    run = command("run", *EXTRA, *meeting, "trainer.max_steps=1", "world_size=2")
    assert forks.run(run.write(), ranks=2) == [0, 0], run.result()


def test_torch_distributed_launch_trains_two_ranks(command: Callable[..., Command], tmp_path: Path) -> None:
    """It adds ``--local-rank=N`` to the arguments of each process."""
    run = command("run", "trainer.simulate_world=2", "trainer.max_steps=3", "data.batch.count=2")
    launch = ["-m", "torch.distributed.launch", "--standalone", "--nproc_per_node=2"]
    script = str(Path(sys.executable).with_name("speechtrain-train"))
    line = [sys.executable, *launch, script, *run.arguments]
    environment = {**run.environment, "TMPDIR": str(tmp_path)}  # It leaves an empty folder there.
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert [*run.losses()] == [1, 2, 3]
    assert "world_size: 2\n" in (run.run_dir / "config.yaml").read_text()
    assert json.loads((run.run_dir / "run.json").read_text())["argv"] == run.arguments
