"""The training batches: which cuts each micro-batch of an epoch contains.

The cuts of a batch have similar lengths, and the size of the batch is within its limits. The address of a
batch is its epoch and its position in the epoch.

The batches of an epoch are a pure function of (seed, epoch). They are computed before the first batch of the
epoch, in 0.5 s for a million cuts. So a resumed run need not repeat earlier random numbers, and the batches
are the same with any number of ranks and workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from speechtrain.batch import Footprint
from speechtrain.counter_rng import RunStream, bits_at, uniform_at
from speechtrain.data.planned_lengths import Integers, PlannedLengths, planned_samples
from speechtrain.data.speed import speed_grid
from speechtrain.data.static_shapes import Shape, fill_shapes, fitting_shapes, shape_table

# --- limits -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchLimits:
    """Limits of a micro-batch. It is full if one more utterance would exceed any limit.

    The limits are ``count`` utterances, ``seconds`` of audio with padding, and ``memory_gib``, the GiB that
    the model's footprint predicts. Null means unlimited. A rank replaces ``auto`` by the free memory of its
    device. An utterance that alone exceeds a limit is a batch of one.

    The utterances of an epoch are shuffled and divided into buckets of ``window`` batches. Each bucket is
    sorted by length and divided into batches, and then the batches are shuffled. A window of 1 is plain
    shuffling. A larger window gives less padding and less randomness. The number of utterances in a batch is
    rounded down to a multiple of ``multiple`` (fairseq: required_batch_size_multiple), except for
    fewer than ``multiple`` utterances and for the last batch of a bucket or an epoch.

    Each ``ranks`` batches of similar length follow each other, and a bucket is ``ranks`` times as large.
    Ranks that train on them at the same time need not wait for each other. Only the batches at the start and
    the end of an epoch may differ. If memory or seconds limit the batches, the ranks must begin an epoch
    together.
    """

    count: int | None = 8
    seconds: float | None = None
    memory_gib: float | str | None = None
    window: int = 20
    multiple: int = 1
    ranks: int = 1

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
        if self.ranks < 1:
            raise ValueError(f"ranks={self.ranks}: it must be at least 1 (batches in any order)")

    @property
    def bytes(self) -> float:
        """``memory_gib`` in bytes. It is infinite without a limit and until ``auto`` is replaced."""
        return math.inf if isinstance(self.memory_gib, str | None) else self.memory_gib * 2**30

    def round_down(self, rows: int) -> int:
        """Return ``rows`` rounded down to a multiple of ``multiple``, or ``rows`` if it is smaller."""
        if rows < self.multiple:
            return rows
        return rows // self.multiple * self.multiple


@dataclass(frozen=True)
class BatchSize:
    """Computes the number of rows of a batch from its limits and from the memory that the model predicts.

    ``shapes`` is the largest number of fixed shapes. 0 means that shapes vary.
    """

    limits: BatchLimits
    footprint: Footprint
    shapes: int = 0

    def __post_init__(self) -> None:
        if self.shapes < 0:
            raise ValueError(f"shapes={self.shapes}: it must be at least 0 (no fixed shapes)")

    @property
    def depends_on_labels(self) -> bool:
        """Whether the size of a batch depends on the label counts of its transcripts."""
        return bool(self.shapes) or self.limits.memory_gib is not None

    @property
    def fixed_rows(self) -> int:
        """The number of rows of every batch if ``count`` is the only limit, otherwise 0."""
        limits = self.limits
        if limits.count is None or limits.seconds or limits.memory_gib:
            return 0
        return limits.round_down(limits.count)

    def rows(self, seconds: float, labels: float = 0.0) -> int:
        """Return the largest number of rows in a batch, at least 1.

        Each row has ``seconds`` with padding, and ``labels`` labels. Raises ValueError if memory is a limit
        and the model does not predict it.
        """
        limits, footprint = self.limits, self.footprint
        max_rows = 2.0**31
        if limits.count is not None:
            max_rows = min(max_rows, limits.count)
        if limits.seconds is not None and seconds > 0:
            max_rows = min(max_rows, limits.seconds / seconds)
        if limits.memory_gib is not None and seconds > 0:
            if footprint.per_second <= 0 and footprint.per_second_label <= 0:
                raise ValueError("memory_gib: this model does not predict its memory. Use count or seconds")
            row_bytes = max(footprint.bytes(1, seconds, math.ceil(labels)), 1.0)
            max_rows = min(max_rows, limits.bytes / row_bytes)
        # The factor makes up for rounding errors: 17.6 s must have room for 16 rows of 1.1 s.
        whole_rows = int(max_rows * (1 + 1e-6))
        return limits.round_down(max(1, whole_rows))

    def next_rows(self, longest: float, labels: Integers) -> int:
        """Return the number of rows of the batch that begins with a cut of ``longest`` seconds.

        ``labels`` (M,) are the label counts of this cut and of the cuts that follow, which are not longer.
        """
        max_rows = min(len(labels), self.rows(longest))
        footprint = self.footprint
        if footprint.per_second_label > 0 and self.limits.bytes < math.inf:
            # Entry i of each array is for a batch of i + 1 rows. All its rows are padded to the most labels.
            most_labels = np.maximum.accumulate(labels[:max_rows])
            row_bytes = longest * (footprint.per_second + most_labels * footprint.per_second_label)
            batch_bytes = np.arange(1, max_rows + 1) * row_bytes
            # ``batch_bytes`` increases. So the insertion point of the limit is the number of rows within it.
            rows_within_limit = int(np.searchsorted(batch_bytes, self.limits.bytes, side="right"))
            max_rows = max(1, rows_within_limit)
        return self.limits.round_down(max_rows)


# --- batches of an epoch ------------------------------------------------------------------------


@dataclass(frozen=True)
class MicroBatch:
    """The cuts of one micro-batch, their speeds, and the address of the micro-batch."""

    rows: Integers  # (B,) row numbers of the cuts in the index
    percents: Integers  # (B,) speed factor × 100
    shape: Shape | None = None  # the fixed shape. Without it, rows are padded to the longest row.
    epoch: int = 0
    index: int = 0  # the position of the micro-batch in its epoch
    # (B,) the epoch of each cut's set: how often the run has used the cut before. One number if all are equal
    set_epochs: int | Integers = 0


@dataclass(frozen=True)
class EpochBatches:
    """All micro-batches of an epoch, as flat arrays over its N cuts."""

    epoch: int
    rows: Integers  # (N,) row numbers of the cuts in the index
    percents: Integers  # (N,) speed factor × 100
    bounds: Integers  # micro-batch i has the cuts bounds[i] to bounds[i + 1], exclusive
    shape_numbers: Integers  # the position in ``shapes`` of each micro-batch's shape, empty without shapes
    shapes: Sequence[Shape] = ()
    # (N,) the epoch of each cut's set, as in MicroBatch
    set_epochs: int | Integers = 0

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, index: int) -> MicroBatch:
        span = slice(int(self.bounds[index]), int(self.bounds[index + 1]))
        shape = self.shapes[int(self.shape_numbers[index])] if self.shapes else None
        set_epochs = self.set_epochs if isinstance(self.set_epochs, int) else self.set_epochs[span]
        rows, percents = self.rows[span], self.percents[span]
        return MicroBatch(rows, percents, shape, epoch=self.epoch, index=index, set_epochs=set_epochs)


def _divide_into_batches(
    lengths: PlannedLengths,
    cuts: Integers,
    percents: Integers,
    size: BatchSize,
    shapes: Sequence[Shape],
    window: int = 0,
) -> tuple[Integers, Integers, Integers]:
    """Divide ``cuts`` (N,) into micro-batches of similar lengths.

    Returns the order (N,) of the positions in ``cuts``, and the bounds and the shape numbers of the
    micro-batches, as in EpochBatches. Without ``shapes``, cuts are sorted by length in buckets of ``window``
    average batches. A window of 0 makes one bucket of all cuts.
    """
    labels = lengths.label_counts[cuts]
    if shapes:
        shape_numbers = fitting_shapes(shapes, lengths.samples_of(cuts, percents), labels)
        return fill_shapes(shape_numbers, shapes)
    seconds = lengths.seconds_of(cuts, percents)
    bucket_cuts = max(1, len(cuts))
    if window:
        rows = size.rows(float(seconds.mean()), float(labels.mean()))
        bucket_cuts = window * size.limits.ranks * rows
    bucket_numbers = np.arange(len(cuts)) // bucket_cuts
    # The last key of lexsort is the first sort key: by bucket, then longest first.
    order = np.lexsort((-seconds, bucket_numbers))
    no_shapes = np.zeros(0, np.int16)
    fixed_rows, ranks = size.fixed_rows, size.limits.ranks
    if fixed_rows:
        # The cuts of each ``ranks`` batches are dealt to them in turn, so that their lengths hardly differ.
        dealt = len(order) // (fixed_rows * ranks) * fixed_rows * ranks
        hands = order[:dealt].reshape(-1, fixed_rows, ranks).transpose(0, 2, 1)
        order = np.concatenate((hands.ravel(), order[dealt:]))
        return order, np.append(np.arange(0, len(order), fixed_rows), len(order)), no_shapes
    sorted_seconds, sorted_labels = seconds[order].tolist(), labels[order]
    bounds = [0]
    while bounds[-1] < len(order):
        begin = bounds[-1]
        bucket_end = (begin // bucket_cuts + 1) * bucket_cuts
        # The first cut of a batch is its longest, so it determines the number of rows.
        bounds.append(begin + size.next_rows(sorted_seconds[begin], sorted_labels[begin:bucket_end]))
    return order, np.array(bounds), no_shapes


def evaluation_batches(lengths: PlannedLengths, size: BatchSize) -> EpochBatches:
    """Return batches of every cut once, longest first. Their rows are positions in ``lengths``.

    The order gives little padding, and a lack of memory shows in the first batch.
    """
    cuts = np.argsort(-lengths.seconds, kind="stable")
    percents = np.full(len(cuts), 100, np.int16)
    shapes = shape_table(lengths, size.rows, size.shapes)
    order, bounds, shape_numbers = _divide_into_batches(lengths, cuts, percents, size, shapes)
    rows = cuts[order].astype(np.int32)
    return EpochBatches(0, rows, percents, bounds, shape_numbers, shapes)


# --- order of the cuts --------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightedSet:
    """A set of cuts, and the number of cuts that an epoch takes from it."""

    members: Integers  # positions of the cuts in ``RandomCuts.keys``
    count: int  # cuts in each epoch. It can exceed the number of members.


def weighted_sets(sets: Sequence[Integers], weights: Sequence[float]) -> list[WeightedSet]:
    """Return the sets with their counts, which are proportional to ``weights``.

    ``sets`` are the members of each set. An epoch has about as many cuts as there are members.
    """
    exact_counts = sum(map(len, sets)) * np.asarray(weights) / sum(weights)
    counts = np.maximum(np.rint(exact_counts), 1).astype(np.int64)
    return [WeightedSet(members, count) for members, count in zip(sets, counts.tolist(), strict=True)]


@dataclass(frozen=True)
class RandomCuts:
    """Computes the cuts of an epoch, their order and their speeds from (seed, epoch, key of the cut).

    ``keys`` (N,) are the keys of the cuts. ``speed`` is the lowest and the highest factor, on a grid of 0.01.
    Without ``sets``, an epoch has each cut once. With ``sets``, each set has epochs of its own, which
    follow each other without end. An epoch of the set has each cut of the set once, in a random order of its
    own. An epoch of the run continues where the epoch before it ended.
    """

    seed: int
    keys: Integers
    speed: Sequence[float] = (1.0, 1.0)
    sets: Sequence[WeightedSet] = ()

    def __len__(self) -> int:
        if self.sets:
            return sum(weighted_set.count for weighted_set in self.sets)
        return len(self.keys)

    def of_epoch(self, epoch: int) -> tuple[Integers, Integers, int | Integers]:
        """Return the cuts of an epoch in random order, their speeds in percents, and their sets' epochs.

        The cuts are positions in ``keys``. The epoch of a cut's set is the number of times that the run has
        used the cut before. Without ``sets``, it is ``epoch`` for all cuts.
        """
        cuts = np.arange(len(self.keys))
        set_epochs: int | Integers = epoch
        if self.sets:
            cuts, set_epochs = self._cuts_from_sets(epoch)
        order = np.argsort(bits_at(self.seed, RunStream.ORDER, set_epochs, self.keys[cuts]), kind="stable")
        cuts = cuts[order]
        if not isinstance(set_epochs, int):
            set_epochs = set_epochs[order]
        slowest, fastest = speed_grid(self.speed)
        steps = uniform_at(self.seed, RunStream.SPEED, set_epochs, self.keys[cuts]) * (fastest - slowest + 1)
        percents = (slowest + steps.astype(np.int16)).astype(np.int16)
        return cuts, percents, set_epochs

    def _cuts_from_sets(self, epoch: int) -> tuple[Integers, Integers]:
        """Return the cuts of an epoch, set after set, and the epoch of each cut's set."""
        cuts, set_epochs = [], []
        for weighted_set in self.sets:
            members, count = weighted_set.members, weighted_set.count
            # The epoch has the cuts ``start`` to ``end``, exclusive, of all epochs of the set.
            start, end = epoch * count, (epoch + 1) * count
            first_epoch = start // len(members)
            last_epoch = (end - 1) // len(members)
            epoch_numbers = np.arange(first_epoch, last_epoch + 1)[:, None]  # (epochs, 1)
            bits = bits_at(self.seed, RunStream.SHARES, epoch_numbers, self.keys[members])
            order = bits.argsort(axis=1, kind="stable")  # (epochs, members)
            ordered_cuts = members[order].ravel()
            cut_epochs = np.repeat(epoch_numbers, len(members))
            offset = start % len(members)  # position of ``start`` in the set's first epoch
            cuts.append(ordered_cuts[offset : offset + count])
            set_epochs.append(cut_epochs[offset : offset + count])
        return np.concatenate(cuts), np.concatenate(set_epochs)


# --- training -----------------------------------------------------------------------------------


class Sampler:
    """Orders the micro-batches of a training set, epoch after epoch.

    ``rows`` (N,) are the row numbers of the cuts in the index, ascending. ``random_cuts`` and ``lengths``
    number the same cuts by their positions in ``rows``.
    """

    def __init__(
        self, random_cuts: RandomCuts, lengths: PlannedLengths, size: BatchSize, rows: Integers
    ) -> None:
        self.random_cuts, self.lengths, self.size, self.rows = random_cuts, lengths, size, rows
        slowest, fastest = speed_grid(random_cuts.speed)
        self.shapes = shape_table(lengths, size.rows, size.shapes, slowest, fastest)
        self._epochs: dict[int, EpochBatches] = {}  # by epoch

    def epoch_batches(self, epoch: int) -> EpochBatches:
        """Return the batches of an epoch. Two epochs are cached, because a global batch may span both."""
        if epoch in self._epochs:
            return self._epochs[epoch]
        for old_epoch in sorted(self._epochs)[:-1]:
            del self._epochs[old_epoch]
        cuts, percents, set_epochs = self.random_cuts.of_epoch(epoch)
        order, bounds, shape_numbers = _divide_into_batches(
            self.lengths, cuts, percents, self.size, self.shapes, self.size.limits.window
        )
        batch_order = self._shuffle_batches(epoch, len(bounds) - 1)
        if self.shapes:
            shape_numbers = shape_numbers[batch_order]
        # All cuts of a batch move by the same distance.
        sizes = np.diff(bounds)[batch_order]
        new_bounds = np.append(0, np.cumsum(sizes))
        distances = np.repeat(bounds[:-1][batch_order] - new_bounds[:-1], sizes)
        order = order[np.arange(len(order)) + distances]
        if not isinstance(set_epochs, int):
            set_epochs = set_epochs[order]
        rows = self.rows[cuts[order]]
        batches = EpochBatches(
            epoch, rows, percents[order], new_bounds, shape_numbers, self.shapes, set_epochs
        )
        self._epochs[epoch] = batches
        return batches

    def advance(self, epoch: int, position: int, count: int) -> tuple[int, int]:
        """Return the address ``count`` micro-batches after (epoch, position).

        The address after the last micro-batch of an epoch is position 0 of the next epoch.
        """
        position += count
        while position >= self.length(epoch):
            position -= self.length(epoch)
            epoch += 1
        return epoch, position

    def length(self, epoch: int) -> int:
        """Return the number of micro-batches of an epoch. With a fixed number of rows, this is a division."""
        if self.shapes or not self.size.fixed_rows:
            return len(self.epoch_batches(epoch))
        return math.ceil(len(self.random_cuts) / self.size.fixed_rows)

    def micro_batches(
        self, epoch: int, position: int, rank: int = 0, world_size: int = 1
    ) -> Iterator[MicroBatch]:
        """Yield the micro-batches of a rank from an address on, endlessly, one epoch after another.

        Rank r gets every ``world_size``-th micro-batch, beginning r micro-batches after the address.
        """
        epoch, position = self.advance(epoch, position, rank)
        while True:
            yield self.epoch_batches(epoch)[position]
            epoch, position = self.advance(epoch, position, world_size)

    def tensor_sizes(self, epoch: int) -> Integers:
        """Return the planned number of samples in each micro-batch's audio tensor, with padding."""
        batches = self.epoch_batches(epoch)
        if batches.shapes:
            shape_sizes = np.array([shape.rows * shape.samples for shape in batches.shapes], np.int64)
            return shape_sizes[batches.shape_numbers]
        # A crop shortens all rows to the shortest of the batch. Otherwise they are padded to the longest.
        is_cropped = not math.isinf(self.lengths.crop_seconds)
        length_of_batch = np.minimum if is_cropped else np.maximum
        samples = self.lengths.samples_of(self._cuts(batches), batches.percents)
        lengths: Integers = length_of_batch.reduceat(samples, batches.bounds[:-1])
        return lengths * np.diff(batches.bounds)

    def waste(self, epoch: int) -> tuple[float, float]:
        """Return the padded share of an epoch's audio tensors, and the cropped share of its audio."""
        batches = self.epoch_batches(epoch)
        cuts, lengths = self._cuts(batches), self.lengths
        cut_samples = planned_samples(lengths.seconds[cuts], batches.percents, lengths.sample_rate)
        tensor_samples = int(self.tensor_sizes(epoch).sum())
        if batches.shapes or math.isinf(lengths.crop_seconds):
            used_samples = int(lengths.samples_of(cuts, batches.percents).sum())
        else:
            # A crop to the shortest row needs no padding.
            used_samples = tensor_samples
        return 1.0 - used_samples / tensor_samples, 1.0 - used_samples / int(cut_samples.sum())

    def _cuts(self, batches: EpochBatches) -> Integers:
        """Return the positions in ``rows`` of the cuts of ``batches``."""
        return np.searchsorted(self.rows, batches.rows)

    def _shuffle_batches(self, epoch: int, batches: int) -> Integers:
        """Return the numbers of an epoch's batches, which are sorted by length, in their random order.

        ``ranks`` batches with adjacent numbers stay together. If the batches of the earlier epochs do not
        fill their last global batch, the first batches of this epoch complete it.
        """
        ranks, first = self.size.limits.ranks, 0
        # Only with fixed rows, all epochs have the same number of batches.
        if self.size.fixed_rows and not self.shapes:
            first = min(-epoch * batches % ranks, batches)
        groups = (batches - first) // ranks
        bits = bits_at(self.random_cuts.seed, RunStream.BATCHES, epoch, np.arange(groups))
        order = np.argsort(bits, kind="stable")
        grouped = (order[:, None] * ranks + np.arange(ranks)).ravel()
        ungrouped = np.arange(groups * ranks, batches)
        return np.concatenate((ungrouped[:first], grouped, ungrouped[first:]))
