"""Error rates as sums and counts, and metrics that are divided once, after the last reduction."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

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


_SAMPLES = 1_000
_PERCENTILES = (2.5, 97.5)


def rate_interval(counts: np.ndarray) -> list[float]:
    """Return the 95 % interval of an error rate from (errors, words) of each utterance, (N, 2).

    The bounds are percentiles of 1,000 resamplings of utterances with a fixed seed (Bisani and Ney, 2004).
    Returns [] for utterances without words.
    """
    if not counts[:, 1].sum():
        return []
    # Utterances of equal counts are drawn together: the same distribution, in a fraction of the time.
    kinds, frequencies = np.unique(counts, axis=0, return_counts=True)
    generator = np.random.default_rng(0)
    rates = []
    for _ in range(_SAMPLES):
        errors, words = generator.multinomial(len(counts), frequencies / len(counts)) @ kinds
        if words:
            rates.append(errors / words)
        else:
            rates.append(0.0)
    return [float(bound) for bound in np.percentile(rates, _PERCENTILES)]


_MAX_PENDING = 4096  # batches whose scalars stay on the device before they are read


class MetricSums:
    """Named sums and counts over batches, then over ranks, exact in float64.

    The scalars of a batch become one vector on their device, which only ``reduce``, ``totals`` and ``means``
    read. This costs one copy to the host per batch, and no additional graph on devices that record graphs.
    After 4096 batches the vectors are read early, to bound memory.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[list[str], Tensor]] = []
        self._totals: dict[str, Tensor] = {}

    def add(self, sums: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Add one batch's ``name: (sum, count)``, scalars of any real dtype on any device."""
        groups: dict[tuple[torch.device, torch.dtype], list[str]] = {}
        for name, (total, count) in sums.items():
            # The batch has this dtype on the device already. Not every device has fp64.
            dtype = torch.promote_types(total.dtype, count.dtype)
            groups.setdefault((total.device, dtype), []).append(name)
        for (device, dtype), names in groups.items():
            scalars = []
            for name in names:
                scalars += [scalar.detach().to(device, dtype).reshape(()) for scalar in sums[name]]
            self._pending.append((names, torch.stack(scalars)))
        if len(self._pending) >= _MAX_PENDING:
            self._read_all()

    def _read_all(self) -> dict[str, Tensor]:
        """Add all pending vectors to the totals and return them: (2,) float64 on the host for each name."""
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
        """Return each sum divided by its count, or infinity if the count is 0, as for a WER without words."""
        means = {}
        for name, (total, count) in self.totals().items():
            means[name] = total / count if count else math.inf
        return means
