"""Two ranks train what one process does: same samples, same losses, one voice; and they end together."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from speechtrain.processes import children_of

from .conftest import RECORDED, Command, finish, wait_for

STEPS = 20
SIZES = ["trainer.save_every=1000", "trainer.validate_every=1000", f"trainer.max_steps={STEPS}"]
TOLERANCE = 1e-5


def figures(run: Command) -> np.ndarray:
    """Loss and gradient norm of each update."""
    return np.array([[e["step"], e["loss"], e["grad_norm"]] for e in run.events("train")])


def test_two_ranks_train_what_one_process_does(command: Callable[..., Command]) -> None:
    few = "data.valid_batch.count=2"  # three batches: one rank has two of them, the other one and a filler
    alone = command("alone", *SIZES, *RECORDED, few, "trainer.accumulate=2")
    assert alone.run().returncode == 0
    both = command("both", *SIZES, *RECORDED, few, "trainer.simulate_world=2", "world_size=2")
    done = both.run()
    assert (done.returncode, done.stderr) == (0, "")
    assert "trainer.simulate_world=2: world_size 2 × accumulate 1" in done.stdout
    np.testing.assert_allclose(figures(both), figures(alone), rtol=TOLERANCE)
    assert sorted(both.handed()) == sorted(alone.handed())
    assert len(both.handed()) >= 2 * STEPS

    # an evaluation has each utterance once: corpus sums over all of them are those of one process
    for ours, theirs in zip(both.events("valid"), alone.events("valid"), strict=True):
        assert ours["step"] == theirs["step"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=TOLERANCE)
        assert (ours["wer"], ours["cer"]) == (theirs["wer"], theirs["cer"])
    assert sorted(both.scored()) == sorted(set(both.scored())) == sorted(alone.scored())

    # only rank 0 speaks
    assert [e["ranks"] for e in both.events("start")] == [2]
    assert len(both.events("train")) == STEPS
    assert (both.run_dir / "ranks" / "1" / "output.log").read_text() == ""
    assert json.loads((both.run_dir / "ranks" / "1" / "result.json").read_text())["steps"] == STEPS
    assert not list(both.run_dir.rglob("error.log"))


def test_a_signal_to_one_rank_stops_all_and_another_world_goes_on(command: Callable[..., Command]) -> None:
    endless = ["trainer.max_steps=5000", "trainer.validate_every=5000", "trainer.save_every=5000"]
    run = command("run", *endless, *RECORDED)
    process = run.start("world_size=2")
    wait_for(lambda: len(run.events("train")) >= 2, process)
    (agent,) = children_of(process.pid)
    other = children_of(agent) - {run.pid()}
    assert len(other) == 1
    os.kill(other.pop(), signal.SIGTERM)
    ended = finish(process)
    assert ended.returncode == 75, ended.stderr
    first = run.result()["steps"]
    assert (
        ended.stderr == f"speechtrain: saved at step {first} in {run.run_dir}; the same command continues\n"
    )
    assert run.checkpoints()[-1].name == f"step-{first:08d}"

    more = ["trainer.validate_every=1000", f"trainer.max_steps={first + 3}"]
    done = run.run("world_size=1", *more)  # of the same global batch
    assert done.returncode == 0, done.stderr
    assert "trainer.simulate_world=2: world_size 1 × accumulate 2" in done.stdout
    assert [e["accumulate"] for e in run.events("start")] == [1, 2]
    whole = command("whole", *endless, *RECORDED, "trainer.accumulate=2", *more)
    assert whole.run().returncode == 0
    np.testing.assert_allclose(figures(run), figures(whole), rtol=TOLERANCE)
    assert sorted(run.handed()) == sorted(whole.handed())


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


ONE_UPDATE = """
import os, torch
from speechtrain.distributed import World, open_group
torch.set_num_threads(1)
group = open_group(World.from_environment(os.environ), timeout_seconds=120)
net = torch.nn.Linear(4, 4)
wrapped = group.wrap(net)
wrapped(torch.ones(2, 4)).sum().backward()
group.agree(torch.tensor(1.0), stop=False, late=False, skip=torch.tensor(False))
del wrapped, net
group.close()
"""


def test_processes_end_cleanly_each_time(tmp_path: Path) -> None:
    program = tmp_path / "one_update.py"
    program.write_text(ONE_UPDATE)
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program)]
    pipe = subprocess.PIPE
    # beside each other: the busier the machine, the more an exit race shows
    runs = [subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True) for _ in range(3)]
    for done in [finish(run) for run in runs]:
        assert done.returncode == 0, done.stderr
        assert not re.search("terminate called|Error", done.stderr)
