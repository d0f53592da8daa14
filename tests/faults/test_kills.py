"""After kill -9 of any process of a run at random moments, the same command continues bit for bit."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import psutil
import pytest

from ..integration.conftest import finish
from .conftest import SLOW_DATA, Run, wait_until

PLAN = ["trainer.max_steps=60", "trainer.save_every=4", "trainer.validate_every=20", "data.workers=1"]
VICTIMS_OF_ONE_RANK = ["command", "rank", "data worker", "fork server"]
VICTIMS_OF_TWO_RANKS = ["command", "rank", "second rank", "data worker", "agent"]


class Chain(NamedTuple):
    """A run that is killed ``kills`` times, each time at the next of ``victims``."""

    overrides: list[str]
    victims: list[str]
    kills: int


CHAINS = {
    "one-rank": Chain([], VICTIMS_OF_ONE_RANK, kills=12),
    "ctc": Chain(["model=ctc"], VICTIMS_OF_ONE_RANK, kills=4),
    "two-ranks": Chain(["world_size=2"], VICTIMS_OF_TWO_RANKS, kills=5),
}


def victim(run: Run, who: str) -> psutil.Process | None:
    """Return the process to kill. The test has the process of the command, because it started the command."""
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
    if chain == "ctc":  # These arguments are for model=rnnt.
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
        if process.poll() is not None:  # The run has finished.
            break
        if who == "command":
            process.kill()
        else:  # A data worker may not have started yet.
            wait_until(lambda: victim(killed, who), process, f"a {who}")  # noqa: B023
            if (target := victim(killed, who)) is not None:
                with suppress(psutil.NoSuchProcess):  # The run may end meanwhile.
                    target.kill()
        if who == "fork server":  # Its data workers are alive, so the run continues until the test ends it.
            killed.wait_for_update(killed.updates() + 2, process)
            process.kill()
        codes.append(finish(process).returncode)
        assert codes[-1] in (-signal.SIGKILL, 4, 0), (who, codes)
        killed.wait_until_gone()
    done = killed.run()
    assert done.returncode == 0, done.stderr
    assert len(codes) >= kills // 2
    assert killed.losses() == undisturbed.losses()
    # handed() lists the batches that training got. Two ranks write their batches in any order.
    assert sorted(killed.handed()) == sorted(undisturbed.handed())
    assert killed.weights() == undisturbed.weights()
    assert ownerless_memory() == []
    equal = len(killed.losses())
    figures(f"{len(codes)} kills survived, {equal} of {equal} updates bit-equal, no process left")
