"""Kill -9 of any process of a run at random moments: the same command continues, bit by bit."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable

import psutil
import pytest

from ..integration.conftest import finish, wait_for
from .conftest import SLOW_DATA, Run

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
    ranks = run.ranks()
    first = [rank for rank in ranks if "RANK" not in rank.environ() or rank.environ()["RANK"] == "0"]
    found = {
        "rank": first,
        "second rank": [rank for rank in ranks if rank not in first],
        "data worker": run.data_workers(),
        "fork server": run.fork_servers(),
        "agent": run.agents(),
    }[who]
    return found[0] if found else None


@pytest.mark.parametrize("chain", CHAINS)
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
        wait_for(lambda: killed.updates() > before or process.poll() is not None)  # noqa: B023
        time.sleep(draw.uniform(0.0, 0.3))
        if process.poll() is not None:  # it has come to its end
            break
        if who == "command":
            process.kill()
        else:  # a data worker may not be there yet
            wait_for(lambda: victim(killed, who) or process.poll() is not None)  # noqa: B023
            if (found := victim(killed, who)) is not None:
                found.kill()
        if who == "fork server":  # its workers are alive: the run goes on
            reached = killed.updates() + 2
            wait_for(lambda: killed.updates() >= reached or process.poll() is not None)  # noqa: B023
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
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("torch_")]
    equal = len(killed.losses())
    figures(f"{len(codes)} kills survived, {equal} of {equal} updates bit-equal, no process left")
