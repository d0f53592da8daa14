"""Draws of the masked frames and of their negatives, on the host, before the step.

The address of a draw is the micro-batch's seed and the row, so a draw depends neither on the other rows
nor on the padding. Legend: B rows, T frames, M masked frames of a row, K negatives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from speechtrain.counter_rng import key_of, seed_at
from speechtrain.errors import ConfigError

_NEGATIVES = key_of("negatives")

KINDS = ("static", "uniform", "normal", "poisson")


@dataclass(frozen=True)
class SpanMask:
    """Draw spans of masked frames for each row of a batch (wav2vec 2.0, Baevski et al. 2020, section 3.1).

    A row of n frames gets ``int(probability × n / length + U[0, 1))`` spans, at least ``min_masks``.
    Span lengths follow ``kind``: ``static`` all ``length``; ``uniform`` whole numbers from ``other`` to
    ``2 × length``; ``normal`` with mean ``length`` and deviation ``other``, at least 1; ``poisson`` with
    mean ``length``. With ``overlap``, starts are distinct and spans may overlap (they cover about 49 % of
    a long row at 0.65 and 10). Without it, at least ``min_space`` frames are between two spans, and spans
    that do not fit are dropped. ``probability`` 0 masks nothing. As in upstream, static spans never mask
    the last frame of a row, unless the row is very short.

    The same class masks channels: each row then has one "frame" for each channel.
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
            raise ConfigError(f"probability is {self.probability}; it must be from 0 to 1")
        if self.length < 1:
            raise ConfigError(f"length is {self.length}; it must be 1 frame or more")
        if self.probability == self.length == 1:
            raise ConfigError("probability is 1 at length 1 and masks every frame; lower it")
        if self.kind not in KINDS:
            raise ConfigError(f"kind is {self.kind!r}; it must be one of {', '.join(KINDS)}")
        if self.other < 0 or (self.kind == "uniform" and self.other > 2 * self.length):
            limits = "it must be 0 or more, and for kind uniform at most 2 × length"
            raise ConfigError(f"other is {self.other}; {limits}")
        if self.min_space < 0 or self.min_masks < 0:
            raise ConfigError(f"min_space is {self.min_space}, min_masks {self.min_masks}; both must be >= 0")

    def draw(
        self,
        lengths: Sequence[int],
        width: int,
        seed: int,
        equal: bool = False,
        counted: Sequence[bool] | None = None,
    ) -> NDArray[np.bool_]:
        """Draw the masked frames (B, ``width``) of rows of ``lengths`` frames, none beyond a row's length.

        ``equal`` reduces every row at random to the smallest count among the ``counted`` rows (default:
        all rows). The other rows are padding rows: the minimum ignores them, they get frames added at
        random up to the minimum as far as they are long enough, and they never raise.

        Raises:
            ConfigError: the draw masks a whole counted row, so no context is left to predict from.
                With static overlapping spans, rows of ``shortest()`` frames or more never raise.
        """
        counts = [True] * len(lengths) if counted is None else list(counted)
        generators = [np.random.default_rng(seed_at(seed, row)) for row in range(len(lengths))]
        frames = []
        for size, counts_here, rng in zip(lengths, counts, generators, strict=True):
            if size > width:
                raise ValueError(f"a row has {size} frames, more than the batch's width of {width}")
            spans = self._frames(size, rng)
            if counts_here and size and len(spans) >= size:
                raise ConfigError(
                    f"SpanMask.length is {self.length} and min_masks {self.min_masks}: all {size} frames of a"
                    " row are masked; lower them, or raise data.min_seconds"
                )
            frames.append(spans)
        if equal and frames:
            least = min([len(f) for f, c in zip(frames, counts, strict=True) if c] or map(len, frames))
            rows = zip(frames, lengths, generators, strict=True)
            frames = [_resized(f, least, size, rng=rng) for f, size, rng in rows]
        mask = np.zeros((len(lengths), width), np.bool_)
        for row, f in enumerate(frames):
            mask[row, f] = True
        return mask

    def most(self, width: int) -> int:
        """Upper bound of the masked frames in ``width`` frames; exact for static overlapping spans."""
        spans = self._spans(width, 1.0)
        longest = {"static": self.length, "uniform": 2 * self.length}.get(self.kind, width)
        return max(0, min(spans * longest, width - 1))

    def shortest(self) -> int:
        """The smallest row, in frames, that static overlapping spans never mask completely."""
        size = self.length + self.min_masks + 1
        while self._spans(size, 1.0) >= size - self.length:
            size += 1
        return size

    def _spans(self, size: int, uniform: float) -> int:
        if not self.probability or not size:
            return 0
        expected = self.probability * size / self.length
        # the second bound matters only where floating point rounds the sum up to the next whole number
        return max(self.min_masks, min(int(expected + uniform), math.ceil(expected)))

    def _frames(self, size: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """The masked frames of one row, ascending."""
        spans = self._spans(size, float(rng.random()))
        lengths = self._lengths(spans, rng)
        if not spans:
            return np.zeros(0, np.int64)
        if not lengths.any():  # a draw of empty spans only
            lengths[0] = min(self.length, size - 1)
        if not self.overlap:
            return self._apart(size, lengths, rng)
        least = int(lengths.min())
        if size - least <= spans:  # a short row: just enough starts for distinct ones
            least = size - spans - 1
        starts = rng.choice(size - least, spans, replace=False)
        edges = np.zeros(max(size, size - least) + int(lengths.max()) + 1, np.int64)
        np.add.at(edges, starts, 1)
        np.add.at(edges, starts + lengths, -1)
        return np.flatnonzero(edges.cumsum()[:size])

    def _lengths(self, spans: int, rng: np.random.Generator) -> NDArray[np.int64]:
        if self.kind == "static":
            return np.full(spans, self.length, np.int64)
        if self.kind == "uniform":
            return rng.integers(int(self.other), 2 * self.length + 1, spans)
        if self.kind == "normal":
            drawn = np.rint(rng.normal(self.length, self.other, spans)).astype(np.int64)
            return np.maximum(drawn, 1)
        return rng.poisson(self.length, spans).astype(np.int64)

    def _apart(self, size: int, lengths: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
        """Place spans, longest first, into the free parts of a row, ``min_space`` frames apart.

        Starts in a part [s, e) are drawn from [s, e − span), so the part's last frame stays free. The
        part to the left of a placed span gets one extra frame for that reason.
        """
        least, parts, frames = int(lengths.min()), [(0, size)], [np.zeros(0, np.int64)]
        for span in sorted(lengths.tolist(), reverse=True):
            room = np.array([e - s if e - s >= span + max(self.min_space, 1) else 0 for s, e in parts])
            if not room.any():
                break
            s, e = parts.pop(int(rng.choice(len(parts), p=room / room.sum())))
            start = int(rng.integers(s, e - span))
            frames.append(np.arange(start, start + span))
            if start - s - self.min_space >= least:
                parts.append((s, start - self.min_space + 1))
            if e - start - span - self.min_space > least:
                parts.append((start + span + self.min_space, e))
            if not parts:
                break
        return np.sort(np.concatenate(frames))


def _resized(frames: NDArray[np.int64], count: int, size: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Choose ``count`` of the frames at random, or add random other frames of the row up to ``count``."""
    if len(frames) > count:
        return rng.choice(frames, count, replace=False)
    free = np.setdiff1d(np.arange(size), frames)
    added = rng.choice(free, min(count - len(frames), len(free)), replace=False)
    return np.concatenate([frames, added])


def frame_table(mask: NDArray[np.bool_], width: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the positions of masked frames: index (B, M) int64, ascending, and weight (B, M) float32.

    M is ``width``, or the largest count of a row. Surplus entries have index 0 and weight 0.

    >>> frame_table(np.array([[False, True, True], [False, False, True]]))
    (tensor([[1, 2],
            [2, 0]]), tensor([[1., 1.],
            [1., 0.]]))
    """
    counts = mask.sum(1)
    most = int(counts.max(initial=0))
    if width is not None and width < most:
        raise ValueError(f"a row has {most} masked frames; the table's width is only {width}")
    entries = np.arange(most if width is None else width)
    used = entries < counts[:, None]
    index = np.zeros(used.shape, np.int64)
    index[used] = np.nonzero(mask)[1]  # both run row by row
    return torch.from_numpy(index), torch.from_numpy(used.astype(np.float32))


def draw_negatives(counts: Sequence[int], width: int, negatives: int, seed: int) -> Tensor:
    """Draw the negatives (B, M, K) of each masked frame: positions among its row's ``counts`` masked frames.

    The draw is uniform over the row's other masked frames, with replacement: a number v below count − 1
    means position v + (v ≥ own position) (wav2vec 2.0's sampler). Surplus entries, from a row's count to
    ``width`` = M, are 0 and are never drawn, and a row's draws do not depend on M. A row with one masked
    frame has no other frame: its negatives are that frame itself. The loss excludes negatives with the
    positive's code, so the loss of this row is 0.

    The dtype is int16 where the range allows (a quarter of int64's bytes to copy), else int32.
    """
    dtype = np.int16 if width <= np.iinfo(np.int16).max else np.int32
    table = np.zeros((len(counts), width, negatives), dtype)
    for row, count in enumerate(counts):
        if count > 1:
            # a separate address: masks drawn with the same seed use other random numbers
            rng = np.random.default_rng(seed_at(seed, _NEGATIVES, row))
            table[row, :count] = others(rng.integers(0, count - 1, (count, negatives), np.int32))
    return torch.from_numpy(table)


def others(drawn: NDArray[np.signedinteger]) -> NDArray[np.signedinteger]:
    """Map draws (M, K) below M − 1 to positions below M, of which row m's are never m."""
    own = np.arange(len(drawn), dtype=drawn.dtype)[:, None]
    shifted: NDArray[np.signedinteger] = drawn + (drawn >= own)
    return shifted
