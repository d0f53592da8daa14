"""Which frames are masked and which are their negatives: drawn on the host, ahead of the step.

Every draw has an address, the micro-batch's seed and the row, so it depends neither on the other rows
nor on padding. Legend: B rows, T frames, M masked frames of a row, K negatives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from speechtrain.counter_rng import key_of, seed_at
from speechtrain.errors import ConfigError

_NEGATIVES = key_of("negatives")

KINDS = ("static", "uniform", "normal", "poisson")


class SpanMask:
    """Draw spans of masked frames for each row of a batch (wav2vec 2.0, Baevski et al. 2020, section 3.1).

    A row of n frames gets ``int(probability × n / length + U[0, 1))`` spans, at least ``min_masks``.
    Span lengths follow ``kind``: ``static`` all ``length``; ``uniform`` whole numbers from ``other`` to
    ``2 × length``; ``normal`` with mean ``length`` and deviation ``other``, at least 1; ``poisson`` with
    mean ``length``. With ``overlap`` starts are distinct and spans may cover one another (about 49 % of
    a long row at 0.65 and 10); without it spans keep ``min_space`` frames between them and those that
    find no room are left out. ``probability`` 0 masks nothing. As upstream draws, the last frame of a
    row that is not very short is never masked by static spans.

    The same class masks channels: rows of as many "frames" as there are channels.
    """

    def __init__(
        self,
        probability: float = 0.65,
        length: int = 10,
        kind: str = "static",
        other: float = 0.0,
        overlap: bool = True,
        min_space: int = 1,
        min_masks: int = 2,
    ) -> None:
        if not 0 <= probability <= 1:
            raise ConfigError(f"SpanMask.probability is {probability}; it must be from 0 to 1")
        if length < 1:
            raise ConfigError(f"SpanMask.length is {length}; it must be 1 frame or more")
        if probability == length == 1:
            raise ConfigError("SpanMask.probability is 1 with length 1, which masks every frame; lower it")
        if kind not in KINDS:
            raise ConfigError(f"SpanMask.kind is {kind!r}; it must be one of {', '.join(KINDS)}")
        if other < 0 or (kind == "uniform" and other > 2 * length):
            raise ConfigError(
                f"SpanMask.other is {other}; it must be 0 or more, and at most twice the length"
            )
        if min_space < 0 or min_masks < 0:
            raise ConfigError("SpanMask.min_space and SpanMask.min_masks must be 0 or more")
        self.probability, self.length, self.kind, self.other = probability, length, kind, other
        self.overlap, self.min_space, self.min_masks = overlap, min_space, min_masks

    def draw(
        self,
        lengths: Sequence[int],
        width: int,
        seed: int,
        equal: bool = False,
        counted: Sequence[bool] | None = None,
    ) -> NDArray[np.bool_]:
        """Masked frames (B, ``width``) of rows with ``lengths`` frames; nothing beyond a row's length.

        ``equal`` reduces every row at random to the smallest count among the ``counted`` rows (all, if
        not given). The other rows are filler: they do not count for the minimum, get frames added at
        random up to it where they are long enough, and never raise.

        Raises:
            ConfigError: the draw masks the whole of a counted row, which leaves no context to
                predict from. Static overlapping spans cannot do that from ``shortest()`` frames on.
        """
        counts = [True] * len(lengths) if counted is None else list(counted)
        generators = [np.random.default_rng(seed_at(seed, row)) for row in range(len(lengths))]
        frames = []
        for size, counts_here, rng in zip(lengths, counts, generators, strict=True):
            if size > width:
                raise ValueError(f"a row of {size} frames in a batch {width} wide")
            spans = self._frames(size, rng)
            if counts_here and size and len(spans) >= size:
                raise ConfigError(
                    f"SpanMask.length is {self.length} and min_masks {self.min_masks}: all {size} frames of a"
                    " row are masked; lower them, or raise the data's shortest duration"
                )
            frames.append(spans)
        if equal and frames:
            least = min([len(f) for f, c in zip(frames, counts, strict=True) if c] or map(len, frames))
            frames = [
                _resized(f, least, size, rng)
                for f, size, rng in zip(frames, lengths, generators, strict=True)
            ]
        mask = np.zeros((len(lengths), width), np.bool_)
        for row, f in enumerate(frames):
            mask[row, f] = True
        return mask

    def most(self, width: int) -> int:
        """A bound on the masked frames of rows up to ``width`` frames; exact for static overlapping spans."""
        spans = self._spans(width, 1.0)
        longest = {"static": self.length, "uniform": 2 * self.length}.get(self.kind, width)
        return max(0, min(spans * longest, width - 1))

    def shortest(self) -> int:
        """Frames from which static overlapping spans leave a frame unmasked whatever is drawn."""
        size = self.length + self.min_masks + 1
        while self._spans(size, 1.0) >= size - self.length:
            size += 1
        return size

    def _spans(self, size: int, uniform: float) -> int:
        if not self.probability or not size:
            return 0
        expected = self.probability * size / self.length
        # the second bound matters only where the sum rounds up to the next whole number
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

        A part [s, e) takes starts in [s, e − span), so it keeps its last frame free; the left part that
        a span leaves is given one frame more for that.
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
    """``count`` of the frames at random, or random others of the row's ``size`` added to them."""
    if len(frames) > count:
        return rng.choice(frames, count, replace=False)
    free = np.setdiff1d(np.arange(size), frames)
    added = rng.choice(free, min(count - len(frames), len(free)), replace=False)
    return np.concatenate([frames, added])


def frame_table(mask: NDArray[np.bool_], width: int | None = None) -> tuple[Tensor, Tensor]:
    """Positions of the masked frames: index (B, M) int64, ascending, and weight (B, M) float32.

    M is ``width``, or the largest count of a row. Surplus entries have index 0 and weight 0.

    >>> frame_table(np.array([[False, True, True], [False, False, True]]))
    (tensor([[1, 2],
            [2, 0]]), tensor([[1., 1.],
            [1., 0.]]))
    """
    counts = mask.sum(1)
    most = int(counts.max(initial=0))
    if width is not None and width < most:
        raise ValueError(f"{most} masked frames in a row do not fit a table {width} wide")
    entries = np.arange(most if width is None else width)
    used = entries < counts[:, None]
    index = np.zeros(used.shape, np.int64)
    index[used] = np.nonzero(mask)[1]  # both run row by row
    return torch.from_numpy(index), torch.from_numpy(used.astype(np.float32))


def draw_negatives(counts: Sequence[int], width: int, negatives: int, seed: int) -> Tensor:
    """Negatives (B, M, K) of each masked frame: positions among the ``counts`` masked frames of its row.

    Uniform over the row's other masked frames, with replacement: a draw v below count − 1 stands for
    v + (v ≥ own position) (wav2vec 2.0's sampler). Surplus entries, from a row's count to ``width`` = M,
    are 0 and are never drawn, and a row's draws do not depend on M. A row with one masked frame has no
    other: its negatives are that frame itself, which the loss excludes because it carries the
    positive's code, so its loss is 0.

    int16 where the range allows (a quarter of int64 to copy to the device), else int32.
    """
    dtype = np.int16 if width <= np.iinfo(np.int16).max else np.int32
    table = np.zeros((len(counts), width, negatives), dtype)
    for row, count in enumerate(counts):
        if count > 1:
            # its own address: masks drawn with the same seed share nothing with it
            rng = np.random.default_rng(seed_at(seed, _NEGATIVES, row))
            table[row, :count] = others(rng.integers(0, count - 1, (count, negatives), np.int32))
    return torch.from_numpy(table)


def others(drawn: NDArray[np.signedinteger]) -> NDArray[np.signedinteger]:
    """Draws (M, K) below M − 1 -> positions below M that are never the row's own."""
    own = np.arange(len(drawn), dtype=drawn.dtype)[:, None]
    shifted: NDArray[np.signedinteger] = drawn + (drawn >= own)
    return shifted
