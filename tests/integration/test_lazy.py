"""Both models on PyTorch's lazy tensors through the command: the CPU's losses, compiled once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EPOCHS = 3
COMMON = [
    *("augment=none", "tracking=jsonl", "data.workers=0", "trainer.log_every=1", "schedule=constant"),
    *("trainer.max_steps=null", f"trainer.max_epochs={EPOCHS}", "trainer.validate_every=4"),
    *("data.batch.count=2", "data.train.utterances=8", "data.valid.unheard.utterances=2", "data.shapes=2"),
    *("device.threads=1", "data.max_seconds=4"),
]
MODELS = {
    "rnnt": [
        *("recipe=demo", "encoder.hidden=16", "encoder.features.mels=20", "model.prediction_hidden=16"),
        *("model.prediction_embedding=8", "model.joint_hidden=16", "model.max_symbols=20"),
        *("encoder.dropout=0", "model.prediction_dropout=0", "model.joint_dropout=0"),
        *("encoder.features.dither=0", "augment.warp=0", "trainer.ema=0.9"),
    ],
    "wav2vec2": [
        *("model=wav2vec2_small", "data=digits", "model.target_dropout=0", "model.host_noise=true"),
        "model.fixed_width=true",
        *("encoder.width=32", "encoder.layers=2", "encoder.feed_forward=32", "encoder.position_kernel=16"),
        *("model.codes=16", "model.negatives=10", "encoder.position_groups=4", "encoder.layer_drop=0.2"),
        "encoder.conv_layers=[[8,10,5],[8,3,2],[8,3,2],[8,3,2],[8,3,2],[8,2,2],[8,2,2]]",
    ],
}
MORE_GRAPHS = {"rnnt": 5, "wav2vec2": 1}


def events(run_dir: Path, overrides: list[str]) -> list[dict[str, Any]]:
    line = [sys.executable, "-m", "speechtrain.commands.train", *overrides, f"run_dir={run_dir}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, capture_output=True, text=True, timeout=600, check=False, env=environment)
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
    assert len(steps) == len(theirs) >= 4 * EPOCHS
    for ours, other in zip(steps, theirs, strict=True):
        assert ours["loss"] == pytest.approx(other["loss"], rel=1e-5), ours["step"]
    for ours, other in zip(of(lazy, "valid"), of(plain, "valid"), strict=True):
        assert ours["loss"] == pytest.approx(other["loss"], rel=1e-5)
    (warm_up,) = of(lazy, "warm_up")
    assert warm_up["shapes"] == len(of(lazy, "start")[0]["shapes"]) == 2
    # compiled before the first step: micro-batches, updates, evaluations. On top come the first real step of
    # each shape, and for the RNN-T one graph behind each validation, whose weights were swapped
    graphs = [warm_up["graphs"], *(e["graphs"] for e in steps)]
    assert graphs[-1] - graphs[0] <= MORE_GRAPHS[model]
    grown = [step for step in range(1, len(graphs)) if graphs[step] > graphs[step - 1]]
    assert set(grown) <= {1, 2, 5, 9}
    assert {e["fallbacks"] for e in steps} == {0}
    assert steps[-1]["cache_hits"] > steps[0]["cache_hits"] > 0
