"""Speed perturbation of recordings: the factors of a training set, and the change of the samples."""

from __future__ import annotations

from collections.abc import Sequence

from speechtrain.data.audio import change_rate_fast
from speechtrain.data.formats.lhotse_cuts import Samples


def speed_grid(speed: Sequence[float]) -> tuple[int, int]:
    """Return the lowest and the highest speed in percents. Raises ValueError for an invalid range."""
    if len(speed) != 2 or not 0.5 <= speed[0] <= speed[1] <= 2.0:
        raise ValueError(f"speed={list(speed)}: give the lowest and the highest factor, from 0.5 to 2")
    return round(speed[0] * 100), round(speed[1] * 100)


def change_speed(samples: Samples, percent: int, sample_rate: int) -> Samples:
    """Return samples (S,) with the speed factor ``percent`` / 100, as ``ceil(S × 100 / percent)`` samples.

    The filter is short, as in torchaudio. An augmentation must be fast and does not need a steep filter.
    """
    return change_rate_fast(samples, round(sample_rate * percent / 100), sample_rate)
