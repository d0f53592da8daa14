"""A run that continues on 2, 4 and 1 processes in turn trains what one process does."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from speechtrain.config.resolved import dump
from speechtrain.runs.compose import compose

from .conftest import RECORDED, Command
from .forked import Forks

UPDATES = 5  # of each part
TOLERANCE = 1e-5
EXTRA = [
    *("trainer.simulate_world=4", "data.batch.count=2", "schedule=constant", *RECORDED[:1]),
    *("trainer.save_every=5000", "trainer.validate_every=5000"),
]


def train(run: Command, forks: Forks, ranks: int, steps: int) -> None:
    run.run_dir.mkdir(exist_ok=True)
    config = run.run_dir / "config.yaml"
    config.write_text(dump(compose([*run.arguments, f"world_size={ranks}", f"trainer.max_steps={steps}"])))
    assert forks.run(config, ranks) == [0] * ranks, run.result()


def test_other_worlds_continue_the_same_run(
    tmp_path: Path, environment: dict[str, str], forks: Forks
) -> None:
    alone = Command(tmp_path / "alone", environment, EXTRA)
    train(alone, forks, 1, 4 * UPDATES)
    run = Command(tmp_path / "run", environment, EXTRA)
    worlds = (1, 2, 4, 1)
    for number, ranks in enumerate(worlds):
        train(run, forks, ranks, UPDATES * (number + 1))

    assert [(e["ranks"], e["accumulate"]) for e in run.events("start")] == [(w, 4 // w) for w in worlds]
    assert [e["step"] for e in run.events("resume")] == [UPDATES, 2 * UPDATES, 3 * UPDATES]
    figures = [[[e["step"], e["loss"], e["grad_norm"]] for e in one.events("train")] for one in (run, alone)]
    np.testing.assert_allclose(*map(np.array, figures), rtol=TOLERANCE)
    assert len(figures[0]) == 4 * UPDATES
    assert sorted(run.handed()) == sorted(alone.handed())
    assert len(run.handed()) == 4 * 4 * UPDATES
    assert run.result()["metric"] == alone.result()["metric"]
