"""Writes Shars as lhotse does."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

RATE = 16_000


def write_shar(
    folder: Path,
    count: int = 10,
    kind: str = "flac",
    shard_size: int | None = 4,
    channels: int = 1,
    name: str = "cut-{}",
    **fields: str,
) -> Path:
    """A Shar of ``count`` tones, written by lhotse from WAV files that are then removed."""
    from lhotse import CutSet, MonoCut, MultiCut, Recording, SupervisionSegment

    originals = folder / "originals"
    originals.mkdir(parents=True)
    cuts: list[Any] = []
    for i in range(count):
        seconds, path = 0.5 + 0.02 * i, originals / f"{i}.wav"
        wave = 0.3 * np.sin(np.arange(round(seconds * RATE)) * (0.05 + 0.01 * i))
        soundfile.write(path, np.stack([wave * (1 + c) / 2 for c in range(channels)], axis=1), RATE)
        recording, key = Recording.from_file(path), name.format(i)
        held: Any = 0 if channels == 1 else list(range(channels))
        said = SupervisionSegment(
            key, recording.id, 0.0, recording.duration, held, "one two", speaker=f"s{i % 2}"
        )
        kind_of = MonoCut if channels == 1 else MultiCut
        cuts.append(kind_of(key, 0.0, recording.duration, held, [said], recording=recording))
        cuts[-1].custom = {"mark": i}
    shar = folder / "shar"
    shar.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # soundfile's, of lhotse's own
        fields = fields or {"recording": kind}
        CutSet.from_cuts(cuts).to_shar(shar, fields=fields, shard_size=shard_size)
    shutil.rmtree(originals)
    return shar
