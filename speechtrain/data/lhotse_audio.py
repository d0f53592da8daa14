"""Audio that lhotse mixes and transforms, with files and resampling by functions of this package.

lhotse's own readers run a shell on some file names. Its filters for rates without a common divisor need
gigabytes, and it keeps all of them. So its recordings get the sources and transforms of this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from lhotse.audio import AudioSource
from lhotse.augmentation import AudioTransform, Resample, Speed
from lhotse.cut.set import deserialize_cut
from scipy.signal import resample_poly

from speechtrain.data.formats.lhotse_cuts import MOST_SAMPLES, Samples, UnknownPart, known_cut, largest_growth

Decode = Callable[[str, float, float | None], tuple[Samples, int]]
"""Returns samples (C, S) and their rate by a path, a start and a length in seconds (None: to the end)."""

ChangeRate = Callable[[Samples, int, int], Samples]
"""Resamples: returns samples by samples (S,), their rate and the new rate."""


def load_audio(cut: Mapping[str, Any], decode: Decode, change_rate: ChangeRate) -> tuple[Samples, int]:
    """Return audio (C, S) and rate of a cut that lhotse reads.

    Raises UnknownPart, and every error of ``decode`` and lhotse.
    """
    mixture: Any = deserialize_cut(known_cut(cut))
    parts = [track.cut for track in getattr(mixture, "tracks", ())] or [mixture]
    recordings = [part.recording for part in parts if hasattr(part, "recording")]
    factor = max((largest_growth(recording.to_dict()) for recording in recordings), default=1.0)
    read = _bounded(decode, factor)
    for recording in recordings:
        recording.sources = [
            _Source(source.type, source.channels, source.source, read=read) for source in recording.sources
        ]
    for transformed in (mixture, *recordings):
        transforms = getattr(transformed, "transforms", None)
        if transforms:
            transformed.transforms = [_Transform(transform, change_rate) for transform in transforms]
    return np.atleast_2d(mixture.load_audio()), int(mixture.sampling_rate)


def _bounded(decode: Decode, factor: float) -> Callable[..., Samples]:
    """Return ``decode`` without its rate, and with a limit for all its calls together.

    A sample counts ``factor`` times. More than MOST_SAMPLES raise UnknownPart.
    """
    total = 0.0

    def read(*arguments: Any) -> Samples:
        nonlocal total
        samples = decode(*arguments)[0]
        total += samples.size * factor
        if total > MOST_SAMPLES:
            raise UnknownPart(f"its audio has {total:.0f} samples, the most are {MOST_SAMPLES}")
        return samples

    return read


@dataclass
class _Source(AudioSource):  # type: ignore[misc]
    read: Any = None

    def load_audio(self, offset: float = 0.0, duration: float | None = None, **_: object) -> Any:
        return self.read(self.source, offset, duration)


@dataclass
class _Transform(AudioTransform):  # type: ignore[misc]
    transform: Any
    change_rate: ChangeRate

    def __call__(self, samples: Samples, sampling_rate: int) -> Any:
        transform = self.transform
        if isinstance(transform, Speed):
            rate = round(sampling_rate * transform.factor)
            return np.stack([self.change_rate(channel, rate, sampling_rate) for channel in samples])
        if isinstance(transform, Resample):  # as lhotse does without torchaudio
            rates = transform.target_sampling_rate, transform.source_sampling_rate
            return resample_poly(samples, *rates, axis=-1)
        return transform(samples, sampling_rate)

    def reverse_timestamps(self, *arguments: Any, **options: Any) -> Any:
        return self.transform.reverse_timestamps(*arguments, **options)
