"""The overrides of a training of two updates, and a folder of recordings for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import soundfile

SMALL_TRAINING = (
    *("model=rnnt", "data=manifest", "device.threads=1", "data.workers=0", "trainer.max_steps=2"),
    *("decoder.max_symbols=9", "encoder.hidden=16", "model.prediction.hidden=16", "data.hold_out=0.3"),
    *("model.prediction.embedding=8", "model.joint.hidden=16", "tokenizer=auto", "tracking=none"),
    *("trainer.log_every=1", "launcher=local", "launcher.inline=true"),
)


def write_recordings(folder: Path, count: int) -> None:
    """Write ``count`` recordings of half a second of noise, with transcripts."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(count)
    for number in range(count):
        soundfile.write(folder / f"{number}.wav", generator.normal(0, 0.1, 8_000), 16_000)
        (folder / f"{number}.txt").write_text("yes no")
