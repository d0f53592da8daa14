"""A language model, word bonus and phrases in both beams, against all label sequences."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from speechtrain.decoding.base import CTCScorer, Scorer, TransducerScorer
from speechtrain.decoding.beam import BeamSearch, TransducerBeam
from speechtrain.decoding.ctc_beam import CTCBeam
from speechtrain.decoding.fusion import Fusion
from speechtrain.decoding.greedy import Greedy
from speechtrain.errors import ConfigError, DataError
from speechtrain.text.ngram import NGram, write_ngram
from speechtrain.text.vocabulary import Characters
from tests.support.label_sequences import ctc_sequences, small_transducer, transducer_sequences

LETTERS = Characters(" ab")
ADDED = {"word_bonus": 0.7, "hotwords": ["ab", "b a"], "hotword_bonus": 2.0, "lm_weight": 0.8}


@pytest.fixture
def lm(tmp_path: Path) -> str:
    write_ngram(["a ab", "ab b a", "b b", "ab a"], tmp_path / "lm.arpa", 2)
    return str(tmp_path / "lm.arpa")


def plain_total(text: str, model: NGram, weight: float) -> float:
    """What a text earns, from the words of the whole text: the second implementation."""
    words, total, context = text.split(), 0.0, ("<s>",)
    for word in [*words, "</s>"]:
        total += weight * model.score(context, word)
        context = model.next_context(context, word)
    return total + ADDED["word_bonus"] * len(words)


def phrases_in(text: str, phrases: list[str] = ADDED["hotwords"]) -> int:
    """Return the number of occurrences of all phrases as whole words, overlapping ones included."""
    count = 0
    for phrase in phrases:
        count += len(re.findall(rf"(?<!\S)(?={re.escape(phrase)}(?!\S))", text))
    return count


@pytest.mark.parametrize(
    ("phrases", "text"),
    [
        (["a", "a b"], "a b"),  # One begins the other.
        (["a", "a b"], "b a a b a"),
        (["b", "a b"], "a b"),  # One ends the other.
        (["a b a"], "a b a b a"),  # One overlaps itself.
        (["a b", "b a"], "a b a b"),
        (["a", "b", "a b", "b a b"], "b a b a b"),
        (["ab", "ab b", "ab b a"], "ab b ab b a"),
        (["ab", "ab"], "ab"),
    ],
)
def test_fusion_total_counts_each_occurrence_of_each_phrase(phrases: list[str], text: str) -> None:
    fusion = Fusion(phrases=phrases, phrase_bonus=2.0)
    fusion.start_search(LETTERS)
    expected = 2.0 * phrases_in(text, sorted(set(phrases)))
    assert fusion.text_score(LETTERS.encode(text)) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("text", ["", "ab", "abb", "b a", "b ab", "b  a", "ab b a", "a b a ab", "b", " ab "])
def test_a_text_earns_its_words_and_phrases(lm: str, text: str) -> None:
    model = NGram(lm)
    fusion = Fusion(model, 0.8, 0.7, phrases=ADDED["hotwords"], phrase_bonus=2.0)
    fusion.start_search(LETTERS)
    expected = plain_total(text, model, 0.8) + 2.0 * phrases_in(text)
    assert fusion.text_score(LETTERS.encode(text)) == pytest.approx(expected, abs=1e-5)
    # the search adds the same, label by label, but for what the end of the text adds
    extra, state = torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.int64)
    for label in LETTERS.encode(text + " "):
        extra = fusion.label_scores(extra, state).expand(1, 1, 3)[..., label]
        state = fusion.advance(state, torch.tensor([[label]]), torch.tensor([[True]]))
    context, _, prefixes = fusion._states[int(state)]
    end = 0.8 * model.score(context, "</s>")
    incomplete = 2.0 * fusion._fraction(prefixes)
    assert float(extra) + end - incomplete == pytest.approx(expected, abs=1e-5)


def check(
    decoder: BeamSearch, scorer: Scorer, frames: Tensor, totals: list[dict[tuple[int, ...], float]]
) -> None:
    lengths = torch.full((len(frames),), frames.shape[1])
    found = 0
    for one, known in zip(decoder.decode(scorer, frames, lengths), totals, strict=True):
        fused = {labels: score + decoder.fusion.text_score(labels) for labels, score in known.items()}
        for listed in (one, *one.alternatives):
            assert listed.score == pytest.approx(fused.get(listed.labels, listed.score), abs=1e-4)
        found += one.score >= max(fused.values()) - 1e-4
    assert found >= 0.9 * len(frames)


@torch.no_grad()
def test_the_best_sum_is_found(lm: str) -> None:
    torch.manual_seed(0)
    settings = {"width": 12, "nbest": 4, "normalise_score": False, "lm": lm, **ADDED}
    frames = (torch.randn(40, 5, 4) * 1.5).log_softmax(-1)
    check(CTCBeam(**settings), CTCScorer(LETTERS, 0.1), frames, [ctc_sequences(one) for one in frames])
    scorer = small_transducer(1)
    scorer = TransducerScorer(LETTERS, 0.1, prediction=scorer.prediction, joint=scorer.joint)
    frames = torch.randn(40, 4, 8)
    totals = transducer_sequences(scorer, frames, torch.full((40,), 4))
    check(TransducerBeam(**settings), scorer, frames, totals)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("is_fused", [True, False])
@torch.no_grad()
def test_no_text_has_a_lower_score_than_greedys(lm: str, is_fused: bool, normalise: bool) -> None:
    """Also where texts are long, and a beam finds others than greedy does."""
    torch.manual_seed(0)
    settings = {"width": 2, "normalise_score": normalise, **({"lm": lm, **ADDED} if is_fused else {})}
    network = small_transducer(1)
    network.joint.output.bias[-1] += 3.0  # a label in two frames, not five in one
    transducer = TransducerScorer(LETTERS, 0.1, prediction=network.prediction, joint=network.joint)
    frames, lengths = torch.randn(64, 30, 8), torch.arange(64) % 21 + 10
    scores = (torch.randn(64, 30, 4) * 1.5).log_softmax(-1)
    for decoder, scorer, given in (
        (TransducerBeam(**settings), transducer, frames),
        (CTCBeam(**settings), CTCScorer(LETTERS, 0.1), scores),
    ):
        found, others = decoder.decode(scorer, given, lengths), Greedy().decode(scorer, given, lengths)
        assert any(one.labels != other.labels for one, other in zip(found, others, strict=True))
        for row, (one, other) in enumerate(zip(found, others, strict=True)):
            labels = torch.tensor([other.labels], dtype=torch.int64).view(1, -1)
            alone = (given[row, None], lengths[row, None], labels, torch.tensor([len(other.labels)]))
            exact = float(scorer.log_likelihood(*alone)) + decoder.fusion.text_score(other.labels)
            assert one.score >= exact - 1e-4


def test_a_phrase_that_cannot_be_written_and_a_missing_model_are_one_line(tmp_path: Path) -> None:
    frames = torch.zeros(1, 2, 4).log_softmax(-1)
    for decoder in (CTCBeam(hotwords=["zebra"]), CTCBeam(hotwords=[""])):
        with pytest.raises(ConfigError, match=r"decoder.hotwords: '.*' has symbols that"):
            decoder.decode(CTCScorer(LETTERS, 0.1), frames, torch.tensor([2]))
    with pytest.raises(DataError, match=r"decoder.lm: .*none.arpa: No such file"):
        TransducerBeam(lm=str(tmp_path / "none.arpa"))


def test_words_have_times_and_confidences() -> None:
    labels = [2, 3, 3, 0, 3, 1, 2, 2]  # b, blank twice, space, blank, a, b
    scores = (torch.eye(4)[labels] * 9).log_softmax(-1)[None]
    for decoder in (CTCBeam(), CTCBeam(width=1)):
        (one,) = decoder.decode(CTCScorer(LETTERS, 0.5), scores, torch.tensor([8]))
        assert [(word.text, word.start, word.end) for word in one.words] == [
            ("b", 0.0, 0.5),
            ("ab", 2.5, 4.0),
        ]
        assert all(0.9 < word.confidence <= 1 for word in one.words)
