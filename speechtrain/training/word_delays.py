"""How late a model writes its words, against the sound.

A transducer writes a word's first label when it has heard enough, and its last one often before the sound
ends. Both shifts are properties of a trained model, and the times of its words leave them out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from speechtrain.batch import Batch
from speechtrain.task import Example

START, END = "start_delay", "end_delay"
"""Metrics: the median seconds from the first sound to the first word, and from the last to the last."""

_BIN, _MOST = 0.01, 1.0  # seconds: of a bin of the histogram, and of the largest delay in it
_ABOVE_NOISE, _BELOW_SPEECH = 10.0, 30.0  # dB: what is louder than the quiet and near the loud is sound
_CLEAR = 15.0  # dB between the quiet and the loud, for the sound to have an edge


class WordDelays:
    """Histograms of both delays over batches, then over ranks."""

    def __init__(self) -> None:
        self._counts = np.zeros((2, round(2 * _MOST / _BIN) + 1))

    def add(self, batch: Batch, examples: Iterable[Example], sample_rate: int) -> None:
        """Count the rows of a batch on the host that ``examples`` have words for."""
        written = {example.id: example.span for example in examples if example.span}
        for row, name in enumerate(batch.ids):
            samples = batch.audio[row, : int(batch.audio_lengths[row])].numpy()
            if name in written and (heard := sound(samples, sample_rate)):
                late = np.array(written[name]) - np.array(heard)
                at = np.rint((late + _MOST) / _BIN).astype(int).clip(0, self._counts.shape[1] - 1)
                self._counts[(0, 1), at] += 1

    def medians(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """START and END over all ranks, in seconds; empty where nothing was written."""
        counts = sum_over_ranks(torch.from_numpy(self._counts)).cpu().numpy()
        if not counts.sum():
            return {}
        half = counts.sum(axis=1, keepdims=True) / 2
        at = (counts.cumsum(axis=1) < half).sum(axis=1)
        return dict(zip((START, END), (at * _BIN - _MOST).round(3).tolist(), strict=True))


def sound(samples: np.ndarray, sample_rate: int) -> tuple[float, float] | None:
    """The seconds in which samples (S,) have sound, or None where it is no louder than what is around it."""
    hop = round(_BIN * sample_rate)
    hops = samples[: len(samples) // hop * hop].reshape(-1, hop)
    if not len(hops):
        return None
    loudness = 10 * np.log10(np.square(hops, dtype=np.float64).mean(axis=1) + 1e-10)
    quiet, loud = np.percentile(loudness, (5, 95))
    if loud - quiet < _CLEAR:
        return None
    (heard,) = np.nonzero(loudness > max(quiet + _ABOVE_NOISE, loud - _BELOW_SPEECH))
    return float(heard[0]) * _BIN, float(heard[-1] + 1) * _BIN
