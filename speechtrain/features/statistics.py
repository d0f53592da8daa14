"""Normalising each mel bin by its mean and deviation over the columns of an utterance.

The functions have the same arguments, and ``NORMALISATIONS`` has them by the names of ``normalise``:

- ``x`` (B, C, ..., M) has the log-mel columns of B rows.
- ``weight`` (B, C, ..., 1) is 1 for the columns of a row, and 0 for its padding.
- ``over_deviation`` is ``FrontEnd.over_deviation``.

Elements of weight 0 and constant bins become 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

# Of all bins of the loud columns, with samples in [-1, 1] and a log_floor of 2^-24: −7.5 and 3.1 for four
# hours of Mboshi, −7.6 and 3.5 for an hour of Cherokee, −8.9 and 3.4 for spoken digits. With those of all
# columns, which are −10 and 4.5, a network learns more slowly. Without constants, the zeros of padding and
# of masks would be louder than any speech.
_SPEECH_MEAN, _SPEECH_DEVIATION = -7.5, 3.2
_LOUD_NATS = 8.0  # 35 dB. The pauses of a usual recording are lower, and its weakest consonants are higher.

OverDeviation = Callable[[Tensor, Tensor, Tensor], Tensor]


def not_normalised(x: Tensor, weight: Tensor, over_deviation: OverDeviation) -> Tensor:
    """Return ``x`` as it is. A column then needs no other column."""
    return x * weight


def normalised_by_constants(x: Tensor, weight: Tensor, over_deviation: OverDeviation) -> Tensor:
    """Return ``x`` less the mean of usual speech, over its deviation. A column then needs no other column."""
    return (x - _SPEECH_MEAN) / _SPEECH_DEVIATION * weight


def normalised_by_all(x: Tensor, weight: Tensor, over_deviation: OverDeviation) -> Tensor:
    """Return ``x`` with mean 0 and deviation 1 over all columns of a row."""
    return _normalised(x, weight, weight, over_deviation)


def normalised_by_loud(x: Tensor, weight: Tensor, over_deviation: OverDeviation) -> Tensor:
    """Return ``x`` with mean 0 and deviation 1 over the loud columns of a row.

    Silence around an utterance then does not change the features of the utterance.
    """
    return _normalised(x, weight, loud_columns(x, weight), over_deviation)


def loud_columns(x: Tensor, weight: Tensor) -> Tensor:
    """Return 1 for the loud columns of ``x``, and 0 for the others, in the shape of ``weight``.

    A column is loud if the mean of its logarithms is at most 8 (35 dB) below the loudest column's.
    """
    level = x.mean(-1, keepdim=True)
    loudest = level.masked_fill(weight == 0, -math.inf).max(1, keepdim=True).values
    return weight * (level > loudest - _LOUD_NATS)


def _normalised(x: Tensor, weight: Tensor, counted: Tensor, over_deviation: OverDeviation) -> Tensor:
    """Return ``x`` with mean 0 and deviation 1 over the columns for which ``counted`` is 1."""
    # Without this subtraction, the rounded mean of a constant bin could differ from its values.
    x = (x - x[:, :1]) * weight
    count = counted.sum(1, keepdim=True).clamp(min=1.0)
    mean = (x * counted).sum(1, keepdim=True) / count
    x = (x - mean) * weight
    squares = (x * counted).square().sum(1, keepdim=True)
    return over_deviation(x, squares, count)


NORMALISATIONS = {
    "all": normalised_by_all,
    "loud": normalised_by_loud,
    "fixed": normalised_by_constants,
    "none": not_normalised,
}
OF_COLUMNS = ("fixed", "none")
"""The names in NORMALISATIONS that read one column at a time, as a stream needs."""
