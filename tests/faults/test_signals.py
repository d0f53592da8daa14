"""Stop signals in each phase of one run, continued again and again; a data worker that is stopped."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable

import pytest

from ..integration.conftest import finish, wait_for
from ..integration.starting import Started
from .conftest import SLOW_DATA, Run, wait_until

EVERY = 6  # steps from one validation to the next
PLAN = ["trainer.max_steps=120", "trainer.save_every=3", f"trainer.validate_every={EVERY}"]
SLOW = ["data.valid.unheard.utterances=30", "data.valid_batch.count=1", "data.workers=0"]
PHASES = ["start", "train", "validation", "checkpoint"]
SIGNALS = ["INT", "INT twice", "TERM", "HUP", "USR1"]
CODES = {"INT": {75}, "INT twice": {130, 75}, "TERM": {75}, "HUP": {-1}, "USR1": {-10}}
"""What the command ends with; SIGHUP and SIGUSR1 end it at once, and its rank saves alone."""


def reach(run: Run, phase: str, draw: random.Random, process: Started) -> None:
    """Wait until the run, which has just been started, is in ``phase``, or over."""
    before = run.updates()
    writing = run.run_dir / "checkpoints"
    if phase == "start":
        wait_for((run.run_dir / "run.json").exists, goal="run.json")
        time.sleep(draw.uniform(1.0, 3.0))
        return
    run.wait_for_update(before + 1, process)
    if phase == "train":
        time.sleep(draw.uniform(0.0, 0.5))
    elif phase == "validation":
        wait_until(lambda: run.step() % EVERY == 0, process, "a validation")
    else:
        wait_until(lambda: [*writing.glob(".writing-*")], process, "a checkpoint that is written")


@pytest.mark.timeout(3600)
def test_each_signal_in_each_phase_saves_and_leaves(
    run: Callable[..., Run], figures: Callable[[str], None]
) -> None:
    undisturbed, stopped = (run(name, *SLOW_DATA, *PLAN, *SLOW) for name in ("undisturbed", "stopped"))
    done = undisturbed.run()
    assert done.returncode == 0, done.stderr
    stopped.environment["FAULTS_PAUSE"] = "0.1"
    draw = random.Random(5)
    plan = [(phase, name) for phase in PHASES for name in SIGNALS]
    draw.shuffle(plan)
    obeyed = 0
    for phase, name in plan:
        process = stopped.start()
        reach(stopped, phase, draw, process)
        if process.poll() is not None:
            break
        number = getattr(signal, "SIG" + name.split()[0])
        process.send_signal(number)
        if name.endswith("twice"):
            time.sleep(0.3)
            process.send_signal(number)
        code = finish(process).returncode
        codes = CODES[name] | {0}
        if phase == "start":  # a signal that comes before the command listens ends it, and nothing is lost
            codes |= {-number, 130}
        assert code in codes, (phase, name, code)
        stopped.wait_until_gone()
        if code != 130 and phase != "start":
            assert stopped.result()["status"] in ("preempted", "finished")
            assert stopped.checkpoints()[-1].name == f"step-{stopped.result()['steps']:08d}"
        obeyed += 1
    done = stopped.run()
    assert done.returncode == 0, done.stderr
    assert obeyed >= len(plan) // 2
    assert stopped.losses() == undisturbed.losses()
    assert stopped.handed() == undisturbed.handed()
    steps = {e["step"]: e["wer"] for e in undisturbed.events("valid")}
    assert {e["step"]: e["wer"] for e in stopped.events("valid")} == steps
    figures(
        f"{obeyed} signals obeyed, {len(steps)} validations and {len(stopped.losses())} updates bit-equal"
    )


def goes_on(run: Run) -> bool:
    """Whether the run makes an update within two seconds."""
    step = run.step()
    time.sleep(2.0)
    return run.step() > step


@pytest.mark.parametrize("end", [pytest.param("asked to stop", marks=pytest.mark.ci_share), "left alone"])
def test_a_data_worker_that_is_stopped_holds_nobody(
    run: Callable[..., Run], end: str, figures: Callable[[str], None]
) -> None:
    seconds = 300 if end == "asked to stop" else 5  # after a signal it waits 10 s for data, whatever is set
    slow = [*SLOW_DATA, "data.workers=1", f"data.timeout_seconds={seconds}"]
    long = ["trainer.max_steps=100000", "trainer.save_every=100000", "trainer.validate_every=100000"]
    found = run("run", *long, *slow)
    found.environment["FAULTS_PAUSE"] = "0.1"
    process = found.start()
    found.wait_for_step(4, process)
    (worker,) = found.data_workers()
    worker.suspend()
    if end == "asked to stop":
        wait_for(lambda: not goes_on(found), process, "the end of the batches that were ready")
        process.send_signal(signal.SIGTERM)
    ended = finish(process)
    assert ended.returncode == (75 if end == "asked to stop" else 4), ended.stderr
    found.wait_until_gone()
    assert found.checkpoints()[-1].name == f"step-{found.step():08d}"
    figures(f"code {ended.returncode}, saved at step {found.step()}, no process left")


@pytest.mark.ci_share
def test_a_run_under_nohup_outlives_its_terminal(run: Callable[..., Run]) -> None:
    found = run("run", *SLOW_DATA, "trainer.max_steps=20", "trainer.save_every=20")
    found.environment["FAULTS_PAUSE"] = "0.1"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does; children inherit it
    try:
        process = found.popen()
    finally:
        signal.signal(signal.SIGHUP, before)
    found.wait_for_step(2, process)
    for pid in (process.pid, *(rank.pid for rank in found.ranks())):
        os.kill(pid, signal.SIGHUP)
    ended = finish(process)
    assert ended.returncode == 0, ended.stderr
    assert found.result()["steps"] == 20
