"""A data worker that is stopped holds nobody, and a run under nohup outlives its terminal."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from ..integration.conftest import finish, wait_for
from .conftest import SLOW_DATA, Run


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
