"""Kill -9 of any process of a run at random moments: the same command continues, bit by bit."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import psutil
import pytest

from ..integration.conftest import finish
from .conftest import SLOW_DATA, Run, wait_until

PLAN = ["trainer.max_steps=60", "trainer.save_every=4", "trainer.validate_every=20", "data.workers=1"]
ONE = ["command", "rank", "data worker", "fork server"]
CHAINS = {
    "one-rank": ([], ONE, 12),
    "ctc": (["model=ctc"], ONE, 4),
    "two-ranks": (["world_size=2"], ["command", "rank", "second rank", "data worker", "agent"], 5),
}
"""Overrides, whom to kill in turn, how often."""


def victim(run: Run, who: str) -> psutil.Process | None:
    """The process to kill; the command's own is known to who started it."""
    search = {
        "rank": lambda: rank_of(run, "0"),
        "second rank": lambda: rank_of(run, "1"),
        "data worker": run.data_workers,
        "fork server": run.fork_servers,
        "agent": run.agents,
    }
    return next(iter(search[who]()), None)


def rank_of(run: Run, number: str) -> list[psutil.Process]:
    """The rank of this number. A single rank has no variable RANK."""
    return [rank for rank in run.ranks() if rank.info["environ"].get("RANK", "0") == number]


def ownerless_memory() -> list[str]:
    """Shared memory of torch (``torch_PID_…``) whose process has ended. Other tests may have theirs."""
    names = [name for name in os.listdir("/dev/shm") if name.startswith("torch_")]
    return [name for name in names if not psutil.pid_exists(int(name.split("_")[1]))]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("chain", ["one-rank", pytest.param("ctc", marks=pytest.mark.ci_share), "two-ranks"])
def test_kills_of_any_process_leave_no_trace(
    run: Callable[..., Run], chain: str, figures: Callable[[str], None]
) -> None:
    overrides, victims, kills = CHAINS[chain]
    undisturbed, killed = (run(name, *SLOW_DATA, *PLAN, *overrides) for name in ("undisturbed", "killed"))
    if chain == "ctc":
        for each in (undisturbed, killed):
            each.arguments = [a for a in each.arguments if not a.startswith(("model.", "decoder."))]
    done = undisturbed.run()
    assert done.returncode == 0, done.stderr
    killed.environment["FAULTS_PAUSE"] = "0.1"
    draw, codes = random.Random(chain), []
    for number in range(kills):
        who = victims[number % len(victims)]
        before = killed.updates()
        process = killed.start()
        killed.wait_for_update(before + 1, process)
        time.sleep(draw.uniform(0.0, 0.3))
        if process.poll() is not None:  # it has come to its end
            break
        if who == "command":
            process.kill()
        else:  # a data worker may not be there yet
            wait_until(lambda: victim(killed, who), process, f"a {who}")  # noqa: B023
            if (target := victim(killed, who)) is not None:
                with suppress(psutil.NoSuchProcess):  # the run may end meanwhile
                    target.kill()
        if who == "fork server":  # its workers are alive: the run goes on
            killed.wait_for_update(killed.updates() + 2, process)
            process.send_signal(signal.SIGKILL)
        codes.append(finish(process).returncode)
        assert codes[-1] in (-signal.SIGKILL, 4, 0), (who, codes)
        killed.wait_until_gone()
    done = killed.run()
    assert done.returncode == 0, done.stderr
    assert len(codes) >= kills // 2
    assert killed.losses() == undisturbed.losses()
    # ranks write in the order of their clocks
    assert sorted(killed.handed()) == sorted(undisturbed.handed())
    assert killed.weights() == undisturbed.weights()
    assert ownerless_memory() == []
    equal = len(killed.losses())
    figures(f"{len(codes)} kills survived, {equal} of {equal} updates bit-equal, no process left")
