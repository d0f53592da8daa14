"""The order of training: which cuts, at which speed, in which micro-batch. Its state is two integers.

An epoch's plan is a pure function of (seed, epoch). Vectorised numpy makes it before the epoch's first
batch, in 0.5 s for a million cuts. A resume therefore replays nothing, with any number of ranks and
workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speechtrain.batch import Footprint
from speechtrain.counter_rng import RunStream, addressed, uniform_at

Seconds = NDArray[np.floating[Any]]
Counts = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class BatchLimits:
    """Limits of a micro-batch: it is full if one more utterance would exceed any limit.

    The limits are ``count`` utterances, ``seconds`` of audio with padding, and ``memory_gib`` predicted
    by the model's footprint; null is no limit, and a rank replaces ``auto`` by what its device has free.
    An utterance that alone exceeds a limit is a batch of
    its own. Utterances are shuffled over the epoch and sorted by length within ``window`` batches,
    which are shuffled again: 1 is plain shuffling, more gives less padding and less randomness. A batch
    of at least ``multiple`` utterances has a multiple of it (fairseq: required_batch_size_multiple),
    except the last batch of a window or an epoch.
    """

    count: int | None = 8
    seconds: float | None = None
    memory_gib: float | str | None = None
    window: int = 20
    multiple: int = 1

    def __post_init__(self) -> None:
        limits = {"count": self.count, "seconds": self.seconds, "memory_gib": self.memory_gib}
        for name, limit in limits.items():
            if limit is not None and limit != "auto" and (isinstance(limit, str) or limit <= 0):
                raise ValueError(f"{name}={limit}: it must be above 0, or null for no limit")
        if all(limit is None for limit in limits.values()):
            raise ValueError("count, seconds and memory_gib are all null; set at least one")
        if self.window < 1:
            raise ValueError(f"window={self.window}: it must be at least 1 (plain shuffling)")
        if self.multiple < 1:
            raise ValueError(f"multiple={self.multiple}: it must be at least 1 (any number of utterances)")

    @property
    def bytes(self) -> float:
        """``memory_gib`` in bytes; infinite for no limit, and until ``auto`` is replaced."""
        return math.inf if isinstance(self.memory_gib, str | None) else self.memory_gib * 2**30

    def even(self, rows: int) -> int:
        """Round ``rows`` down to a multiple of ``multiple``; fewer than ``multiple`` are kept."""
        return rows // self.multiple * self.multiple if rows >= self.multiple else rows

    def rows(self, seconds: float, labels: float, footprint: Footprint) -> int:
        """Return the most rows of one (padded) length and number of labels in a batch; at least 1."""
        limits = [math.inf]
        if self.count is not None:
            limits.append(self.count)
        if seconds > 0:
            if self.seconds is not None:
                limits.append(self.seconds / seconds)
            if self.memory_gib is not None:
                row_bytes = max(footprint.bytes(1, seconds, math.ceil(labels)), 1.0)
                limits.append(self.bytes / row_bytes)
        # 16 rows of 1.1 s are 17.6 s in spite of rounding
        return self.even(max(1, int(min(min(limits), 2.0**31) * (1 + 1e-6))))


@dataclass(frozen=True)
class Shape:
    """The fixed size of a micro-batch's tensors."""

    rows: int
    samples: int
    labels: int


@dataclass(frozen=True)
class MicroBatch:
    """The content of one micro-batch: rows of the index, their speeds, and its number in the epoch."""

    rows: NDArray[np.int32]
    percents: NDArray[np.int16]  # speed factor × 100
    shape: Shape | None = None  # None: the size of the longest row
    epoch: int = 0
    index: int = 0
    passes: int | NDArray[np.int64] = 0  # how often each row has been used before


@dataclass(frozen=True)
class Plan:
    """All micro-batches of an epoch, as flat arrays."""

    epoch: int
    rows: NDArray[np.int32]
    percents: NDArray[np.int16]
    bounds: NDArray[np.int64]  # micro-batch i is rows[bounds[i]:bounds[i + 1]]
    buckets: NDArray[np.int16]  # into ``shapes``, one for each micro-batch; empty without shapes
    shapes: Sequence[Shape] = ()
    passes: int | NDArray[np.int64] = 0  # how often each row has been used before

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, index: int) -> MicroBatch:
        part = slice(int(self.bounds[index]), int(self.bounds[index + 1]))
        shape = self.shapes[int(self.buckets[index])] if self.shapes else None
        passes = self.passes if isinstance(self.passes, int) else self.passes[part]
        rows, percents = self.rows[part], self.percents[part]
        return MicroBatch(rows, percents, shape, epoch=self.epoch, index=index, passes=passes)


class Sampler:
    """Plans the micro-batches of a training set, epoch after epoch.

    ``seconds`` and ``keys`` describe the cuts; ``rows`` are their numbers in the index (ascending; None
    is all). ``labels`` are their label counts, needed for packing by memory and for shapes. ``speed`` is
    the lowest and the highest factor; each cut's factor is drawn from (seed, epoch, cut) on a grid of
    0.01. With ``shapes`` above 0, micro-batches have at most that many fixed shapes. No cut is planned
    longer than ``crop_seconds``; the loader crops it. With ``weights``, ``sets`` has the number of each
    cut's set, and an epoch has as many cuts as there are, of each set its share: the next ones of a
    shuffled pass through the set, then of another pass.
    """

    def __init__(
        self,
        *,
        seconds: Seconds,
        keys: NDArray[np.int64],
        seed: int,
        packing: BatchLimits,
        speed: Sequence[float] = (1.0, 1.0),
        rows: NDArray[np.int32] | None = None,
        labels: Counts | None = None,
        footprint: Footprint | None = None,
        shapes: int = 0,
        sample_rate: int = 16_000,
        crop_seconds: float | None = None,
        sets: NDArray[np.integer[Any]] | None = None,
        weights: Sequence[float] = (),
    ) -> None:
        if not len(seconds):
            raise ValueError("there are no cuts to draw from")
        self._sets: list[tuple[NDArray[np.int64], int]] = []
        if sets is not None and weights:
            counts = np.rint(len(seconds) * np.asarray(weights) / sum(weights)).astype(np.int64)
            members = [np.flatnonzero(sets == number) for number in range(len(weights))]
            self._sets = list(zip(members, np.maximum(counts, 1).tolist(), strict=True))
        self.seconds = np.asarray(seconds, np.float32)
        self.keys = keys
        self.rows = np.arange(len(seconds), dtype=np.int32) if rows is None else rows
        self.labels = np.zeros(len(seconds), np.int32) if labels is None else np.maximum(labels, 0)
        self.seed = seed
        self.packing = packing
        self.slowest, self.fastest = speed_grid(speed)
        self.footprint = check_footprint(packing, footprint)
        self.sample_rate = sample_rate
        self.crop_seconds = math.inf if crop_seconds is None else crop_seconds
        self.shapes: list[Shape] = []
        if shapes:
            given = None if labels is None else self.labels
            self.shapes = shape_table(
                self.seconds,
                given,
                packing,
                footprint=self.footprint,
                count=shapes,
                sample_rate=sample_rate,
                slowest=self.slowest,
                fastest=self.fastest,
                crop_seconds=self.crop_seconds,
            )
        self._plans: dict[int, Plan] = {}

    def plan(self, epoch: int) -> Plan:
        """Return the plan of an epoch; the last two are kept, because a global batch may span both."""
        if epoch not in self._plans:
            kept = sorted(self._plans)[-1:]
            self._plans = {number: self._plans[number] for number in kept} | {epoch: self._make(epoch)}
        return self._plans[epoch]

    def advance(self, epoch: int, position: int, count: int) -> tuple[int, int]:
        """Return the address ``count`` micro-batches after (epoch, position); never the end of an epoch."""
        position += count
        while position >= self.length(epoch):
            position -= self.length(epoch)
            epoch += 1
        return epoch, position

    def length(self, epoch: int) -> int:
        """Return the micro-batches of an epoch; with packing by count only, no plan is made."""
        if self.shapes or self.packing.count is None or self.packing.seconds or self.packing.memory_gib:
            return len(self.plan(epoch))
        cuts = sum(count for _, count in self._sets) if self._sets else len(self.keys)
        return -(-cuts // self.packing.even(self.packing.count))

    def micro_batches(self, epoch: int, position: int) -> Iterator[MicroBatch]:
        """Yield micro-batches from an address, over the ends of epochs, endlessly."""
        while True:
            plan = self.plan(epoch)
            while position < len(plan):
                yield plan[position]
                position += 1
            epoch, position = epoch + 1, 0

    @property
    def shares(self) -> list[float]:
        """The share of each set in an epoch; empty without weights."""
        total = sum(count for _, count in self._sets)
        return [count / total for _, count in self._sets]

    def _chosen(self, epoch: int) -> tuple[NDArray[np.int64] | None, int | NDArray[np.int64]]:
        """Return the positions of an epoch's cuts (None: all) and how often each has been used before."""
        if not self._sets:
            return None, epoch
        chosen, passes = [], []
        for members, count in self._sets:
            first, last = epoch * count, (epoch + 1) * count  # of all that are ever drawn from the set
            numbers = np.arange(first // len(members), -(-last // len(members)))[:, None]
            turns = addressed(self.seed, RunStream.SHARES, numbers, self.keys[members])
            begin = first % len(members)
            chosen.append(members[turns.argsort(axis=1, kind="stable")].ravel()[begin : begin + count])
            passes.append(np.repeat(numbers, len(members))[begin : begin + count])
        return np.concatenate(chosen), np.concatenate(passes)

    def _percents(self, keys: NDArray[np.int64], passes: int | NDArray[np.int64]) -> NDArray[np.int16]:
        """Return the speed factor × 100 of each cut."""
        choices = self.fastest - self.slowest + 1
        if choices == 1:
            return np.full(len(keys), self.slowest, np.int16)
        draws = uniform_at(self.seed, RunStream.SPEED, passes, keys)
        return (self.slowest + (draws * choices).astype(np.int16)).astype(np.int16)

    def sizes(self, epoch: int) -> NDArray[np.int64]:
        """Return the planned samples of each micro-batch's audio tensor, with padding and padding rows."""
        plan = self.plan(epoch)
        if plan.shapes:
            return np.array([shape.rows * shape.samples for shape in plan.shapes], np.int64)[plan.buckets]
        # with a crop, rows are cropped to the shortest of the batch; else padded to the longest
        ends = np.maximum if math.isinf(self.crop_seconds) else np.minimum
        lengths: NDArray[np.int64] = ends.reduceat(self._planned(plan), plan.bounds[:-1])
        return lengths * np.diff(plan.bounds)

    def waste(self, epoch: int) -> tuple[float, float]:
        """Return the share of an epoch's tensors that is padding, and the cropped share of its audio."""
        plan = self.plan(epoch)
        whole = planned_samples(self._seconds(plan), plan.percents, self.sample_rate).sum()
        size = int(self.sizes(epoch).sum())
        if math.isinf(self.crop_seconds):
            return 1.0 - int(whole) / size, 0.0
        kept = int(self._planned(plan).sum()) if plan.shapes else size
        return 1.0 - kept / size, 1.0 - kept / int(whole)

    def _seconds(self, plan: Plan) -> Seconds:
        return self.seconds[np.searchsorted(self.rows, plan.rows)]

    def _planned(self, plan: Plan) -> NDArray[np.int64]:
        return self._samples(self._seconds(plan), plan.percents)

    def _samples(self, seconds: Seconds, percents: Counts) -> NDArray[np.int64]:
        """Return the samples of each cut after speed change and crop."""
        samples = planned_samples(seconds, percents, self.sample_rate)
        return np.minimum(samples, crop_samples(self.crop_seconds, self.sample_rate))

    def _make(self, epoch: int) -> Plan:
        chosen, passes = self._chosen(epoch)
        keys = self.keys if chosen is None else self.keys[chosen]
        order = np.argsort(addressed(self.seed, RunStream.ORDER, passes, keys), kind="stable")
        percents, cuts = self._percents(keys, passes)[order], order if chosen is None else chosen[order]
        seconds = np.minimum(self.seconds[cuts] * (100.0 / percents), self.crop_seconds)
        labels = self.labels[cuts]
        if self.shapes:
            samples = self._samples(self.seconds[cuts], percents)
            again, bounds, bucket_of = _fill_shapes(fit(self.shapes, samples, labels), self.shapes)
        else:
            mean, mean_labels = float(seconds.mean()), float(labels.mean())
            width = self.packing.window * self.packing.rows(mean, mean_labels, self.footprint)
            again = np.lexsort((-seconds, np.arange(len(seconds)) // width))
            bounds = pack(seconds[again], labels[again], self.packing, footprint=self.footprint, width=width)
            bucket_of = np.zeros(0, np.int16)
        numbers = np.arange(len(bounds) - 1)
        turn = np.argsort(addressed(self.seed, RunStream.BATCHES, epoch, numbers), kind="stable")
        shuffled, bounds = _reorder(bounds, turn)
        turns = again[shuffled]
        return Plan(
            epoch,
            bounds=bounds,
            shapes=self.shapes,
            rows=self.rows[cuts[turns]],
            percents=percents[turns],
            buckets=bucket_of[turn] if self.shapes else bucket_of,
            passes=passes if isinstance(passes, int) else passes[order[turns]],
        )


def evaluation_plan(
    seconds: Seconds,
    labels: Counts | None,
    packing: BatchLimits,
    footprint: Footprint | None = None,
    shapes: int = 0,
    sample_rate: int = 16_000,
) -> Plan:
    """Plan every cut once, longest first: little padding, and a lack of memory shows at the start."""
    footprint = check_footprint(packing, footprint)
    given = None if labels is None else np.maximum(labels, 0)
    labels = np.zeros(len(seconds), np.int32) if given is None else given
    order = np.argsort(-np.asarray(seconds), kind="stable")
    percents = np.full(len(seconds), 100, np.int16)
    if not shapes or not len(seconds):
        bounds = pack(seconds[order], labels[order], packing, footprint=footprint, width=max(1, len(seconds)))
        return Plan(0, order.astype(np.int32), percents, bounds=bounds, buckets=np.zeros(0, np.int16))
    table = shape_table(seconds, given, packing, footprint=footprint, count=shapes, sample_rate=sample_rate)
    buckets = fit(table, planned_samples(seconds[order], percents, sample_rate), labels[order])
    again, bounds, bucket_of = _fill_shapes(buckets, table)
    return Plan(0, order[again].astype(np.int32), percents, bounds=bounds, buckets=bucket_of, shapes=table)


def speed_grid(speed: Sequence[float]) -> tuple[int, int]:
    """Return lowest and highest speed in hundredths. Raises ValueError for an invalid range."""
    if len(speed) != 2 or not 0.5 <= speed[0] <= speed[1] <= 2.0:
        raise ValueError(f"speed={list(speed)}: give the lowest and the highest factor, from 0.5 to 2")
    return round(speed[0] * 100), round(speed[1] * 100)


def check_footprint(packing: BatchLimits, footprint: Footprint | None) -> Footprint:
    """Return the footprint for packing. Raises ValueError if packing by memory has none."""
    footprint = footprint or Footprint(0.0)
    if packing.memory_gib is not None and footprint.per_second <= 0 and footprint.per_second_label <= 0:
        raise ValueError("memory_gib: this model does not predict its memory; use count or seconds")
    return footprint


def planned_samples(seconds: Seconds, percents: Counts | int, sample_rate: int) -> NDArray[np.int64]:
    """Return the samples of each cut after the speed change, within a few (float32 durations)."""
    samples = np.rint(np.asarray(seconds, np.float64) * sample_rate)
    return np.ceil(samples * 100 / percents).astype(np.int64)


def crop_samples(seconds: float, sample_rate: int) -> int:
    """Return the most samples after a crop; infinite seconds are no crop."""
    return int(np.iinfo(np.int64).max) if math.isinf(seconds) else max(1, round(seconds * sample_rate))


def pack(
    seconds: Seconds, labels: Counts, packing: BatchLimits, footprint: Footprint, width: int
) -> NDArray[np.int64]:
    """Return bounds of micro-batches over cuts that are sorted, longest first, in windows of ``width``.

    The first row of a batch is its longest, so one division gives the size of a batch; only packing by
    memory reads the labels of the following rows.
    """
    total = len(seconds)
    if packing.seconds is None and packing.memory_gib is None:
        assert packing.count is not None  # BatchLimits checks it; windows are multiples of it
        return np.append(np.arange(0, total, packing.even(packing.count)), total)
    longest = seconds.tolist()
    cap = packing.bytes
    bounds, begin = [0], 0
    while begin < total:
        room = min((begin // width + 1) * width, total) - begin
        # without labels: an upper bound, which the labels only lower
        size = min(room, packing.rows(longest[begin], 0, footprint))
        if footprint.per_second_label > 0 and cap < math.inf:
            most = np.maximum.accumulate(labels[begin : begin + size])
            per_row = longest[begin] * (footprint.per_second + most * footprint.per_second_label)
            size = max(1, int(np.searchsorted(np.arange(1, size + 1) * per_row, cap, side="right")))
        begin += packing.even(size)
        bounds.append(begin)
    return np.array(bounds, np.int64)


# --- static shapes ------------------------------------------------------------------------------

_LABEL_QUANTILE = 0.99  # longer transcripts use a longer shape: one of them does not widen all
_SLACK_SECONDS = 0.01  # added to planned lengths, because of rounding


def shape_table(
    seconds: Seconds,
    labels: Counts | None,
    packing: BatchLimits,
    footprint: Footprint,
    count: int,
    sample_rate: int,
    slowest: int = 100,
    fastest: int = 100,
    crop_seconds: float = math.inf,
) -> list[Shape]:
    """Return at most ``count`` shapes that fit every cut at every speed, with lengths at quantiles.

    Lengths are multiples of 0.1 s and at most the crop; label counts are multiples of 8, or all 0
    without ``labels``.
    """
    unit = max(1, sample_rate // 10)
    edges = np.quantile(seconds, np.arange(1, count) / count) if count > 1 else np.zeros(0)
    edges = np.append(edges, seconds.max() * (100.0 / slowest)) + _SLACK_SECONDS
    lengths = np.ceil(edges * sample_rate / unit).astype(np.int64) * unit
    lengths = np.unique(np.minimum(lengths, crop_samples(crop_seconds, sample_rate)))
    shapes: list[Shape] = []
    below, widest = 0.0, 0.0
    for samples in lengths.tolist():
        longest = samples / sample_rate
        if labels is None:
            shapes.append(Shape(packing.rows(longest, 0, footprint), samples, 0))
            continue
        here = (seconds * (100.0 / fastest) <= longest) & (seconds * (100.0 / slowest) > below)
        last = samples == lengths[-1]
        share = 1.0 if last else _LABEL_QUANTILE
        chosen = labels if last else labels[here]
        widest = max(widest, float(np.quantile(chosen, share)) if len(chosen) else 0.0)
        width = max(8, math.ceil(widest / 8) * 8)
        shapes.append(Shape(packing.rows(longest, width, footprint), samples, width))
        below = longest
    return shapes


def fit(shapes: Sequence[Shape], samples: NDArray[np.int64], labels: Counts) -> NDArray[np.int16]:
    """Return the first shape that fits each cut, in length and in labels."""
    by_length = np.searchsorted([shape.samples for shape in shapes], samples)
    by_labels = np.searchsorted([shape.labels for shape in shapes], labels)
    return np.minimum(np.maximum(by_length, by_labels), len(shapes) - 1).astype(np.int16)


def _fill_shapes(
    buckets: NDArray[np.int16], shapes: Sequence[Shape]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int16]]:
    """Return order of cuts, bounds and shapes of micro-batches; the last one of a shape may be smaller."""
    order = np.argsort(buckets, kind="stable")
    ends = np.searchsorted(buckets[order], np.arange(len(shapes)), side="right")
    begin, bounds, bucket_of = 0, [np.zeros(1, np.int64)], []
    for number, (shape, end) in enumerate(zip(shapes, ends.tolist(), strict=True)):
        if end > begin:
            bounds.append(np.append(np.arange(begin + shape.rows, end, shape.rows), end))
            bucket_of.append(np.full(len(bounds[-1]), number, np.int16))
        begin = end
    return order, np.concatenate(bounds), np.concatenate(bucket_of)


def _reorder(
    bounds: NDArray[np.int64], turn: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return positions of the cuts and new bounds for micro-batches in the order ``turn``."""
    sizes = np.diff(bounds)[turn]
    ends = np.cumsum(sizes)
    starts = bounds[:-1][turn]
    positions = np.repeat(starts - (ends - sizes), sizes) + np.arange(int(ends[-1]))
    return positions, np.append(0, ends)
