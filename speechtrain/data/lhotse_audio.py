"""Audio that lhotse mixes and transforms, with files and changes of rate by functions of this package.

lhotse's own readers run a shell on some file names. Its filters for rates without a common divisor have
gigabytes, and it keeps them all. So its recordings get the sources and transforms below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from lhotse.audio import AudioSource, DurationMismatchError, get_audio_duration_mismatch_tolerance
from lhotse.augmentation import AudioTransform, Resample, Speed
from lhotse.cut.set import deserialize_cut
from lhotse.utils import is_torchaudio_available

from speechtrain.data.lhotse_cuts import MOST_SAMPLES, Samples, UnknownPart, growth, known_cut

Decode = Callable[[str, float, float | None], tuple[Samples, int]]
"""From a path, a start and a length in seconds (None: to the end) to samples (C, S) and their rate."""

ChangeRate = Callable[[Samples, int, int], Samples]
"""From samples (S,), their rate and the new rate to samples of the new rate."""


def load_audio(cut: Mapping[str, Any], decode: Decode, change_rate: ChangeRate) -> tuple[Samples, int]:
    """Return audio (C, S) and rate of a cut that lhotse reads.

    Raises UnknownPart, and whatever ``decode`` or lhotse raise.
    """
    mixture: Any = deserialize_cut(known_cut(cut))
    parts = [track.cut for track in getattr(mixture, "tracks", ())] or [mixture]
    recordings = [part.recording for part in parts if hasattr(part, "recording")]
    reader = _Reader(decode, max((growth(recording.to_dict()) for recording in recordings), default=1.0))
    for recording in recordings:
        recording.sources = [_Source(s.type, s.channels, s.source, reader=reader) for s in recording.sources]
    for holder in (mixture, *recordings):
        if transforms := getattr(holder, "transforms", None):
            holder.transforms = [_with_change_rate(transform, change_rate) for transform in transforms]
    return np.atleast_2d(mixture.load_audio()), int(mixture.sampling_rate)


@dataclass
class _Reader:
    """Decodes the files of one cut within the limit of its samples."""

    decode: Decode
    growth: float
    samples: float = 0.0

    def read(self, path: str, offset: float, duration: float | None) -> Samples:
        audio, rate = self.decode(path, offset, duration)
        self.samples += audio.size * self.growth
        if self.samples > MOST_SAMPLES:
            raise UnknownPart(f"its audio has {self.samples:.0f} samples, the most are {MOST_SAMPLES}")
        seconds = audio.shape[1] / rate
        if duration is not None and seconds < duration - get_audio_duration_mismatch_tolerance():
            raise DurationMismatchError(f"{path}: it has {seconds:g} s, and the cut needs {duration:g} s")
        return audio


@dataclass
class _Source(AudioSource):  # type: ignore[misc]
    reader: Any = None

    def load_audio(self, offset: float = 0.0, duration: float | None = None, **_: object) -> Samples:
        return self.reader.read(self.source, offset, duration)  # type: ignore[no-any-return]


@dataclass
class _Transform(AudioTransform):  # type: ignore[misc]
    """A change of speed or rate of lhotse's, computed by ``change_rate``."""

    transform: Any
    change_rate: ChangeRate

    def __call__(self, samples: Samples, sampling_rate: int) -> Samples:
        if isinstance(self.transform, Speed):
            rates = round(sampling_rate * self.transform.factor), sampling_rate
        else:
            rates = self.transform.source_sampling_rate, self.transform.target_sampling_rate
        return np.stack([self.change_rate(channel, *rates) for channel in samples])

    def reverse_timestamps(self, *arguments: Any, **options: Any) -> Any:
        return self.transform.reverse_timestamps(*arguments, **options)


def _with_change_rate(transform: Any, change_rate: ChangeRate) -> Any:
    # Without torchaudio, lhotse's Resample is a short filter of scipy, which is left as it is.
    is_large = isinstance(transform, Speed) or (isinstance(transform, Resample) and is_torchaudio_available())
    return _Transform(transform, change_rate) if is_large else transform
