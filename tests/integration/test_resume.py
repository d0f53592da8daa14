"""Kill -9 anywhere and continue: the same samples, bit-equal losses and weights, as if nothing had been."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable

import pytest

from .conftest import RECORDED, Command, finish, wait_for
from .forked import Forks

CHAINS = {
    "plain": ([], 4),
    "workers": (["data.workers=1", "trainer.accumulate=2", "trainer.max_steps=24"], 3),
    "no-average": (["trainer.ema=0.0", "trainer.save_every=1", "trainer.validate_every=4"], 3),
}
"""Overrides, and how often the run is killed: ten times in all."""


@pytest.mark.parametrize("chain", CHAINS)
def test_kills_leave_no_trace(command: Callable[..., Command], chain: str, forks: Forks) -> None:
    overrides, kills = CHAINS[chain]
    draw = random.Random(chain)
    undisturbed, killed = (command(name, *RECORDED, *overrides) for name in ("undisturbed", "killed"))
    assert forks.run(undisturbed.write()) == [0], undisturbed.result()

    steps = 24 if chain == "workers" else 30
    # the whole command once; its ranks alone from then on, as a launcher starts them
    parent = killed.start() if chain == "plain" else None
    config = killed.run_dir / "config.yaml" if parent else killed.write()
    # a kill in the last validation leaves no update to the rank after it
    for number, step in enumerate(sorted(draw.sample(range(1, steps - 8), kills))):
        before = len(killed.events("train"))
        process = None if number else parent
        if process is None:
            forks.start(config)
        wait_for(lambda: any(e["step"] >= step for e in killed.events("train")[before:]), process)  # noqa: B023
        time.sleep(draw.uniform(0.0, 0.1))  # within an update, a validation or a save
        os.kill(killed.pid(), signal.SIGKILL)
        if process is None:
            assert forks.wait() == [-signal.SIGKILL]
        else:
            ended = finish(process)
            assert ended.returncode == 4
            assert "the run was ended by SIGKILL" in ended.stderr
    assert forks.run(config) == [0], killed.result()

    assert sorted(undisturbed.losses()) == list(range(1, steps + 1))
    assert killed.losses() == undisturbed.losses()
    assert killed.handed() == undisturbed.handed()
    assert killed.weights() == undisturbed.weights()
    assert killed.result()["metrics"] == undisturbed.result()["metrics"]
    assert [c.name for c in killed.checkpoints()] == [c.name for c in undisturbed.checkpoints()]
    assert not list((killed.run_dir / "checkpoints").glob(".*"))  # nothing half-written stays behind


@pytest.mark.parametrize("limit", ["max_steps", "max_epochs"])
def test_a_finished_run_with_a_higher_limit_learns_on(command: Callable[..., Command], limit: str) -> None:
    """The command of docs/runs.md. The demo's learning rate has reached its end before."""
    limits = {"max_steps": ("trainer.max_steps=6", "trainer.max_steps=12")}
    limits["max_epochs"] = ("trainer.max_epochs=0.5", "trainer.max_epochs=1")  # of 12 updates
    first_limit, second_limit = limits[limit]
    run = command("run", "trainer.max_steps=null", "schedule.warmup_steps=2", "trainer.ema=0", first_limit)
    assert run.run_inline().returncode == 0
    weights = run.weights()
    run.arguments = [f"run_dir={run.run_dir}"]
    done = run.run_inline(second_limit)
    assert done.returncode == 0, done.stderr
    rates = {event["step"]: event["lr"] for event in run.events("train")}
    peak = max(rates.values())
    added = [rates[step] for step in range(7, 13)]
    assert max(added) > 0.4 * peak
    assert min(added) > 0
    assert added[-1] < 0.2 * peak
    assert run.weights() != weights
