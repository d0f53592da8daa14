"""Error rates, and metrics as sums and counts, which are divided once after the last reduction."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from rapidfuzz.distance import Levenshtein
from torch import Tensor


def word_errors(reference: str, hypothesis: str) -> tuple[int, int]:
    """Return the Levenshtein distance in words (split at white space), and the words of the reference."""
    words = reference.split()
    return Levenshtein.distance(words, hypothesis.split()), len(words)


def character_errors(reference: str, hypothesis: str) -> tuple[int, int]:
    """Return the Levenshtein distance in characters, and the characters of the reference.

    A single space between words counts as a character. Other white space does not count.
    """
    characters = " ".join(reference.split())
    return Levenshtein.distance(characters, " ".join(hypothesis.split())), len(characters)


def equal_words(words: Sequence[str], others: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield the positions of the words that an alignment with the fewest errors leaves as they are."""
    for block in Levenshtein.opcodes(words, others).as_matching_blocks():
        for offset in range(block.size):
            yield block.a + offset, block.b + offset


def error_rates(pairs: Iterable[tuple[str, str]]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return ``wer`` and ``cer`` of (reference, hypothesis) pairs as error sums and counts, () float64."""
    pairs = list(pairs)
    rates = {}
    for name, errors_of in (("wer", word_errors), ("cer", character_errors)):
        errors = units = 0
        for reference, hypothesis in pairs:
            pair_errors, pair_units = errors_of(reference, hypothesis)
            errors += pair_errors
            units += pair_units
        rates[name] = (torch.tensor(errors, dtype=torch.float64), torch.tensor(units, dtype=torch.float64))
    return rates


_BINS_PER_SECOND = 100
_LONGEST_DELAY = 60  # seconds


def delay_counts(delays: Sequence[float]) -> Tensor:
    """Return the numbers (N,) float64 of delays by their duration, in steps of 10 ms from 0 to 60 s.

    ``delays`` are in seconds. A negative delay counts as 0, and a longer delay as 60 s.
    """
    last_bin = _LONGEST_DELAY * _BINS_PER_SECOND
    bins = (torch.tensor(delays, dtype=torch.float64) * _BINS_PER_SECOND).round().clamp(0, last_bin)
    return torch.bincount(bins.long(), minlength=last_bin + 1).double()


def delay_of_90_percent(counts: Tensor) -> float:
    """Return the shortest delay in seconds that at least 90 % of ``delay_counts`` (N,) do not exceed.

    It is infinite without any delay.
    """
    cumulated = counts.cumsum(0)
    delays = cumulated[-1]
    if not delays:
        return math.inf
    return int((10 * cumulated < 9 * delays).sum()) / _BINS_PER_SECOND


_RESAMPLINGS = 1_000
_PERCENTILES = (2.5, 97.5)


def rate_interval(counts: np.ndarray) -> list[float]:
    """Return the bounds of the 95 % interval of an error rate, or [] if no utterance has words.

    ``counts`` (N, 2) has the numbers of errors and of reference words of each utterance. The bounds are
    percentiles of 1,000 bootstrap resamplings of the utterances with a fixed seed (Bisani and Ney, 2004).
    """
    if not counts[:, 1].sum():
        return []
    # One multinomial draw says how often each distinct row of ``counts`` is resampled. The distribution is
    # the same as if utterances were drawn one by one, which would take much longer.
    distinct_counts, frequencies = np.unique(counts, axis=0, return_counts=True)
    generator = np.random.default_rng(0)
    rates = []
    for _ in range(_RESAMPLINGS):
        errors, words = generator.multinomial(len(counts), frequencies / len(counts)) @ distinct_counts
        if words:
            rates.append(errors / words)
        else:
            rates.append(0.0)
    return [float(bound) for bound in np.percentile(rates, _PERCENTILES)]


_MAX_PENDING = 4096  # vectors of batches that stay on the device before they are read


class MetricSums:
    """Named sums and counts, which are added over batches and then over ranks, in float64.

    ``add`` stacks the scalars of a batch to one vector on their device, and does not read it, so the device
    is not awaited. ``reduce``, ``totals`` and ``means`` read all vectors, with one copy to the host for each.
    After 4096 batches the vectors are read early, to limit the memory.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[list[str], Tensor]] = []
        """Names of metrics, and a vector with the sum and the count of each metric in turn."""
        self._totals: dict[str, Tensor] = {}
        """Sum and count of each metric in the vectors that were read, (2,) float64 on the host."""

    def add(self, sums: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Add ``name: (sum, count)`` of one batch. The scalars have any real dtype and any device."""
        # Metrics with the same device and dtype are stacked to one vector. The dtype is one of the two dtypes
        # of the metric, and not fp64, because not every device has fp64.
        names_by_kind: dict[tuple[torch.device, torch.dtype], list[str]] = {}
        for name, (total, count) in sums.items():
            dtype = torch.promote_types(total.dtype, count.dtype)
            names_by_kind.setdefault((total.device, dtype), []).append(name)
        for (device, dtype), names in names_by_kind.items():
            scalars = []
            for name in names:
                scalars += [scalar.detach().to(device, dtype).reshape(()) for scalar in sums[name]]
            self._pending.append((names, torch.stack(scalars)))
        if len(self._pending) >= _MAX_PENDING:
            self._read_all()

    def merge(self, other: MetricSums) -> None:
        """Add the sums of ``other``, which stay on their device."""
        for name, pair in other._totals.items():
            self._totals[name] = self._totals.get(name, 0.0) + pair
        self._pending += other._pending
        if len(self._pending) >= _MAX_PENDING:
            self._read_all()

    def _read_all(self) -> dict[str, Tensor]:
        """Add all pending vectors to the totals, and return the totals."""
        for names, vector in self._pending:
            pairs = vector.cpu().double().view(-1, 2)
            for name, pair in zip(names, pairs, strict=True):
                self._totals[name] = self._totals.get(name, 0.0) + pair
        self._pending = []
        return self._totals

    def reduce(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> None:
        """Replace the sums by the sums over all ranks.

        ``sum_over_ranks`` is called once, with a float64 vector on the host: sum and count of each
        metric, in the order of the names. Every rank must have added the same names.
        """
        totals = self._read_all()
        names = sorted(totals)
        if names:
            vector = torch.cat([totals[name] for name in names])
            pairs = sum_over_ranks(vector).cpu().reshape(-1, 2)
            self._totals = dict(zip(names, pairs, strict=True))

    def totals(self) -> dict[str, tuple[float, float]]:
        """Return ``name: (sum, count)`` so far."""
        totals = {}
        for name, pair in self._read_all().items():
            totals[name] = (float(pair[0]), float(pair[1]))
        return totals

    def means(self) -> dict[str, float]:
        """Return each sum divided by its count.

        A mean is infinite if its count is 0, such as a WER without reference words.
        """
        means = {}
        for name, (total, count) in self.totals().items():
            means[name] = total / count if count else math.inf
        return means
