"""Keys of a tiny run, and a run that has not trained."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

TINY = (
    *("recipe=demo", "device.threads=1", "trainer.max_steps=2", "data.workers=0"),
    *("data.train.utterances=16", "data.valid.unheard.utterances=4", "decoder.max_symbols=40"),
    *(
        "encoder.hidden=16",
        "model.prediction.hidden=16",
        "model.prediction.embedding=8",
        "model.joint.hidden=16",
    ),
)

SMALL_ENCODERS = {
    "fastconformer_tiny": (
        *("encoder.layers=1", "encoder.width=16", "encoder.heads=2", "encoder.feed_forward=16"),
        "encoder.channels=8",
    ),
    "contextnet_tiny": (
        "encoder.filters=16",
        "encoder.blocks=[{repeat: 1, residual: false, stride: 2}, {stride: 2}]",
    ),
    "quartznet_tiny": (
        "encoder.filters=16",
        "encoder.blocks=[{kernel: 11, repeat: 1, residual: false, stride: 2}, {kernel: 11, stride: 2}]",
    ),
    "wav2vec2_small": ("encoder.layers=1", "encoder.width=32", "encoder.feed_forward=32"),
}
"""Keys that leave one or two blocks of an encoder, because torch writes a graph operation by operation."""


def small_encoder(choice: str) -> list[str]:
    """Return the overrides of a small encoder of this choice."""
    return [f"encoder={choice}", *SMALL_ENCODERS[choice]]


STREAMING = (
    *TINY[:6],
    *small_encoder("fastconformer_tiny"),
    *("encoder.causal=true", "encoder.features.normalise=none", "encoder.contexts=[[16,1,0],[16,4,0],null]"),
    *("model.prediction.hidden=16", "model.prediction.embedding=8", "model.joint.hidden=16"),
)
"""Keys of a tiny run that can stream."""


def end_of_program(path: Path, *arguments: str) -> int | str | None:
    """Run a program of Python in this process. Return its exit code, or the line of a failure."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(path), *arguments])
        patch.syspath_prepend(str(path.parent))  # as Python does
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(path), run_name="__main__")
    return end.value.code


def untrained(folder: Path, *overrides: str) -> Path:
    """A run that has saved its initial weights and has not trained."""
    from speechtrain.checkpoint.checkpointer import Checkpointer
    from speechtrain.rank.build import build_task
    from speechtrain.start.compose import compose
    from speechtrain.start.resolved import dump
    from speechtrain.start.run_config import run_config
    from tests.support.composed import composed

    if any(override.startswith("init_from=") for override in overrides):
        config = compose([*overrides])
    else:
        config = composed(*overrides)
    config.run_dir = str(folder)
    task, tokenizer = build_task(run_config(config))
    Checkpointer(folder).save(1, {"task": task}, task.state_dict())
    (folder / "config.yaml").write_text(dump(config))
    tokenizer.save(str(folder))
    return folder
