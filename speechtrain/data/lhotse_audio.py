"""Reads cuts that lhotse mixes and transforms. lhotse calls back to this package for files and new rates.

lhotse's own readers run a shell on some file names. Its filters for two rates without a common divisor need
gigabytes, and it caches every filter. So this module replaces the sources and the transforms of a cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.signal import resample_poly

from speechtrain.data.formats.lhotse_cuts import (
    MOST_SAMPLES,
    Samples,
    UnknownField,
    known_cut,
    largest_growth,
)
from speechtrain.data.lhotse_import import import_lhotse

import_lhotse()

from lhotse.audio import AudioSource  # noqa: E402
from lhotse.augmentation import AudioTransform, Resample, Speed  # noqa: E402
from lhotse.cut.set import deserialize_cut  # noqa: E402

Decode = Callable[[str, float, float | None], Samples]
"""A function of a path, a start and a duration, both in seconds (duration None: to the end of the file).

It returns samples (C, S).
"""

ChangeRate = Callable[[Samples, int, int], Samples]
"""A function of samples (S,), their rate and the new rate. It returns the resampled samples."""


def load_audio(cut: Mapping[str, Any], decode: Decode, change_rate: ChangeRate) -> tuple[Samples, int]:
    """Return the samples (C, S) of a cut in lhotse's JSON format, and their rate.

    Raises UnknownField for a cut that is unknown or too large, and every error of ``decode`` and lhotse.
    """
    lhotse_cut: Any = deserialize_cut(known_cut(cut))
    track_cuts = [track.cut for track in getattr(lhotse_cut, "tracks", ())]
    recordings = []
    for single_cut in track_cuts or [lhotse_cut]:
        if hasattr(single_cut, "recording"):
            recordings.append(single_cut.recording)
    # Transforms lengthen audio by this factor at most.
    growth = max((largest_growth(recording.to_dict()) for recording in recordings), default=1.0)
    read = _limit_samples(decode, growth)
    for recording in recordings:
        recording.sources = [
            _Source(source.type, source.channels, source.source, read=read) for source in recording.sources
        ]
    # A mixed cut can have transforms, and each recording.
    for transformed in (lhotse_cut, *recordings):
        transforms = getattr(transformed, "transforms", None)
        if transforms:
            transformed.transforms = [_Transform(transform, change_rate) for transform in transforms]
    return np.atleast_2d(lhotse_cut.load_audio()), int(lhotse_cut.sampling_rate)


def _limit_samples(decode: Decode, growth: float) -> Callable[..., Samples]:
    """Return ``decode`` with a limit.

    The function raises UnknownField when its calls have returned more than MOST_SAMPLES in total. Each sample
    counts ``growth`` times, because the transforms may lengthen the audio by this factor.
    """
    total = 0.0

    def read(*arguments: Any) -> Samples:
        nonlocal total
        samples = decode(*arguments)
        total += samples.size * growth
        if total > MOST_SAMPLES:
            raise UnknownField(f"its audio has {total:.0f} samples, the most are {MOST_SAMPLES}")
        return samples

    return read


@dataclass
class _Source(AudioSource):  # type: ignore[misc]
    """A source whose audio is read by the function ``read`` of path, start and duration in seconds."""

    read: Any = None

    def load_audio(self, offset: float = 0.0, duration: float | None = None, **_: object) -> Any:
        return self.read(self.source, offset, duration)


@dataclass
class _Transform(AudioTransform):  # type: ignore[misc]
    """Replaces the resampling in one of lhotse's transforms. Other transforms are lhotse's."""

    transform: Any
    change_rate: ChangeRate

    def __call__(self, samples: Samples, sampling_rate: int) -> Any:
        transform = self.transform
        if isinstance(transform, Speed):
            # To resample from ``factor`` times the real rate makes the audio ``factor`` times as fast.
            fast_rate = round(sampling_rate * transform.factor)
            return np.stack([self.change_rate(channel, fast_rate, sampling_rate) for channel in samples])
        if isinstance(transform, Resample):
            # lhotse calls the same function of scipy if torchaudio is missing.
            new_rate, rate = transform.target_sampling_rate, transform.source_sampling_rate
            return resample_poly(samples, new_rate, rate, axis=-1)
        return transform(samples, sampling_rate)

    def reverse_timestamps(self, *arguments: Any, **options: Any) -> Any:
        return self.transform.reverse_timestamps(*arguments, **options)
