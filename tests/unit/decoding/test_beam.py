"""Beam search of transducers against all label sequences, and what an n-best list promises."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from speechtrain.decoding.base import Hypothesis, TransducerScorer
from speechtrain.decoding.beam import TransducerBeam
from speechtrain.decoding.greedy import Greedy
from speechtrain.errors import ConfigError
from speechtrain.losses.transducer import transducer_loss
from tests.support.label_sequences import small_transducer, transducer_sequences
from tests.support.scorers import BLANK


def log_probabilities(
    scorer: TransducerScorer, frames: Tensor, length: Tensor, sequences: Collection[tuple[int, ...]]
) -> dict[tuple[int, ...], float]:
    """Minus the loss of each sequence of labels for the frames (T, H) of one utterance."""
    rows = [torch.tensor(labels, dtype=torch.int64) for labels in sequences]
    padded = pad_sequence(rows, batch_first=True)
    losses = transducer_loss(
        frames.double().expand(len(rows), -1, -1),
        scorer.joint.prediction(scorer.prediction(padded)).double(),
        weight=scorer.joint.output.weight.double(),
        bias=scorer.joint.output.bias.double(),
        labels=padded,
        encoder_lengths=length.expand(len(rows)),
        label_lengths=torch.tensor([len(labels) for labels in rows]),
        blank=BLANK,
        compute_dtype=torch.float64,
    )
    return dict(zip(sequences, (-losses).tolist(), strict=True))


@cache
def lattices(seed: int) -> tuple[TransducerScorer, Tensor, Tensor]:
    """A model and 50 utterances of 2 to 5 frames."""
    scorer = small_transducer(seed, "lstm" if seed % 2 else "stateless")
    return scorer, torch.randn(50, 5, 8), torch.arange(50) % 4 + 2


@pytest.mark.slow
@torch.no_grad()
def test_search_finds_the_likeliest_sequence_with_exact_scores() -> None:
    found = 0
    for seed in range(4):
        scorer, frames, lengths = lattices(seed)
        every = transducer_sequences(scorer, frames, lengths)
        decoder = TransducerBeam(width=8, nbest=8)
        sequences, sums = decoder.search(scorer, frames, lengths)
        decoded = decoder.decode(scorer, frames, lengths)
        greedy = Greedy().decode(scorer, frames, lengths)
        for row, totals in enumerate(every):
            listed = (decoded[row], *decoded[row].alternatives)
            named = {one.labels for one in (*sequences[row], *listed, greedy[row])}
            exact = log_probabilities(scorer, frames[row], lengths[row], named)
            for labels in named & totals.keys():  # the loss and the enumeration agree
                assert exact[labels] == pytest.approx(totals[labels], abs=1e-5)
            for searched, total in zip(sequences[row], sums[row].tolist(), strict=False):
                assert total <= exact[searched.labels] + 1e-5, "a path is counted twice"
            for one in listed:
                assert one.score == pytest.approx(exact[one.labels], abs=1e-5)
            assert listed[0].score >= exact[greedy[row].labels] - 1e-5
            assert len({one.labels for one in listed}) == len(listed)
            found += max(totals, key=lambda name: totals[name]) in {one.labels for one in listed}
    assert found >= 0.99 * 200


@torch.no_grad()
def test_beam_scores_are_minus_the_loss_with_times_within() -> None:
    scorer, frames, lengths = lattices(1)
    for row, one in enumerate(TransducerBeam().decode(scorer, frames, lengths)):
        exact = log_probabilities(scorer, frames[row], lengths[row], [one.labels])
        assert one.score == pytest.approx(exact[one.labels], abs=1e-5)
        assert len(one.times) == len(one.ends) == len(one.confidences) == len(one.labels)
        assert list(one.times) == sorted(one.times)
        assert all(
            0 <= begin < end <= lengths[row] * 0.5 for begin, end in zip(one.times, one.ends, strict=True)
        )
        assert all(0 < sure <= 1 for sure in one.confidences)


def test_rows_without_frames_have_no_text() -> None:
    scorer, frames, _ = lattices(1)
    found = TransducerBeam().decode(scorer, frames[:3], torch.tensor([0, 3, 0]))
    assert [one.text == "" and one.score == 0 for one in found] == [True, False, True]


def test_beam_orders_by_score_or_by_score_per_label() -> None:
    scorer, frames, lengths = lattices(1)
    plain = TransducerBeam(width=8, nbest=8, normalise_score=False).decode(scorer, frames, lengths)
    scaled = TransducerBeam(width=8, nbest=8, normalise_score=True).decode(scorer, frames, lengths)
    for one, other in zip(plain, scaled, strict=True):
        scores = [found.score for found in (one, *one.alternatives)]
        assert scores == sorted(scores, reverse=True)
        assert other.score / (len(other.labels) + 1) >= one.score / (len(one.labels) + 1) - 1e-6
        for best in (one, other):
            merits = [text.merit for text in (best, *best.alternatives)]
            assert merits == sorted(merits, reverse=True)
        assert other.merit == other.score / (len(other.labels) + 1)


@pytest.mark.parametrize(
    ("scores", "order"), [((-6.0, -7.0, -5.0), [3, 2, 20]), ((6.0, 5.5, 7.0), [2, 3, 20])]
)
def test_a_text_below_greedys_comes_after_all_others(scores: tuple[float, ...], order: list[int]) -> None:
    """Also if it has the highest score per label, and if a language model's bonus makes scores positive."""
    texts = []
    for size, score in zip((2, 20, 3), scores, strict=True):
        texts.append(Hypothesis(labels=(0,) * size, text="", score=score, times=()))
    best = TransducerBeam(nbest=3)._best_first(texts)
    texts = [best, *best.alternatives]
    assert [len(text.labels) for text in texts] == order
    merits = [text.merit for text in texts]
    assert merits == sorted(set(merits), reverse=True)


def test_a_model_without_meaning_does_not_end_an_evaluation() -> None:
    scorer, frames, lengths = lattices(1)
    found = TransducerBeam().decode(scorer, torch.full_like(frames[:3], torch.nan), lengths[:3])
    assert len(found) == 3


def test_a_model_with_durations_is_sent_to_greedy() -> None:
    scorer, frames, lengths = lattices(1)
    scorer.joint.durations = (0, 1)
    with pytest.raises(ConfigError, match=r"durations.*decoder=greedy"):
        TransducerBeam().decode(scorer, frames, lengths)
