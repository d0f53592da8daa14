"""wav2vec 2.0 whose ranks share out the parameters: what DDP trains, resumed on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from speechtrain.checkpoint.checkpointer import Checkpointer

from .forked import Forks, Pretraining

STEPS = 20
RECIPE = [
    *("schedule=constant", "optimizer.lr=1e-3", "trainer.simulate_world=4", "trainer.validate_every=10"),
    *("trainer.clip=1", "trainer.ema=0.9", "trainer.keep=99"),
]
TOLERANCE = 1e-5


def continued(run: Pretraining, forks: Forks, ranks: int, steps: int, shard: str) -> None:
    """The same run up to ``steps``, on so many ranks."""
    base = run.arguments
    run.arguments = [
        *base,
        *(f"world_size={ranks}", f"trainer.max_steps={steps}", f"trainer.shard={shard}"),
        f"trainer.validate_every={steps if steps < STEPS else 10}",
    ]
    assert forks.run(run.write(), ranks) == [0] * ranks, run.result()
    run.arguments = base


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str], forks: Forks) -> Pretraining:
    """Two ranks that each hold everything."""
    run = Pretraining(tmp_path_factory.mktemp("whole") / "run", environment, *RECIPE)
    continued(run, forks, 2, STEPS, "none")
    return run


def assert_same(run: Pretraining, whole: Pretraining) -> None:
    """Same draws, losses, gradient norms, evaluations and evaluated weights."""
    assert run.drawn() == whole.drawn()
    ours, theirs = ({e["step"]: e for e in r.events("train")} for r in (run, whole))
    assert len(ours) == STEPS
    for step, expected in theirs.items():
        for name in ("loss", "grad_norm", "loss_contrastive", "code_perplexity"):
            assert ours[step][name] == pytest.approx(expected[name], rel=TOLERANCE), (step, name)
    assert run.result()["metrics"] == pytest.approx(whole.result()["metrics"], rel=TOLERANCE)
    weights, expected = (Checkpointer(r.run_dir).weights("last")[1] for r in (run, whole))
    assert weights.keys() == expected.keys()
    for name, value in weights.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5, msg=name)


def shares(checkpoint: Path) -> int:
    """How many files of shares a checkpoint has."""
    manifest = json.loads((checkpoint / "checkpoint.json").read_text())
    return sum(name.startswith("shards/") for name in manifest["files"])


def test_shares_train_what_the_whole_trains(
    whole: Pretraining, environment: dict[str, str], forks: Forks, tmp_path: Path
) -> None:
    run = Pretraining(tmp_path / "run", environment, *RECIPE)
    continued(run, forks, 2, STEPS, "parameters")
    assert_same(run, whole)
    assert [shares(checkpoint) for checkpoint in run.checkpoints()] == [2, 2]
    assert {shares(checkpoint) for checkpoint in whole.checkpoints()} == {0}
    assert not [e for e in run.events("warning") if "checkpoint" in e["message"]]


def test_another_world_goes_on_with_the_shares(
    whole: Pretraining, environment: dict[str, str], forks: Forks, tmp_path: Path
) -> None:
    run = Pretraining(tmp_path / "run", environment, *RECIPE)
    for ranks, steps in ((2, 5), (4, 10), (1, 15), (2, STEPS)):
        continued(run, forks, ranks, steps, "parameters")
    assert [shares(checkpoint) for checkpoint in run.checkpoints()] == [2, 4, 0, 2]
    assert [e["step"] for e in run.events("resume")] == [5, 10, 15]
    assert_same(run, whole)
