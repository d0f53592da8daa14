"""Both models on PyTorch's lazy tensors through the command: the CPU's losses, compiled once."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from .conftest import INLINE, STARTER, finish

EPOCHS, SHAPES, LOG_EVERY = 2, 2, 3
COMMON = [
    *("augment=none", "tracking=jsonl", "data.workers=0", f"trainer.log_every={LOG_EVERY}"),
    *("trainer.max_steps=null", f"trainer.max_epochs={EPOCHS}", "trainer.validate_every=4"),
    *("data.batch.count=2", "data.valid.unheard.utterances=2", f"data.shapes={SHAPES}"),
    *("device.threads=1", "device.autotune=false", "data.max_seconds=4"),
]
MODELS = {
    "rnnt": [
        *("recipe=demo", "schedule=constant", "schedule.warmup_steps=60"),
        *("data.train.utterances=8", "trainer.accumulate=1"),
        *("encoder.hidden=16", "encoder.features.mels=20", "model.prediction.hidden=16"),
        *("model.prediction.embedding=8", "model.joint.hidden=16", "decoder.max_symbols=20"),
        *("encoder.dropout=0", "model.prediction.dropout=0", "model.joint.dropout=0.1"),
        *("encoder.features.dither=0", "augment.warp=0", "trainer.ema=0.9"),
        "model.delay_penalty=0.01",
    ],
    "wav2vec2": [
        *("schedule=constant", "schedule.warmup_steps=100"),
        *("data.train.utterances=16", "trainer.accumulate=2"),
        *("model=wav2vec2_small", "data=digits", "model.target_dropout=0", "model.host_noise=true"),
        "model.fixed_width=true",
        *("encoder.width=32", "encoder.layers=2", "encoder.feed_forward=32", "encoder.position_kernel=16"),
        *("model.codes=16", "model.negatives=10", "encoder.position_groups=4", "encoder.layer_drop=0.2"),
        "encoder.conv_layers=[[8,10,5],[8,3,2],[8,3,2],[8,3,2],[8,3,2],[8,2,2],[8,2,2]]",
    ],
}
# What the warm-up compiles. Of micro-batches: the first update's, then one graph for each shape (and, with
# accumulation, for the later ones), and one behind an average that was swapped out. Of updates: the one that
# begins the optimizer's state, and the later ones. Of a checkpoint: one for each form of tensor that is read.
GRAPHS = {
    "rnnt": {"steps": (1 + SHAPES + 1) + 2, "evaluation": 16, "checkpoint": 12},
    "wav2vec2": {"steps": 2 * (1 + SHAPES) + 2, "evaluation": 3, "checkpoint": 26},
}


def events(run_dir: Path, overrides: list[str]) -> list[dict[str, Any]]:
    inline = () if "device=lazy" in overrides else INLINE
    command = [*overrides, *inline, f"run_dir={run_dir}"]
    done = finish(STARTER.start(command, {**os.environ, "OMP_NUM_THREADS": "1"}))
    assert done.returncode == 0, done.stderr
    return [json.loads(text) for text in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("model", MODELS)
def test_a_model_trains_on_the_lazy_device_as_on_the_cpu(model: str, tmp_path: Path) -> None:
    recipe = [*MODELS[model], *COMMON]
    lazy = events(tmp_path / "lazy", ["device=lazy", *[o for o in recipe if not o.startswith("device.")]])
    plain = events(tmp_path / "cpu", recipe)

    def of(found: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
        return [e for e in found if e["event"] == event]

    steps, theirs = of(lazy, "train"), of(plain, "train")
    assert len(steps) == len(theirs)
    assert steps[-1]["step"] >= 4 * EPOCHS
    for ours, other in zip(steps, theirs, strict=True):
        assert ours["loss"] == pytest.approx(other["loss"], rel=1e-5), ours["step"]
    for ours, other in zip(of(lazy, "valid"), of(plain, "valid"), strict=True):
        assert ours["loss"] == pytest.approx(other["loss"], rel=1e-5)
    (warm_up,) = of(lazy, "warm_up")
    assert warm_up["shapes"] == len(of(lazy, "start")[0]["shapes"]) == SHAPES
    assert {name: warm_up[f"graphs_{name}"] for name in GRAPHS[model]} == GRAPHS[model]
    assert {e["graphs"] for e in steps} == {sum(GRAPHS[model].values())}, "compiled after the warm-up"
    assert {e["fallbacks"] for e in steps} == {0}

    # a number read by the host would cut a graph in two: between two log lines, a graph runs for each
    # micro-batch and each update, and no other
    accumulate = of(lazy, "start")[0]["accumulate"]
    validated = {e["step"] for e in of(lazy, "valid")}
    compared = 0
    for before, after in itertools.pairwise(steps):
        if before["step"] not in validated and before["step"] % LOG_EVERY == 0:
            ran = after["cache_hits"] - before["cache_hits"]
            assert ran == (after["step"] - before["step"]) * (accumulate + 1)
            compared += 1
    assert compared >= 2
