"""The same seed gives the same losses, the losses of record, and every command the same score."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

from tests.support.golden import BANDS, GOLDEN, GOLDEN_OVERRIDES, STEPS

from .conftest import Command
from .forked import Forks


@pytest.mark.parametrize("precision", BANDS)
def test_golden_losses(command: Callable[..., Command], forks: Forks, precision: str) -> None:
    run = command("run", *GOLDEN_OVERRIDES, f"precision={precision}")
    if precision == "fp32":
        done = run.run()
        assert done.returncode == 0, done.stderr
    else:
        assert forks.run(run.write()) == [0], run.result()
    golden = np.loadtxt(GOLDEN / f"rnnt_small_{precision}.txt")
    first, last = BANDS[precision]
    band = np.linspace(first, last, STEPS)
    losses = np.array([run.losses()[int(step)] for step in golden[:, 0]])
    np.testing.assert_array_less(abs(losses / golden[:, 1] - 1), band)
    if precision == "fp32":
        again = command("again", *GOLDEN_OVERRIDES, "precision=fp32")
        assert forks.run(again.write()) == [0]
        assert again.losses() == run.losses()
        assert again.weights() == run.weights()


def test_the_result_is_of_the_checkpoint_that_is_used(command: Callable[..., Command], forks: Forks) -> None:
    """A learning rate that destroys the model makes the last validation worse than the first."""
    run = command("run", "trainer.max_steps=8", "trainer.validate_every=4", "schedule.warmup_steps=8")
    done = run.run_inline("optimizer.lr=3", "trainer.ema=0")
    assert done.returncode == 0, done.stderr
    first, last = run.events("valid")
    assert (first["wer"], first["loss"]) < (last["wer"], last["loss"])  # a tie: the loss decides
    result = run.result()
    assert (result["checkpoint"], result["steps"]) == ("step-00000004", 8)
    assert (result["metrics"]["loss"], result["last_metrics"]["loss"]) == (first["loss"], last["loss"])
    assert result["metric"] == first["wer"]
    assert "finished at step 8, best at step 4: unheard/" in done.stdout
    (run.run_dir / "result.json").unlink()
    assert forks.run(run.run_dir / "config.yaml") == [0]  # the checkpoints alone say it
    assert run.result()["metrics"] == result["metrics"]


def test_a_target_ends_a_run_and_its_result_is_returned(
    command: Callable[..., Command], forks: Forks
) -> None:
    run = command("run", "trainer.target=5.0", "trainer.validate_every=4", "trainer.profile=2:3")
    assert run.run_inline().returncode == 0
    assert run.result()["status"] == "target"
    assert run.result()["steps"] == 4
    assert json.loads((run.run_dir / "profile-2-3.json").read_text())["traceEvents"]
    (run.run_dir / "result.json").unlink()  # killed before it could say so
    assert forks.run(run.run_dir / "config.yaml") == [0]
    assert (run.result()["status"], run.result()["steps"]) == ("target", 4)


def test_the_final_decoder_is_used_once_and_chooses_nothing(command: Callable[..., Command]) -> None:
    run = command(
        "run",
        "trainer.max_steps=12",
        "trainer.validate_every=6",
        "final_decoder=greedy",
        "final_decoder.max_symbols=1",
    )
    assert run.run_inline().returncode == 0
    sets = [event["set"] for event in run.events("valid")]
    assert sets == ["unheard", "unheard", "final/unheard"]
    metrics = run.result()["last_metrics"]
    assert metrics["final/unheard/loss"] == metrics["unheard/loss"]
    assert metrics["wer"] == metrics["unheard/wer"]
    texts = [event for event in run.events("examples") if event["set"] == "final/unheard"]
    assert texts[-1]["rows"]
    assert all(len(row["hypothesis"]) <= 1 for row in texts[-1]["rows"])
    run.arguments += ["trainer.max_steps=13", "decoder.max_symbols=2"]
    continued = run.run_inline()  # no decoder belongs to the run
    assert continued.returncode == 0, continued.stderr
