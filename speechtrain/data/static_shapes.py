"""Static shapes: a few tensor sizes for all micro-batches. Some devices compile a graph for each new size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from speechtrain.data.planned_lengths import Integers, PlannedLengths, crop_samples

# The share of transcripts that a shape must fit. A transcript with more labels uses a longer shape, so that
# few long transcripts do not widen the label tensors of all batches.
_LABEL_QUANTILE = 0.99
_SLACK_SECONDS = 0.01  # added to each length, because planned lengths are rounded


class Shape(NamedTuple):
    """The fixed size of a micro-batch's tensors."""

    rows: int
    samples: int  # of each row
    labels: int  # of each row


def shape_table(
    lengths: PlannedLengths,
    max_rows: Callable[[float, int], int],
    count: int,
    slowest: int = 100,
    fastest: int = 100,
) -> list[Shape]:
    """Return at most ``count`` shapes, in ascending order of samples and labels, for all cuts at all speeds.

    ``max_rows`` returns the rows of a batch from the seconds and the labels of a row. ``slowest`` and
    ``fastest`` are speeds in percents. The samples of the shapes are at quantiles of the cuts' lengths, in
    multiples of 0.1 s, and at most the crop. Label counts are multiples of 8, or 0 if batches do not depend
    on labels.
    """
    if not count or not len(lengths.seconds):
        return []
    shapes: list[Shape] = []
    seconds_at_slowest = lengths.seconds * (100.0 / slowest)
    seconds_at_fastest = lengths.seconds * (100.0 / fastest)
    rate = lengths.sample_rate
    unit = max(1, rate // 10)  # samples of 0.1 s
    quantiles = np.arange(1, count) / count
    # The last shape must fit the longest cut at the lowest speed. The others are at the original speed.
    longest_seconds = np.append(np.quantile(lengths.seconds, quantiles), seconds_at_slowest.max())
    units = np.ceil((longest_seconds + _SLACK_SECONDS) * rate / unit).astype(np.int64)
    samples_of_shapes = np.minimum(units * unit, crop_samples(lengths.crop_seconds, rate))
    shape_samples = sorted(set(samples_of_shapes.tolist()))
    previous_seconds, labels = 0.0, 0
    for samples in shape_samples:
        seconds = samples / rate
        if lengths.labels is not None:
            # The last shape must fit every transcript. Each other shape fits nearly all transcripts of the
            # cuts that have the shape's length at some speed.
            label_counts, quantile = lengths.label_counts, 1.0
            if samples < shape_samples[-1]:
                can_fit = seconds_at_fastest <= seconds
                can_exceed_previous_shape = seconds_at_slowest > previous_seconds
                label_counts = label_counts[can_fit & can_exceed_previous_shape]
                quantile = _LABEL_QUANTILE
            if len(label_counts):
                quantile_labels = float(np.quantile(label_counts, quantile))
                labels = max(labels, math.ceil(quantile_labels / 8) * 8)
            labels = max(labels, 8)
        shapes.append(Shape(max_rows(seconds, labels), samples, labels))
        previous_seconds = seconds
    return shapes


def fitting_shapes(shapes: Sequence[Shape], samples: Integers, labels: Integers) -> Integers:
    """Return for each cut the position of the first shape that has its samples and its labels (N,)."""
    by_samples = np.searchsorted([shape.samples for shape in shapes], samples)
    by_labels = np.searchsorted([shape.labels for shape in shapes], labels)
    # Planned lengths are rounded, so a cut may exceed all shapes slightly. Such a cut uses the last shape.
    return np.minimum(np.maximum(by_samples, by_labels), len(shapes) - 1).astype(np.int16)


def fill_shapes(shapes_of_cuts: Integers, shapes: Sequence[Shape]) -> tuple[Integers, Integers, Integers]:
    """Divide cuts into micro-batches of fixed shapes. ``shapes_of_cuts`` (N,) are positions in ``shapes``.

    Returns the order (N,) of the cuts, and the bounds and the shape numbers of the micro-batches, as in
    ``EpochBatches``. Only the last micro-batch of a shape may have fewer rows than the shape.
    """
    order = np.argsort(shapes_of_cuts, kind="stable")
    cut_counts = np.bincount(shapes_of_cuts, minlength=len(shapes)).tolist()
    bounds, shape_numbers = [0], []
    for number, shape in enumerate(shapes):
        for begin in range(0, cut_counts[number], shape.rows):
            rows = min(shape.rows, cut_counts[number] - begin)
            bounds.append(bounds[-1] + rows)
            shape_numbers.append(number)
    return order, np.array(bounds), np.array(shape_numbers, np.int16)
