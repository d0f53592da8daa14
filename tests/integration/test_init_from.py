"""What one run has learnt is where another begins: pretraining, then CTC on its encoder."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from .conftest import INLINE, STARTER, finish

TINY = [
    "encoder.conv_layers=[[16,10,5],[16,3,2],[16,3,2],[16,3,2],[16,3,2],[16,2,2],[16,2,2]]",
    *("encoder.width=32", "encoder.feed_forward=32", "encoder.layers=1", "encoder.position_kernel=16"),
    *("data.train.utterances=16", "data.valid.unheard.utterances=2", "data.workers=0"),
    *("device.threads=1", "device.autotune=false"),
    *("trainer.max_epochs=null", "trainer.log_every=1", "tracking=jsonl"),
]


def train(*overrides: str) -> subprocess.CompletedProcess[str]:
    return finish(STARTER.start([*TINY, *INLINE, *overrides], os.environ))


@pytest.fixture(scope="module")
def pretraining(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a pretraining run. No test writes there."""
    run_dir = tmp_path_factory.mktemp("first") / "pretrained"
    small = ["model.codes=24", "model.code_width=16", "model.final_width=16", "model.negatives=12"]
    process = train("model=wav2vec2_small", *small, "trainer.max_steps=2", f"run_dir={run_dir}")
    assert process.returncode == 0, process.stderr
    return run_dir


def test_finetuning_begins_with_a_run_of_either_kind(pretraining: Path, tmp_path: Path) -> None:
    own = ["recipe=finetune", "data=digits", "data.valid={}", "data.train.utterances=16", *TINY[-6:]]
    own += ["trainer.max_steps=4", "trainer.max_hours=null", "trainer.save_every=1", "trainer.keep=9"]
    own += ["trainer.ema=0"]

    def finetuned(begin: Path, run: str) -> tuple[dict[str, Any], Path]:
        done = finish(
            STARTER.start([*own, *INLINE, f"init_from={begin}", f"run_dir={tmp_path}/{run}"], os.environ)
        )
        assert done.returncode == 0, done.stderr
        lines = (tmp_path / run / "metrics.jsonl").read_text().splitlines()
        (start,) = [event for event in map(json.loads, lines) if event["event"] == "start"]
        return start, tmp_path / run / "checkpoints"

    start, steps = finetuned(pretraining, "ctc")
    assert start["fresh"] == 2
    assert "model.freeze_encoder_steps=0.3" in start["from data"]
    before = load_file(pretraining / "checkpoints/step-00000002/model.safetensors")
    name = "encoder.transformer.layers.0.attention.query.weight"
    same = [
        load_file(steps / f"step-{n:08d}/model.safetensors")[name].equal(before[name]) for n in (1, 2, 3, 4)
    ]
    assert same == [True, True, False, False]  # 0.3 of four updates are 1.2: the second begins before

    start, _ = finetuned(tmp_path / "ctc", "again")
    assert (start["fresh"], "labels kept" in start) == (0, False)
    own.append("tokenizer=characters")
    start, _ = finetuned(tmp_path / "ctc", "other")
    assert start["labels kept"].startswith("16 of 28 (fresh: 'a' 'b'")
