"""Samplers from flat arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from speechtrain.batch import Footprint
from speechtrain.data.planned_lengths import Integers, PlannedLengths, Seconds
from speechtrain.data.sampler import (
    BatchLimits,
    BatchSize,
    EpochBatches,
    RandomCuts,
    Sampler,
    evaluation_batches,
    weighted_sets,
)


def new_sampler(
    *,
    seconds: Seconds,
    keys: Integers,
    limits: BatchLimits,
    seed: int,
    labels: Integers | None = None,
    footprint: Footprint | None = None,
    speed: Sequence[float] = (1.0, 1.0),
    rows: Integers | None = None,
    shapes: int = 0,
    crop_seconds: float | None = None,
    sets: Integers | None = None,
    weights: Sequence[float] = (),
) -> Sampler:
    """A sampler of cuts of the given lengths at 16 kHz. ``sets`` has the number of each cut's set."""
    random_cuts = RandomCuts(seed, keys, speed)
    if sets is not None and weights:
        members = [np.flatnonzero(sets == number) for number in range(len(weights))]
        random_cuts = RandomCuts(seed, keys, speed, weighted_sets(members, weights))
    lengths = PlannedLengths(seconds, labels, crop_seconds=crop_seconds or math.inf)
    if rows is None:
        rows = np.arange(len(keys), dtype=np.int32)
    return Sampler(random_cuts, lengths, BatchSize(limits, footprint or Footprint(0.0), shapes), rows)


def new_evaluation(
    seconds: Seconds,
    labels: Integers | None,
    limits: BatchLimits,
    footprint: Footprint | None = None,
    shapes: int = 0,
    sample_rate: int = 16_000,
) -> EpochBatches:
    lengths = PlannedLengths(seconds, labels, sample_rate)
    return evaluation_batches(lengths, BatchSize(limits, footprint or Footprint(0.0), shapes))
