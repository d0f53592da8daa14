"""The lengths of cuts by which batches are planned: seconds, samples and labels.

They are computed from the manifest, so planning reads no audio.
"""

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

    ``seconds`` (N,) are the durations in the manifest. ``labels`` (N,) are the label counts of the
    transcripts, or None if batches do not depend on labels. A transcript that cannot be encoded has the count
    -1, which becomes 0 in ``label_counts``. Speeds are percents: 110 is 10 % faster.
    """

    seconds: Seconds
    labels: Integers | None = None
    sample_rate: int = 16_000
    crop_seconds: float = math.inf

    def __post_init__(self) -> None:
        labels = self.labels
        if labels is None:
            labels = np.zeros(len(self.seconds), np.int32)
        self.label_counts: Integers = np.maximum(labels, 0)

    def seconds_of(self, cuts: Integers, percents: Integers) -> Seconds:
        """Return the seconds (M,) of the cuts with the numbers ``cuts`` (M,), at their speeds."""
        return np.minimum(self.seconds[cuts] * (100.0 / percents), self.crop_seconds)

    def samples_of(self, cuts: Integers, percents: Integers) -> Integers:
        """Return the samples (M,) of the cuts with the numbers ``cuts`` (M,), at their speeds."""
        samples = planned_samples(self.seconds[cuts], percents, self.sample_rate)
        return np.minimum(samples, crop_samples(self.crop_seconds, self.sample_rate))


def planned_samples(seconds: Seconds, percents: Integers | int, sample_rate: int) -> Integers:
    """Return the number of samples of each cut after the speed change.

    The loaded audio may differ by a few samples, because the durations are float32.
    """
    samples = np.rint(np.asarray(seconds, np.float64) * sample_rate)
    return np.ceil(samples * 100 / percents).astype(np.int64)


def crop_samples(seconds: float, sample_rate: int) -> int:
    """Return the largest number of samples after a crop. Infinite seconds mean no crop."""
    if math.isinf(seconds):
        return int(np.iinfo(np.int64).max)
    return max(1, round(seconds * sample_rate))
