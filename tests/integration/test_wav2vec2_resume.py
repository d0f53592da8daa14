"""wav2vec 2.0, killed anywhere and continued: bit-equal losses, weights, masks and temperatures."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from .conftest import finish, wait_for
from .forked import Forks, Pretraining

STEPS = 30
CHAINS = {
    "padded": (["trainer.accumulate=2", "schedule.warmup_steps=8"], 4),
    "cropped": (["data.crop_seconds=0.6", "data.shapes=1", "model.fixed_width=true", "trainer.ema=0.9"], 4),
}
"""Overrides, and how often the run is killed."""
FREQUENT = [f"trainer.max_steps={STEPS}", "trainer.save_every=3", "trainer.validate_every=10"]


@pytest.mark.parametrize("chain", CHAINS)
def test_kills_leave_no_trace(chain: str, environment: dict[str, str], forks: Forks, tmp_path: Path) -> None:
    overrides, kills = CHAINS[chain]
    undisturbed, killed = (
        Pretraining(tmp_path / name, environment, *FREQUENT, *overrides) for name in ("undisturbed", "killed")
    )
    assert forks.run(undisturbed.write()) == [0], undisturbed.result()

    draw = random.Random(chain)
    # a kill in the last validation leaves no update to the rank after it
    steps = sorted(draw.sample(range(1, STEPS - 10), kills))
    # the whole command once; its ranks alone from then on, as a launcher starts them
    command = killed.start() if chain == "padded" else None
    config = killed.run_dir / "config.yaml" if command else killed.write()
    for number, step in enumerate(steps):
        before = len(killed.events("train"))
        process = None if number else command
        if process is None:
            forks.start(config)
        wait_for(lambda: any(e["step"] >= step for e in killed.events("train")[before:]), process)  # noqa: B023
        time.sleep(draw.uniform(0.0, 0.1))  # within an update, a validation or a save
        os.kill(killed.pid(), signal.SIGKILL)
        if process is None:
            assert forks.wait() == [-signal.SIGKILL]
        else:
            assert finish(process).returncode == 4
    assert forks.run(config) == [0], killed.result()

    assert sorted(undisturbed.losses()) == list(range(1, STEPS + 1))
    assert killed.losses() == undisturbed.losses()
    assert killed.drawn() == undisturbed.drawn()
    sums = [drawn for _, _, drawn in killed.drawn().values()]
    assert {"audio", "mask", "negatives", "temperature", "keep"} < set(sums[0])
    assert len({drawn["temperature"] for drawn in sums}) == STEPS
    assert killed.weights() == undisturbed.weights()
    assert killed.result()["metrics"] == undisturbed.result()["metrics"]
    assert [c.name for c in killed.checkpoints()] == [c.name for c in undisturbed.checkpoints()]
    assert not list((killed.run_dir / "checkpoints").glob(".*"))  # nothing half-written stays behind
