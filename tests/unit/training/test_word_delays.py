"""How late words are written, against the sound."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from speechtrain.batch import Batch
from speechtrain.task import Example
from speechtrain.training.word_delays import END, START, WordDelays, sound

RATE = 16_000


def utterance(
    begin: float, end: float, seconds: float = 3.0, hiss: float = 1e-3, seed: int = 0
) -> np.ndarray:
    """Speech-like noise between two times, in quieter noise."""
    noise = np.random.default_rng(seed).standard_normal(round(seconds * RATE))
    time = np.arange(len(noise)) / RATE
    samples: np.ndarray = (noise * np.where((time >= begin) & (time < end), 0.2, hiss)).astype(np.float32)
    return samples


@pytest.mark.parametrize("hiss", [0.0, 1e-4, 1e-3, 1e-2])
def test_sound_has_edges(hiss: float) -> None:
    assert sound(utterance(0.7, 2.1, hiss=hiss), RATE) == pytest.approx((0.7, 2.1), abs=0.02)


def test_without_an_edge_there_is_no_sound() -> None:
    assert sound(utterance(0.7, 2.1, hiss=0.1), RATE) is None
    assert sound(np.zeros(RATE, np.float32), RATE) is None
    assert sound(np.zeros(3, np.float32), RATE) is None


def batch_of(spans: list[tuple[float, float]]) -> Batch:
    audio = torch.stack([torch.from_numpy(utterance(*span, seed=i)) for i, span in enumerate(spans)])
    rows = len(spans)
    zeros = torch.zeros(rows, dtype=torch.int64)
    return Batch(
        audio=audio,
        audio_lengths=torch.full((rows,), audio.shape[1]),
        labels=torch.zeros(rows, 0, dtype=torch.int64),
        label_lengths=zeros,
        weight=torch.ones(rows),
        keys=zeros,
        ids=tuple(str(i) for i in range(rows)),
        texts=("",) * rows,
    )


def test_the_medians_are_those_of_all_ranks() -> None:
    spans = [(0.3 + 0.1 * i, 2.0 + 0.1 * i) for i in range(5)]
    late = [(0.1, -0.2), (0.2, -0.1), (0.15, -0.15), (0.9, 0.5), (0.12, -0.3)]  # one is far off
    examples = [
        Example(str(i), "one", "one", (begin + a, end + b))
        for i, ((begin, end), (a, b)) in enumerate(zip(spans, late, strict=True))
    ]
    whole = WordDelays()
    whole.add(batch_of(spans), [*examples[:5], Example("none", "one", "")], RATE)
    found = whole.medians(lambda counts: counts)
    assert found == {START: pytest.approx(0.15, abs=0.02), END: pytest.approx(-0.15, abs=0.02)}
    ranks = [WordDelays(), WordDelays()]
    ranks[0].add(batch_of(spans), examples[:2], RATE)
    ranks[1].add(batch_of(spans), examples[2:], RATE)
    both: list[torch.Tensor] = []
    for rank in ranks:
        rank.medians(lambda counts: both.append(counts.clone()) or counts)  # type: ignore[func-returns-value]
    assert ranks[0].medians(lambda _: both[0] + both[1]) == found
    assert WordDelays().medians(lambda counts: counts) == {}
