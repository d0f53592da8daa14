"""Trackers that sleep, raise or die in real runs, which train, end and exit as without them."""

from __future__ import annotations

import importlib.util
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Command, finish, wait_for

TRACKERS = "+tracking.trackers"
WANDB = "tracking.trackers.wandb.enabled=true"
ALLOW = "allow_targets=failing_trackers"
SLEEPING = [ALLOW, f"{TRACKERS}.sleeping._target_=failing_trackers.Sleeping"]
OFF = "training continues, the tracker is off from now on"
WARNINGS = [
    "dying failed (BrokenPipeError: [Errno 32] Broken pipe); training continues, some of its records are "
    "lost",
    f"exiting failed (SystemExit: 3); {OFF}",
    f"raising failed (KeyError: 'project'); {OFF}",
    "sleeping has not ended 8 s after training; its last records are lost",
]
LIMIT_SECONDS = 40.0
"""Well below the minute that the tracker sleeps. Trackers have 8 s, the rest is for a busy machine."""

needs_wandb = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="pip install wandb")


def _seconds_after(run: Command, event: str) -> float:
    """The seconds since the latest record of an event."""
    seconds: float = time.time() - run.events(event)[-1]["time"]
    return seconds


def test_trackers_that_sleep_raise_and_die(command: Callable[..., Command], tmp_path: Path) -> None:
    run = command(
        *("run", *SLEEPING, "trainer.max_steps=20", "trainer.validate_every=20"),
        f"{TRACKERS}.raising._target_=failing_trackers.Raising",
        f"{TRACKERS}.exiting._target_=failing_trackers.Exiting",
        f"{TRACKERS}.dying={{_target_: failing_trackers.Dying, path: {tmp_path / 'lines'}}}",
    )
    ended = run.run()
    assert ended.returncode == 0, ended.stderr
    assert _seconds_after(run, "train") < LIMIT_SECONDS
    assert (run.result()["status"], run.result()["steps"]) == ("finished", 20)

    names = [record["event"] for record in run.events()]
    healthy = names.index("train") + 2  # both fail at step 3
    dropped = {"sleeping": len(names), "raising": len(names) - healthy, "exiting": len(names)}
    dropped["dying"] = dropped["raising"]
    end = run.events("end")[0]
    assert end["dropped"] == dropped
    assert end["tracker_seconds"] < 2.0, "no sleep of a tracker is in the training thread"
    *warnings, summary = ended.stderr.splitlines()
    assert sorted(warnings) == [f"speechtrain: warning: tracker {warning}" for warning in WARNINGS]
    counts = ", ".join(f"{name} {count}" for name, count in dropped.items())
    assert summary == f"speechtrain: warning: records dropped: {counts}"


def test_signals_end_a_run_with_a_hanging_tracker(command: Callable[..., Command]) -> None:
    run = command("run", *SLEEPING, "trainer.max_steps=4000", "trainer.validate_every=4000")
    process = run.start()
    wait_for(lambda: run.events("train"), process)
    process.send_signal(signal.SIGTERM)
    ended = finish(process)
    assert ended.returncode == 75, ended.stderr
    assert _seconds_after(run, "train") < LIMIT_SECONDS
    assert run.result()["status"] == "preempted"
    assert run.checkpoints()[-1].name == f"step-{run.result()['steps']:08d}"

    second = command("second", *SLEEPING, "trainer.max_steps=4000", "trainer.validate_every=4000")
    process = second.start()
    wait_for(lambda: second.events("train"), process)
    process.send_signal(signal.SIGINT)
    wait_for(lambda: (second.run_dir / "result.json").exists(), process, "a result before the trackers end")
    process.send_signal(signal.SIGINT)
    assert finish(process).returncode in (75, 130)
    assert _seconds_after(second, "train") < LIMIT_SECONDS


@needs_wandb
def test_wandb_beside_the_other_trackers(command: Callable[..., Command], tmp_path: Path) -> None:
    run = command("run", WANDB, "trainer.max_steps=4", "schedule.warmup_steps=0")
    run.environment = {**run.environment, "NETRC": str(tmp_path / "none"), "HOME": str(tmp_path)}
    ended = run.run()
    assert (ended.returncode, ended.stderr) == (0, "")
    assert run.events("end")[0]["dropped"] == {}
    (record,) = run.run_dir.glob("wandb/offline-run-*/*.wandb")
    assert b"valid/unheard/wer" in record.read_bytes()
    ended = run.run("trainer.max_steps=6", "resume=must")
    assert (ended.returncode, ended.stderr) == (0, "")
    names = {path.name.rpartition("-")[2] for path in run.run_dir.glob("wandb/offline-run-*")}
    assert len(names) == 1, "a resumed run keeps its id"
