"""wav2vec 2.0 on 1, 2 and 4 processes: same samples and masks, same gradients, same losses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from speechtrain.checkpoint.checkpointer import read_state

from .forked import Forks, Pretraining

STEPS = 20
ONCE = [
    *("optimizer=sgd", "optimizer.lr=0.05", "schedule=constant", f"trainer.max_steps={STEPS}"),
    *("trainer.simulate_world=4", "trainer.save_every=1", "trainer.keep=99", "trainer.validate_every=20"),
]
"""Momentum after the first update is its gradient."""


def trained(folder: Path, environment: dict[str, str], forks: Forks, ranks: int) -> Pretraining:
    """Four micro-batches an update, on so many processes."""
    run = Pretraining(folder / f"on-{ranks}", environment, *ONCE, f"world_size={ranks}")
    assert forks.run(run.write(), ranks) == [0] * ranks, run.result()
    return run


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str], forks: Forks) -> Pretraining:
    return trained(tmp_path_factory.mktemp("ranks"), environment, forks, 1)


def first_gradient(run: Pretraining) -> list[Tensor]:
    state = read_state(run.checkpoints()[0])
    kept = state["optimizer"]["state"]
    return [kept[number]["momentum_buffer"].double() for number in sorted(kept)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_four_micro_batches_are_the_same_on_any_number_of_ranks(
    ranks: int, alone: Pretraining, environment: dict[str, str], forks: Forks, tmp_path: Path
) -> None:
    run = trained(tmp_path, environment, forks, ranks)
    (start,) = run.events("start")
    assert (start["ranks"], start["accumulate"]) == (ranks, 4 // ranks)

    drawn = run.drawn()
    assert drawn == alone.drawn()
    assert len(drawn) == 4 * STEPS
    assert {"audio", "mask", "index", "negatives", "channel_mask", "keep"} < set(drawn[0, 0][2])
    kept = {step: sums["keep"] for step, _, sums in drawn.values()}
    assert all(sums["keep"] == kept[step] for step, _, sums in drawn.values()), "one draw for each update"
    assert len(set(kept.values())) > 2, "layers were dropped"

    ours, theirs = first_gradient(run), first_gradient(alone)
    largest = max(float(value.norm()) for value in theirs)
    for found, expected in zip(ours, theirs, strict=True):
        # what is zero but for rounding is measured against the largest
        assert float((found - expected).norm()) <= 1e-6 * max(float(expected.norm()), 1e-3 * largest)

    names = ("step", "loss", "grad_norm", "loss_contrastive", "accuracy", "code_perplexity", "temperature")
    figures = [np.array([[e[name] for name in names] for e in r.events("train")]) for r in (run, alone)]
    assert len(figures[0]) == STEPS
    print("largest difference of losses", np.abs(figures[0][:, 1] / figures[1][:, 1] - 1).max())
    np.testing.assert_allclose(figures[0][0], figures[1][0], rtol=1e-6)
    np.testing.assert_allclose(figures[0][:, 1], figures[1][:, 1], rtol=1e-5)
    np.testing.assert_allclose(figures[0], figures[1], rtol=1e-4)  # of a norm, a chip made 1.3e-5
    # A chip made a difference of 1.1e-5 in the diversity loss, which is 1 minus a number near 1.
    assert run.result()["metrics"] == pytest.approx(alone.result()["metrics"], rel=2e-5)
