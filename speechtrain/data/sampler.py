"""The plan of the training batches.

The cuts of a batch have similar lengths, and the batch meets the limits of its size. Each batch has an
address of two integers: its epoch and its position in the epoch.

The plan of an epoch is a pure function of (seed, epoch). Numpy makes it before the first batch of the epoch,
in 0.5 s for a million cuts. So a resumed run replays nothing, with any number of ranks and workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from speechtrain.batch import Footprint
from speechtrain.counter_rng import RunStream, bits_at, uniform_at
from speechtrain.data.planned_lengths import Integers, PlannedLengths, Seconds, planned_samples
from speechtrain.data.speed import speed_grid
from speechtrain.data.static_shapes import Shape, fill_shapes, fitting_shapes, shape_table

# --- limits -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchLimits:
    """Limits of a micro-batch. It is full if one more utterance would exceed any limit.

    The limits are ``count`` utterances, ``seconds`` of audio with padding, and ``memory_gib`` predicted
    by the model's footprint. Null means unlimited. A rank replaces ``auto`` by the free memory of its device.
    An utterance that alone exceeds a limit has a batch to itself.

    Utterances are shuffled over the epoch and sorted by length within ``window`` batches. Then the batches
    are shuffled. A window of 1 is plain shuffling. A larger one gives less padding and less randomness. A
    batch of at least ``multiple`` utterances has a multiple of it (fairseq: required_batch_size_multiple),
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
            raise ValueError("count, seconds and memory_gib are all null. Set at least one")
        if self.window < 1:
            raise ValueError(f"window={self.window}: it must be at least 1 (plain shuffling)")
        if self.multiple < 1:
            raise ValueError(f"multiple={self.multiple}: it must be at least 1 (any number of utterances)")

    @property
    def bytes(self) -> float:
        """``memory_gib`` in bytes. It is infinite without a limit and until ``auto`` is replaced."""
        return math.inf if isinstance(self.memory_gib, str | None) else self.memory_gib * 2**30

    def round_down(self, rows: int) -> int:
        """Round ``rows`` down to a multiple of ``multiple``. Fewer than ``multiple`` rows are kept."""
        return rows // self.multiple * self.multiple if rows >= self.multiple else rows


@dataclass(frozen=True)
class BatchSize:
    """The number of rows of a batch by its limits and by the memory that the model predicts.

    With ``shapes`` above 0, batches have at most that many fixed shapes.
    """

    limits: BatchLimits
    footprint: Footprint
    shapes: int = 0

    def __post_init__(self) -> None:
        if self.shapes < 0:
            raise ValueError(f"shapes={self.shapes}: it must be at least 0 (no fixed shapes)")

    @property
    def depends_on_labels(self) -> bool:
        return bool(self.shapes) or self.limits.memory_gib is not None

    @property
    def fixed_rows(self) -> int:
        """The rows of every batch if ``count`` is the only limit, otherwise 0."""
        limits = self.limits
        if limits.count is None or limits.seconds or limits.memory_gib:
            return 0
        return limits.round_down(limits.count)

    def rows(self, seconds: float, labels: float = 0.0) -> int:
        """Return the maximum rows of a batch, at least 1.

        Each row has ``seconds`` with padding, and ``labels`` labels. Raises ValueError if memory is a limit
        and the model does not predict it.
        """
        limits, footprint = self.limits, self.footprint
        rows = 2.0**31
        if limits.count is not None:
            rows = min(rows, limits.count)
        if limits.seconds is not None and seconds > 0:
            rows = min(rows, limits.seconds / seconds)
        if limits.memory_gib is not None and seconds > 0:
            if footprint.per_second <= 0 and footprint.per_second_label <= 0:
                raise ValueError("memory_gib: this model does not predict its memory. Use count or seconds")
            row_bytes = max(footprint.bytes(1, seconds, math.ceil(labels)), 1.0)
            rows = min(rows, limits.bytes / row_bytes)
        # The factor makes up for rounding: 17.6 s have room for 16 rows of 1.1 s.
        whole_rows = int(rows * (1 + 1e-6))
        return limits.round_down(max(1, whole_rows))

    def next_rows(self, longest: float, labels: Integers) -> int:
        """Return the rows of the batch that begins with a cut of ``longest`` seconds.

        ``labels`` are the label counts of this cut and the following ones, none of which is longer.
        """
        count = min(len(labels), self.rows(longest))
        footprint = self.footprint
        if footprint.per_second_label > 0 and self.limits.bytes < math.inf:
            # Entry i of each array is for a batch of i + 1 rows. All its rows are as wide as the widest.
            most_labels = np.maximum.accumulate(labels[:count])
            row_bytes = longest * (footprint.per_second + most_labels * footprint.per_second_label)
            batch_bytes = np.arange(1, count + 1) * row_bytes
            # The bytes increase with the rows. So the position of the limit is the number of rows within it.
            rows_within_limit = int(np.searchsorted(batch_bytes, self.limits.bytes, side="right"))
            count = max(1, rows_within_limit)
        return self.limits.round_down(count)


# --- plan ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MicroBatch:
    """The content of one micro-batch: rows of the index, their speeds, and its number in the epoch."""

    rows: Integers  # row numbers of the cuts in the index
    percents: Integers  # speed factor × 100
    shape: Shape | None = None  # None: the size of the longest row
    epoch: int = 0
    index: int = 0
    passes: int | Integers = 0  # how often the run has used each row before, one number if all are equal


@dataclass(frozen=True)
class Plan:
    """All micro-batches of an epoch, as flat arrays."""

    epoch: int
    rows: Integers
    percents: Integers
    bounds: Integers  # micro-batch i is rows[bounds[i]:bounds[i + 1]]
    shape_numbers: Integers  # index in ``shapes`` of each micro-batch, empty without shapes
    shapes: Sequence[Shape] = ()
    passes: int | Integers = 0  # how often the run has used each row before, one number if all are equal

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, index: int) -> MicroBatch:
        span = slice(int(self.bounds[index]), int(self.bounds[index + 1]))
        shape = self.shapes[int(self.shape_numbers[index])] if self.shapes else None
        passes = self.passes if isinstance(self.passes, int) else self.passes[span]
        rows, percents = self.rows[span], self.percents[span]
        return MicroBatch(rows, percents, shape, epoch=self.epoch, index=index, passes=passes)


def _bucket(
    lengths: PlannedLengths,
    cuts: Integers,
    percents: Integers,
    size: BatchSize,
    shapes: Sequence[Shape],
    window: int = 0,
) -> tuple[Integers, Integers, Integers]:
    """Divide ``cuts`` into micro-batches of similar lengths.

    Returns the order of the cuts, the bounds of the micro-batches and the shape number of each micro-batch.
    Without ``shapes``, cuts are sorted within ``window`` batches. A window of 0 sorts all cuts.
    """
    labels = lengths.label_counts[cuts]
    if shapes:
        shape_numbers = fitting_shapes(shapes, lengths.samples_of(cuts, percents), labels)
        return fill_shapes(shape_numbers, shapes)
    seconds = lengths.seconds_of(cuts, percents)
    window_cuts = max(1, len(cuts))
    if window:
        window_cuts = window * size.rows(float(seconds.mean()), float(labels.mean()))
    window_numbers = np.arange(len(cuts)) // window_cuts
    order = np.lexsort((-seconds, window_numbers))
    bounds = _bounds(seconds[order], labels[order], size, window_cuts)
    return order, bounds, np.zeros(0, np.int16)


def _bounds(seconds: Seconds, labels: Integers, size: BatchSize, window_cuts: int) -> Integers:
    """Return the bounds of micro-batches.

    The cuts are sorted, longest first, in windows of ``window_cuts`` cuts. So the first row of a batch is its
    longest and decides the number of its rows.
    """
    total = len(seconds)
    if size.fixed_rows:
        return np.append(np.arange(0, total, size.fixed_rows), total)
    cut_seconds = seconds.tolist()
    bounds = [0]
    while bounds[-1] < total:
        begin = bounds[-1]
        window_end = (begin // window_cuts + 1) * window_cuts
        bounds.append(begin + size.next_rows(cut_seconds[begin], labels[begin:window_end]))
    return np.array(bounds)


def evaluation_plan(lengths: PlannedLengths, size: BatchSize) -> Plan:
    """Plan every cut once, longest first. This order has little padding, and meets a lack of memory early."""
    cuts = np.argsort(-lengths.seconds, kind="stable")
    percents = np.full(len(cuts), 100, np.int16)
    table = shape_table(lengths, size.rows, size.shapes)
    order, bounds, shape_numbers = _bucket(lengths, cuts, percents, size, table)
    return Plan(0, cuts[order].astype(np.int32), percents, bounds, shape_numbers, table)


# --- draws --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightedSet:
    """A set of cuts, and how many of them an epoch uses."""

    members: Integers
    count: int


def weighted_sets(set_numbers: Integers, weights: Sequence[float]) -> list[WeightedSet]:
    """Return the sets of cuts. An epoch has as many cuts as all sets together, shared out by the weights.

    ``set_numbers`` (N,) has the number of each cut's set, counted from 0 in the order of ``weights``.
    """
    exact_counts = len(set_numbers) * np.asarray(weights) / sum(weights)
    counts = np.maximum(np.rint(exact_counts), 1).astype(np.int64)
    sets = []
    for number, count in enumerate(counts.tolist()):
        sets.append(WeightedSet(np.flatnonzero(set_numbers == number), count))
    return sets


@dataclass(frozen=True)
class CutDraws:
    """Draws the cuts of an epoch, their order and their speeds from (seed, epoch, key of the cut).

    ``keys`` (N,) are the keys of the cuts. ``speed`` is the lowest and the highest factor, on a grid of 0.01.
    Without ``sets``, an epoch has each cut once. With ``sets``, one pass through a set follows the other, and
    each pass has its own random order. An epoch continues the pass of each set where the last epoch ended.
    """

    seed: int
    keys: Integers
    speed: Sequence[float] = (1.0, 1.0)
    sets: Sequence[WeightedSet] = ()

    def __len__(self) -> int:
        if self.sets:
            return sum(weighted_set.count for weighted_set in self.sets)
        return len(self.keys)

    def draw(self, epoch: int) -> tuple[Integers, Integers, int | Integers]:
        """Return the cuts of an epoch in random order, their speeds in percents, and their passes.

        The pass of a cut is the number of times that the run has used it before. Without ``sets``, this is
        one number for all cuts, the epoch.
        """
        cuts = np.arange(len(self.keys))
        passes: int | Integers = epoch
        if self.sets:
            cuts, passes = self._draw_from_sets(epoch)
        order = np.argsort(bits_at(self.seed, RunStream.ORDER, passes, self.keys[cuts]), kind="stable")
        cuts = cuts[order]
        if not isinstance(passes, int):
            passes = passes[order]
        slowest, fastest = speed_grid(self.speed)
        steps = uniform_at(self.seed, RunStream.SPEED, passes, self.keys[cuts]) * (fastest - slowest + 1)
        percents = (slowest + steps.astype(np.int16)).astype(np.int16)
        return cuts, percents, passes

    def _draw_from_sets(self, epoch: int) -> tuple[Integers, Integers]:
        cuts, passes = [], []
        for weighted_set in self.sets:
            members, count = weighted_set.members, weighted_set.count
            # Both are positions in the endless sequence of draws from the set.
            start, end = epoch * count, (epoch + 1) * count
            first_pass = start // len(members)
            last_pass = (end - 1) // len(members)
            # The draws have one row for each pass.
            pass_numbers = np.arange(first_pass, last_pass + 1)[:, None]
            draws = bits_at(self.seed, RunStream.SHARES, pass_numbers, self.keys[members])
            sequence = members[draws.argsort(axis=1, kind="stable")].ravel()
            offset = start % len(members)  # position of ``start`` in the first pass
            cuts.append(sequence[offset : offset + count])
            passes.append(np.repeat(pass_numbers, len(members))[offset : offset + count])
        return np.concatenate(cuts), np.concatenate(passes)


# --- training -----------------------------------------------------------------------------------


class Sampler:
    """Plans the micro-batches of a training set, epoch after epoch.

    ``rows`` (N,) are the row numbers of the cuts in the index, ascending. They are not the rows of a batch.
    """

    def __init__(self, draws: CutDraws, lengths: PlannedLengths, size: BatchSize, rows: Integers) -> None:
        self.draws, self.lengths, self.size, self.rows = draws, lengths, size, rows
        self.shapes = shape_table(lengths, size.rows, size.shapes, *speed_grid(draws.speed))
        self._plans: dict[int, Plan] = {}

    def plan(self, epoch: int) -> Plan:
        """Return the plan of an epoch. The last two plans are kept, because a global batch may span both."""
        if epoch not in self._plans:
            for old_epoch in sorted(self._plans)[:-1]:
                del self._plans[old_epoch]
            self._plans[epoch] = self._make_plan(epoch)
        return self._plans[epoch]

    def advance(self, epoch: int, position: int, count: int) -> tuple[int, int]:
        """Return the address ``count`` micro-batches after (epoch, position).

        The end of an epoch is not an address. The start of the next epoch is.
        """
        position += count
        while position >= self.length(epoch):
            position -= self.length(epoch)
            epoch += 1
        return epoch, position

    def length(self, epoch: int) -> int:
        """Return the number of micro-batches of an epoch. Batches of a fixed size need no plan for it."""
        if self.shapes or not self.size.fixed_rows:
            return len(self.plan(epoch))
        return -(-len(self.draws) // self.size.fixed_rows)

    def micro_batches(
        self, epoch: int, position: int, rank: int = 0, world_size: int = 1
    ) -> Iterator[MicroBatch]:
        """Yield the micro-batches of a rank from an address on, endlessly, one epoch after the other.

        Rank r has every ``world_size``-th micro-batch, beginning with the r-th.
        """
        epoch, position = self.advance(epoch, position, rank)
        while True:
            yield self.plan(epoch)[position]
            epoch, position = self.advance(epoch, position, world_size)

    def tensor_sizes(self, epoch: int) -> Integers:
        """Return the planned samples of each micro-batch's audio tensor, with padding and padding rows."""
        plan = self.plan(epoch)
        if plan.shapes:
            shape_sizes = np.array([shape.rows * shape.samples for shape in plan.shapes], np.int64)
            return shape_sizes[plan.shape_numbers]
        # A crop shortens all rows to the shortest of the batch. Otherwise they are padded to the longest.
        is_cropped = not math.isinf(self.lengths.crop_seconds)
        batch_length = np.minimum if is_cropped else np.maximum
        samples = self.lengths.samples_of(self._cuts(plan), plan.percents)
        # The function reduces the samples of each batch to one length.
        lengths: Integers = batch_length.reduceat(samples, plan.bounds[:-1])
        return lengths * np.diff(plan.bounds)

    def waste(self, epoch: int) -> tuple[float, float]:
        """Return the share of an epoch's tensors that is padding, and the cropped share of its audio."""
        plan = self.plan(epoch)
        cuts, lengths = self._cuts(plan), self.lengths
        uncropped = int(planned_samples(lengths.seconds[cuts], plan.percents, lengths.sample_rate).sum())
        tensor_samples = int(self.tensor_sizes(epoch).sum())
        if plan.shapes or math.isinf(lengths.crop_seconds):
            audio_samples = int(lengths.samples_of(cuts, plan.percents).sum())
        else:
            # A crop without shapes leaves no padding.
            audio_samples = tensor_samples
        return 1.0 - audio_samples / tensor_samples, 1.0 - audio_samples / uncropped

    def _cuts(self, plan: Plan) -> Integers:
        """Return the positions in ``rows`` of the plan's cuts."""
        return np.searchsorted(self.rows, plan.rows)

    def _make_plan(self, epoch: int) -> Plan:
        cuts, percents, passes = self.draws.draw(epoch)
        window = self.size.limits.window
        order, bounds, shape_numbers = _bucket(self.lengths, cuts, percents, self.size, self.shapes, window)
        draws = bits_at(self.draws.seed, RunStream.BATCHES, epoch, np.arange(len(bounds) - 1))
        batch_order = np.argsort(draws, kind="stable")
        if self.shapes:
            shape_numbers = shape_numbers[batch_order]
        positions, bounds = _reorder(bounds, batch_order)
        order = order[positions]
        if not isinstance(passes, int):
            passes = passes[order]
        rows = self.rows[cuts[order]]
        return Plan(epoch, rows, percents[order], bounds, shape_numbers, self.shapes, passes)


def _reorder(bounds: Integers, batch_order: Integers) -> tuple[Integers, Integers]:
    """Put micro-batches into another order. Returns the positions of their cuts, and their new bounds."""
    sizes = np.diff(bounds)[batch_order]
    ends = np.cumsum(sizes)
    starts = bounds[:-1][batch_order]
    # All cuts of a batch move by the same distance: from its new start to its old one.
    new_starts = ends - sizes
    distances = np.repeat(starts - new_starts, sizes)
    new_positions = np.arange(int(ends[-1]))
    return new_positions + distances, np.append(0, ends)
