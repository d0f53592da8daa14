"""Static shapes: a few fixed tensor sizes for all micro-batches, because devices compile each new size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from speechtrain.data.planned_lengths import Integers, PlannedLengths, Seconds, crop_samples

_LABEL_QUANTILE = 0.99  # A longer transcript uses the next longer shape, so that it does not widen its own.
_SLACK_SECONDS = 0.01  # Planned lengths are rounded.


class Shape(NamedTuple):
    """The fixed size of a micro-batch's tensors."""

    rows: int
    samples: int
    labels: int


def shape_table(
    lengths: PlannedLengths,
    rows: Callable[[float, int], int],
    count: int,
    slowest: int = 100,
    fastest: int = 100,
) -> list[Shape]:
    """Return at most ``count`` shapes that fit every cut at every speed, with lengths at quantiles.

    ``rows`` returns the rows of a batch by its seconds and labels. Speeds are percents. Lengths are multiples
    of 0.1 s and at most the crop. Label counts are multiples of 8, or 0 if batches do not depend on labels.
    """
    shapes: list[Shape] = []
    at_slowest = lengths.seconds * (100.0 / slowest)
    at_fastest = lengths.seconds * (100.0 / fastest)
    ends = _ends(lengths, count, at_slowest)
    below, labels = 0.0, 0
    for samples in ends:
        longest = samples / lengths.sample_rate
        if lengths.labels is not None:
            counts, share = lengths.label_counts, 1.0
            if samples < ends[-1]:
                counts = counts[(at_fastest <= longest) & (at_slowest > below)]
                share = _LABEL_QUANTILE
            if len(counts):
                widest = float(np.quantile(counts, share))
                labels = max(labels, math.ceil(widest / 8) * 8)
            labels = max(labels, 8)
        shapes.append(Shape(rows(longest, labels), samples, labels))
        below = longest
    return shapes


def _ends(lengths: PlannedLengths, count: int, at_slowest: Seconds) -> list[int]:
    """Return the samples of each shape, ascending."""
    if not count or not len(at_slowest):
        return []
    rate = lengths.sample_rate
    unit = max(1, rate // 10)
    quantiles = np.arange(1, count) / count
    edges = np.append(np.quantile(lengths.seconds, quantiles), at_slowest.max()) + _SLACK_SECONDS
    units = np.ceil(edges * rate / unit).astype(np.int64)
    ends = np.minimum(units * unit, crop_samples(lengths.crop_seconds, rate))
    return sorted(set(ends.tolist()))


def fit(shapes: Sequence[Shape], samples: Integers, labels: Integers) -> Integers:
    """Return the number of the first shape that fits each cut, in length and in labels."""
    by_length = np.searchsorted([shape.samples for shape in shapes], samples)
    by_labels = np.searchsorted([shape.labels for shape in shapes], labels)
    return np.minimum(np.maximum(by_length, by_labels), len(shapes) - 1).astype(np.int16)


def fill_shapes(numbers: Integers, shapes: Sequence[Shape]) -> tuple[Integers, Integers, Integers]:
    """Divide cuts into micro-batches by the numbers of their shapes.

    Returns the order of the cuts, the bounds of the micro-batches and the number of the shape of each. Only
    the last micro-batch of a shape may have fewer rows than the shape.
    """
    order = np.argsort(numbers, kind="stable")
    counts = np.bincount(numbers, minlength=len(shapes)).tolist()
    bounds, shape_numbers = [0], []
    for number, (shape, count) in enumerate(zip(shapes, counts, strict=True)):
        for begin in range(0, count, shape.rows):
            bounds.append(bounds[-1] + min(shape.rows, count - begin))
            shape_numbers.append(number)
    return order, np.array(bounds), np.array(shape_numbers, np.int16)
