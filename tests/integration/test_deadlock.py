"""A rank that hangs is named with step, phase and stack, and everything has ended soon after."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable

import pytest

from .conftest import Command

LIMIT = 5.0  # seconds without a move
BOUND = 60.0  # from the hang to the end of the command: generous, 5 + 10 are measured on a free machine
HANGS = {
    "data": (["data._target_=deadlocks.SleepingData"], "data", "planted"),
    "forward": (["model._target_=deadlocks.SleepingTask"], "forward", "planted"),
    "collective": (["model._target_=deadlocks.SkippingTask"], "all-reduce", "_elsewhere"),
}


@pytest.mark.parametrize("hang", HANGS)
def test_a_rank_that_hangs_is_named_and_all_end(command: Callable[..., Command], hang: str) -> None:
    overrides, phase, function = HANGS[hang]
    run = command("run", *overrides, "allow_targets=deadlocks", f"trainer.timeout_seconds={LIMIT}")
    planted = run.run_dir.parent / "planted"
    run.environment = {**run.environment, "PLANTED": str(planted)}
    done = run.run("world_size=2", "trainer.validate_every=1000", "trainer.save_every=1000")
    ended = time.time()

    assert done.returncode == 4, done.stderr
    *told, line = done.stderr.splitlines()
    named = rf"speechtrain: error: rank 1 on .+: step 3, phase {phase}, stands still for [\d.]+ s; "
    assert re.match(named + r"rank 0 \(step 3, [\w-]+\) waits; at .*", line), done.stderr
    assert f" in {function}" in line
    assert any("deadlocks.py" in row and f"in {function}" in row for row in told), done.stderr
    stack = (run.run_dir / "ranks" / "1" / "error.log").read_text()
    assert re.search(rf'deadlocks.py", line \d+, in {function}\n', stack)

    result = json.loads((run.run_dir / "ranks" / "1" / "result.json").read_text())
    assert (result["status"], result["is_cause"], result["steps"]) == ("failed", True, 2)
    after = {"named": result["failed_at"] - float(planted.read_text())}
    after["ended"] = ended - float(planted.read_text())
    print(hang, {name: round(seconds, 1) for name, seconds in after.items()})
    assert after["ended"] < BOUND
    (folder,) = (run.run_dir / "stuck").iterdir()
    assert {path.name for path in folder.iterdir()} == {"hang", "rank-0.json", "rank-1.json"}
    assert not _running(str(run.run_dir))


def test_a_rank_that_is_stopped_is_named_and_killed(command: Callable[..., Command]) -> None:
    """It cannot say anything itself, and takes no notice of a signal."""
    overrides = ["model._target_=deadlocks.StoppingTask", "allow_targets=deadlocks"]
    run = command("run", *overrides, f"trainer.timeout_seconds={LIMIT}")
    planted = run.run_dir.parent / "planted"
    run.environment = {**run.environment, "PLANTED": str(planted)}
    done = run.run("world_size=2", "trainer.validate_every=1000", "trainer.save_every=1000")
    seconds = time.time() - float(planted.read_text())
    assert done.returncode == 4, done.stderr
    assert "speechtrain: error: rank 1 does not answer: it is stopped, or hangs" in done.stderr
    print("stopped", round(seconds, 1))
    assert seconds < BOUND
    assert not _running(str(run.run_dir))


def _running(argument: str) -> list[str]:
    """Processes that still have ``argument`` on their command line."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                with open(f"{entry.path}/cmdline", errors="replace") as file:
                    line = file.read()
            except OSError:
                continue
            if argument in line:
                found.append(line)
    return found
