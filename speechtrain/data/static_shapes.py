"""Static shapes: a few tensor sizes for all micro-batches, because some devices compile each new size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from speechtrain.data.planned_lengths import Integers, PlannedLengths, Seconds, crop_samples

_LABEL_QUANTILE = 0.99  # A longer transcript uses the next longer shape, so that it does not widen its own.
_SLACK_SECONDS = 0.01  # This is added to each length, because planned lengths are rounded.


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
    """Return at most ``count`` shapes, ascending, that fit every cut at every speed.

    ``rows`` returns the rows of a batch by its seconds and labels. Speeds are percents. The lengths of the
    shapes are at quantiles of the cuts' lengths, in multiples of 0.1 s, and at most the crop. Label counts
    are multiples of 8, or 0 if batches do not depend on labels.
    """
    shapes: list[Shape] = []
    longest_seconds = lengths.seconds * (100.0 / slowest)
    shortest_seconds = lengths.seconds * (100.0 / fastest)
    ends = _ends(lengths, count, longest_seconds)
    previous_seconds, labels = 0.0, 0
    for samples in ends:
        seconds = samples / lengths.sample_rate
        if lengths.labels is not None:
            # The last shape must fit every transcript. The others fit nearly all transcripts of the cuts that
            # have their length at some speed.
            label_counts, quantile = lengths.label_counts, 1.0
            if samples < ends[-1]:
                uses_shape = (shortest_seconds <= seconds) & (longest_seconds > previous_seconds)
                label_counts, quantile = label_counts[uses_shape], _LABEL_QUANTILE
            if len(label_counts):
                quantile_labels = float(np.quantile(label_counts, quantile))
                labels = max(labels, math.ceil(quantile_labels / 8) * 8)
            labels = max(labels, 8)
        shapes.append(Shape(rows(seconds, labels), samples, labels))
        previous_seconds = seconds
    return shapes


def _ends(lengths: PlannedLengths, count: int, longest_seconds: Seconds) -> list[int]:
    """Return the samples of each shape, ascending. ``longest_seconds`` (N,) are at the lowest speed."""
    if not count or not len(longest_seconds):
        return []
    rate = lengths.sample_rate
    unit = max(1, rate // 10)
    quantiles = np.arange(1, count) / count
    edges = np.append(np.quantile(lengths.seconds, quantiles), longest_seconds.max()) + _SLACK_SECONDS
    units = np.ceil(edges * rate / unit).astype(np.int64)
    ends = np.minimum(units * unit, crop_samples(lengths.crop_seconds, rate))
    return sorted(set(ends.tolist()))


def fitting_shapes(shapes: Sequence[Shape], samples: Integers, labels: Integers) -> Integers:
    """Return the number of the first shape that fits each cut, in length and in labels."""
    by_length = np.searchsorted([shape.samples for shape in shapes], samples)
    by_labels = np.searchsorted([shape.labels for shape in shapes], labels)
    return np.minimum(np.maximum(by_length, by_labels), len(shapes) - 1).astype(np.int16)


def fill_shapes(numbers: Integers, shapes: Sequence[Shape]) -> tuple[Integers, Integers, Integers]:
    """Divide cuts into micro-batches by the numbers of their shapes.

    Returns the order of the cuts, the bounds of the micro-batches and the shape number of each micro-batch.
    Only the last micro-batch of a shape may have fewer rows than the shape.
    """
    order = np.argsort(numbers, kind="stable")
    counts = np.bincount(numbers, minlength=len(shapes)).tolist()
    bounds, shape_numbers = [0], []
    for number, (shape, count) in enumerate(zip(shapes, counts, strict=True)):
        for begin in range(0, count, shape.rows):
            bounds.append(bounds[-1] + min(shape.rows, count - begin))
            shape_numbers.append(number)
    return order, np.array(bounds), np.array(shape_numbers, np.int16)
