"""Random masked frames and their negatives, computed on the host before the step.

The random numbers of a row are seeded by the micro-batch's seed and the row's index. So they depend neither
on the other rows nor on the padding.

Legend: B rows, T frames, M masked frames of a row, K negatives. A table (B, M) has an entry for each masked
frame of a row. If a row has fewer masked frames than M, its last entries are surplus entries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from speechtrain.counter_rng import key_of, seed_at
from speechtrain.errors import ConfigError

_NEGATIVES = key_of("negatives")

Integers = NDArray[np.int64]
KINDS = ("static", "uniform", "normal", "poisson")


@dataclass(frozen=True)
class SpanMask:
    """Masks random spans of frames in each row of a batch (wav2vec 2.0, Baevski et al. 2020, section 3.1).

    A row of n frames gets ``int(probability × n / length + u)`` spans, where u is uniform in [0, 1), but at
    least ``min_masks``. ``probability`` 0 masks nothing. ``kind`` is the distribution of the spans' lengths,
    in frames:

    - ``static``: all are ``length``.
    - ``uniform``: whole numbers from ``other`` to ``2 × length``.
    - ``normal``: mean ``length`` and standard deviation ``other``, at least 1.
    - ``poisson``: mean ``length``.

    With ``overlap``, starts are distinct and spans may overlap. They cover about 49 % of a long row at
    probability 0.65 and length 10. Without ``overlap``, at least ``min_space`` frames are between two spans,
    and spans that do not fit are dropped. As in upstream, static spans never mask the last frame of a row,
    unless the row is very short.

    The same class masks channels. A row then has one "frame" for each channel.
    """

    probability: float = 0.65
    length: int = 10
    kind: str = "static"
    other: float = 0.0
    overlap: bool = True
    min_space: int = 1
    min_masks: int = 2

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise ConfigError(f"probability is {self.probability}. It must be from 0 to 1")
        if self.length < 1:
            raise ConfigError(f"length is {self.length}. It must be 1 frame or more")
        if self.probability == self.length == 1:
            raise ConfigError("probability is 1 at length 1 and masks every frame. Lower it")
        if self.kind not in KINDS:
            raise ConfigError(f"kind is {self.kind!r}. It must be one of {', '.join(KINDS)}")
        if self.other < 0 or (self.kind == "uniform" and self.other > 2 * self.length):
            limits = "It must be 0 or more, and for kind uniform at most 2 × length"
            raise ConfigError(f"other is {self.other}. {limits}")
        if self.min_space < 0 or self.min_masks < 0:
            raise ConfigError(f"min_space is {self.min_space}, min_masks {self.min_masks}. Both must be >= 0")

    def sample(
        self,
        lengths: Sequence[int],
        width: int,
        seed: int,
        equal: bool = False,
        counted: Sequence[bool] | None = None,
    ) -> NDArray[np.bool_]:
        """Return a random mask (B, ``width``), True for masked frames, of rows of ``lengths`` frames.

        ``counted`` is False for padding rows. By default, no row is a padding row.

        With ``equal``, every row has the same number of masked frames, which is the smallest number among the
        counted rows. Surplus frames of a row are unmasked at random. In a padding row with too few masked
        frames, other frames are masked at random, as far as the row is long enough.

        Raises ConfigError if all frames of a counted row are masked, because the model then has no context.
        This cannot happen with static overlapping spans and rows of at least ``shortest()`` frames.
        """
        if counted is None:
            counted = [True] * len(lengths)
        generators = [np.random.default_rng(seed_at(seed, row)) for row in range(len(lengths))]
        if max(lengths, default=0) > width:
            raise ValueError(f"a row has {max(lengths)} frames, more than the batch's width of {width}")
        rows = []
        for size, is_counted, rng in zip(lengths, counted, generators, strict=True):
            rows.append(self._frames(size, rng))
            if is_counted and 0 < size <= len(rows[-1]):
                raise ConfigError(
                    f"SpanMask.length is {self.length} and min_masks {self.min_masks}: all {size} frames of a"
                    " row are masked. Lower them, or raise data.min_seconds"
                )
        if equal and rows:
            rows = _equalise(rows, lengths, counted, generators=generators)
        mask = np.zeros((len(lengths), width), np.bool_)
        for row, frames in enumerate(rows):
            mask[row, frames] = True
        return mask

    def max_masked_frames(self, width: int) -> int:
        """Return an upper bound of the number of masked frames in a row of ``width`` frames.

        For static overlapping spans the bound is exact.
        """
        spans = self._spans(width, 1.0)
        longest = {"static": self.length, "uniform": 2 * self.length}.get(self.kind, width)
        return max(0, min(spans * longest, width - 1))

    def shortest(self) -> int:
        """Return the smallest row, in frames, that static overlapping spans never mask completely."""
        size = self.length + self.min_masks + 1
        while self._spans(size, 1.0) >= size - self.length:
            size += 1
        return size

    def _spans(self, size: int, uniform: float) -> int:
        """Return the number of spans of a row of ``size`` frames. ``uniform`` is a number in [0, 1)."""
        if not self.probability or not size:
            return 0
        expected = self.probability * size / self.length
        # The second bound matters only if floating point rounds the sum up to the next whole number.
        return max(self.min_masks, min(int(expected + uniform), math.ceil(expected)))

    def _frames(self, size: int, rng: np.random.Generator) -> Integers:
        """Return random masked frames of a row of ``size`` frames, in ascending order."""
        spans = self._spans(size, float(rng.random()))
        lengths = self._lengths(spans, rng)
        if not spans:
            return np.zeros(0, np.int64)
        if not lengths.any():
            # All spans are empty, which is possible for kinds uniform and poisson.
            lengths[0] = min(self.length, size - 1)
        if not self.overlap:
            return self._separate_frames(size, lengths, rng)
        possible_starts = size - int(lengths.min())
        if possible_starts <= spans:
            # The row is short. Starts must be distinct, so some of them may be beyond its end.
            possible_starts = spans + 1
        starts = rng.choice(possible_starts, spans, replace=False)
        latest_end = max(size, possible_starts) + int(lengths.max())
        # +1 at each start and −1 at each end. The cumulative sum is the number of spans over a frame.
        edges = np.zeros(latest_end + 1, np.int64)
        np.add.at(edges, starts, 1)
        np.add.at(edges, starts + lengths, -1)
        return np.flatnonzero(edges.cumsum()[:size])

    def _lengths(self, spans: int, rng: np.random.Generator) -> Integers:
        """Return random lengths of the spans, in frames, by ``kind``."""
        if self.kind == "static":
            return np.full(spans, self.length, np.int64)
        if self.kind == "uniform":
            return rng.integers(int(self.other), 2 * self.length + 1, spans)
        if self.kind == "normal":
            lengths = np.rint(rng.normal(self.length, self.other, spans)).astype(np.int64)
            return np.maximum(lengths, 1)
        return rng.poisson(self.length, spans).astype(np.int64)

    def _separate_frames(self, size: int, lengths: Integers, rng: np.random.Generator) -> Integers:
        """Return the frames of random spans that are at least ``min_space`` frames apart, longest span first.

        In a free part [begin, end) of the row, the start of a span is drawn from [begin, end − length). So
        the last frame of the part is never masked, and the part to the left of a span gets one extra frame.
        """
        free_parts, frames = [(0, size)], [np.zeros(0, np.int64)]
        for length in sorted(lengths.tolist(), reverse=True):
            sizes = np.array([end - begin for begin, end in free_parts])
            is_too_small = sizes < length + max(self.min_space, 1)
            sizes[is_too_small] = 0
            if not sizes.any():
                break
            # The probability of a part is proportional to its size.
            index = int(rng.choice(len(free_parts), p=sizes / sizes.sum()))
            begin, end = free_parts.pop(index)
            start = int(rng.integers(begin, end - length))
            frames.append(np.arange(start, start + length))
            left_part = (begin, start - self.min_space + 1)
            right_part = (start + length + self.min_space, end)
            free_parts += [left_part, right_part]
        return np.sort(np.concatenate(frames))


def _equalise(
    rows: list[Integers],
    lengths: Sequence[int],
    counted: Sequence[bool],
    generators: list[np.random.Generator],
) -> list[Integers]:
    """Return masked frames of each row in equal numbers, as ``SpanMask.sample`` describes with ``equal``.

    ``rows`` has the masked frames of each row. Without a counted row, all rows count.
    """
    counts = [len(frames) for frames in compress(rows, counted)]
    if not counts:
        counts = [len(frames) for frames in rows]
    count = min(counts)
    equal_rows = []
    for frames, size, rng in zip(rows, lengths, generators, strict=True):
        if len(frames) > count:
            equal_rows.append(rng.choice(frames, count, replace=False))
        else:
            free_frames = np.setdiff1d(np.arange(size), frames)
            missing = min(count - len(frames), len(free_frames))
            additions = rng.choice(free_frames, missing, replace=False)
            equal_rows.append(np.concatenate([frames, additions]))
    return equal_rows


def frame_table(mask: NDArray[np.bool_], width: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the table of masked frames (B, M) int64, in ascending order, and weights (B, M) float32.

    ``mask`` is (B, T). M is ``width``, or by default the largest number of masked frames of a row. The weight
    of an entry is 1. Surplus entries are 0 in both tables.

    >>> frame_table(np.array([[False, True, True], [False, False, True]]))
    (tensor([[1, 2],
            [2, 0]]), tensor([[1., 1.],
            [1., 0.]]))
    """
    counts = mask.sum(1)
    largest_count = int(counts.max(initial=0))
    if width is None:
        width = largest_count
    elif width < largest_count:
        raise ValueError(f"a row has {largest_count} masked frames. The table's width is only {width}")
    is_used = np.arange(width) < counts[:, None]
    index = np.zeros(is_used.shape, np.int64)
    _, masked_frames = np.nonzero(mask)
    index[is_used] = masked_frames  # Both sides are in the order of rows.
    return torch.from_numpy(index), torch.from_numpy(is_used.astype(np.float32))


def frames_at(frames: Tensor, index: Tensor) -> Tensor:
    """Return the frames (B, M, ·) at ``index`` (B, M) of ``frames`` (B, T, ·)."""
    return frames.gather(1, index[:, :, None].expand(-1, -1, frames.shape[2]))


def sample_negatives(counts: Sequence[int], width: int, negatives: int, seed: int) -> Tensor:
    """Return random negatives (B, M, K) of each masked frame: entries of its row in the table (B, M).

    ``counts`` has the number of masked frames of each row, and ``width`` is M. The sample is uniform over the
    other masked frames of the row, with replacement, as in the sampler of wav2vec 2.0. Surplus entries are
    never negatives, and their own negatives are 0. The sample of a row does not depend on M.

    A row with one masked frame has no other frame, so its negatives are that frame itself. The loss excludes
    negatives that have the code of the positive, so the loss of this row is 0.

    The dtype is int16 if the range allows, because a quarter of int64's bytes is copied, otherwise int32.
    """
    dtype = np.int16 if width <= np.iinfo(np.int16).max else np.int32
    table = np.zeros((len(counts), width, negatives), dtype)
    for row, count in enumerate(counts):
        if count > 1:
            # ``_NEGATIVES`` separates these numbers from the masks, which may have the same seed.
            rng = np.random.default_rng(seed_at(seed, _NEGATIVES, row))
            numbers = rng.integers(0, count - 1, (count, negatives), np.int32)
            table[row, :count] = skip_own_position(numbers)
    return torch.from_numpy(table)


def skip_own_position(numbers: NDArray[np.signedinteger]) -> NDArray[np.signedinteger]:
    """Map numbers (M, K) below M − 1 to positions below M. The positions of row m are never m.

    A number v becomes v + 1 if v is m or more, otherwise it stays v.
    """
    own_position = np.arange(len(numbers), dtype=numbers.dtype)[:, None]
    positions: NDArray[np.signedinteger] = numbers + (numbers >= own_position)
    return positions
