"""The lengths of cuts by their manifest, for the plan of batches: seconds, samples and labels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.floating[Any]]
Integers = NDArray[Any]


@dataclass
class PlannedLengths:
    """The lengths of cuts after the speed change and the crop.

    ``seconds`` (N,) are the durations of the manifest. ``labels`` (N,) are the label counts of the
    transcripts, or None if batches do not depend on labels. A negative count stands for a transcript that
    cannot be encoded, and counts as 0. Speeds are percents: 110 is 10 % faster.
    """

    seconds: Seconds
    labels: Integers | None = None
    sample_rate: int = 16_000
    crop_seconds: float = math.inf

    def __post_init__(self) -> None:
        counts = np.zeros(len(self.seconds), np.int32) if self.labels is None else self.labels
        self.label_counts: Integers = np.maximum(counts, 0)

    def seconds_of(self, cuts: Integers, percents: Integers) -> Seconds:
        """Return the seconds of each of ``cuts`` at its speed."""
        return np.minimum(self.seconds[cuts] * (100.0 / percents), self.crop_seconds)

    def samples_of(self, cuts: Integers, percents: Integers) -> Integers:
        """Return the samples of each of ``cuts`` at its speed."""
        samples = planned_samples(self.seconds[cuts], percents, self.sample_rate)
        return np.minimum(samples, crop_samples(self.crop_seconds, self.sample_rate))


def planned_samples(seconds: Seconds, percents: Integers | int, sample_rate: int) -> Integers:
    """Return the samples of each cut after the speed change, within a few, as durations are float32."""
    samples = np.rint(np.asarray(seconds, np.float64) * sample_rate)
    return np.ceil(samples * 100 / percents).astype(np.int64)


def crop_samples(seconds: float, sample_rate: int) -> int:
    """Return the maximum samples after a crop. Infinite seconds stand for no crop."""
    return int(np.iinfo(np.int64).max) if math.isinf(seconds) else max(1, round(seconds * sample_rate))
