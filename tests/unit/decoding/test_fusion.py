"""Tests of a language model, a word bonus and phrases in the CTC beam and in the transducer beam."""

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
from tests.support.label_sequences import (
    LogProbabilities,
    ctc_sequences,
    small_transducer,
    transducer_sequences,
)

LETTERS = Characters(" ab")  # The labels 0, 1 and 2 are the space, a and b. The blank is 3.
FUSION_KEYS = {"word_bonus": 0.7, "hotwords": ["ab", "b a"], "hotword_bonus": 2.0, "lm_weight": 0.8}


@pytest.fixture
def lm(tmp_path: Path) -> str:
    """Return the path of a bigram model."""
    write_ngram(["a ab", "ab b a", "b b", "ab a"], tmp_path / "lm.arpa", 2)
    return str(tmp_path / "lm.arpa")


def score_of_words(text: str, model: NGram, weight: float) -> float:
    """Return the score of the words and of the end of ``text``. ``Fusion`` computes it label by label."""
    words = text.split()
    score = 0.0
    context = ("<s>",)
    for word in [*words, "</s>"]:
        score += weight * model.score(context, word)
        context = model.next_context(context, word)
    return score + FUSION_KEYS["word_bonus"] * len(words)


def count_phrases(text: str, phrases: list[str]) -> int:
    """Return the number of occurrences of all phrases as whole words, overlapping ones included."""
    count = 0
    for phrase in phrases:
        count += len(re.findall(rf"(?<!\S)(?={re.escape(phrase)}(?!\S))", text))
    return count


@pytest.mark.parametrize(
    ("phrases", "text"),
    [
        (["a", "a b"], "a b"),  # The second phrase begins with the first phrase.
        (["a", "a b"], "b a a b a"),
        (["b", "a b"], "a b"),  # The second phrase ends with the first phrase.
        (["a b a"], "a b a b a"),  # The phrase overlaps itself.
        (["a b", "b a"], "a b a b"),
        (["a", "b", "a b", "b a b"], "b a b a b"),
        (["ab", "ab b", "ab b a"], "ab b ab b a"),
        (["ab", "ab"], "ab"),
    ],
)
def test_fusion_text_score_counts_each_occurrence_of_each_phrase(phrases: list[str], text: str) -> None:
    fusion = Fusion(phrases=phrases, phrase_bonus=2.0)
    fusion.start_search(LETTERS)
    expected = 2.0 * count_phrases(text, sorted(set(phrases)))
    assert fusion.text_score(LETTERS.encode(text)) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("text", ["", "ab", "abb", "b a", "b ab", "b  a", "ab b a", "a b a ab", "b", " ab "])
def test_fusion_scores_of_a_text_and_of_its_labels_agree(lm: str, text: str) -> None:
    model = NGram(lm)
    phrases = FUSION_KEYS["hotwords"]
    fusion = Fusion(model, 0.8, 0.7, phrases=phrases, phrase_bonus=2.0)
    fusion.start_search(LETTERS)
    expected = score_of_words(text, model, 0.8) + 2.0 * count_phrases(text, phrases)
    assert fusion.text_score(LETTERS.encode(text)) == pytest.approx(expected, abs=1e-5)
    # A search adds the scores label by label. The space at the end completes the last word.
    text_scores, states = torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.int64)
    for label in LETTERS.encode(text + " "):
        text_scores = fusion.label_scores(text_scores, states)[..., label]
        states = fusion.advance(states, torch.tensor([[label]]), torch.tensor([[True]]))
    # The end of the text adds a score of the language model, and subtracts the parts of incomplete phrases.
    context, _, prefixes = fusion._states[int(states)]
    end_score = 0.8 * model.score(context, "</s>")
    incomplete_score = 2.0 * fusion._fraction(prefixes)
    assert float(text_scores) + end_score - incomplete_score == pytest.approx(expected, abs=1e-5)


def assert_beam_finds_best_texts(
    beam: BeamSearch, scorer: Scorer, frames: Tensor, log_probabilities: list[LogProbabilities]
) -> None:
    """Compare a beam with exhaustive search. ``log_probabilities`` has the label sequences of each row.

    The scores of all texts must be exact. A beam may miss the best text in a tenth of the rows.
    """
    lengths = torch.full((len(frames),), frames.shape[1])
    exact_rows = 0
    for best, row_log_probabilities in zip(
        beam.decode(scorer, frames, lengths), log_probabilities, strict=True
    ):
        scores = {}
        for labels, log_probability in row_log_probabilities.items():
            scores[labels] = log_probability + beam.fusion.text_score(labels)
        for hypothesis in (best, *best.alternatives):
            # The exhaustive search omits the longest sequences.
            if hypothesis.labels in scores:
                assert hypothesis.score == pytest.approx(scores[hypothesis.labels], abs=1e-4)
        if best.score >= max(scores.values()) - 1e-4:
            exact_rows += 1
    assert exact_rows >= 0.9 * len(frames)


@torch.no_grad()
def test_beams_with_fusion_find_the_best_texts(lm: str) -> None:
    torch.manual_seed(0)
    settings = {"width": 12, "nbest": 4, "normalise_score": False, "lm": lm, **FUSION_KEYS}
    ctc_scores = (torch.randn(40, 5, 4) * 1.5).log_softmax(-1)
    ctc_totals = [ctc_sequences(row_scores) for row_scores in ctc_scores]
    assert_beam_finds_best_texts(CTCBeam(**settings), CTCScorer(LETTERS, 0.1), ctc_scores, ctc_totals)
    network = small_transducer(1)
    scorer = TransducerScorer(LETTERS, 0.1, prediction=network.prediction, joint=network.joint)
    frames = torch.randn(40, 4, 8)
    transducer_totals = transducer_sequences(scorer, frames, torch.full((40,), 4))
    assert_beam_finds_best_texts(TransducerBeam(**settings), scorer, frames, transducer_totals)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("is_fused", [True, False])
@torch.no_grad()
def test_beams_return_no_lower_score_than_the_score_of_the_greedy_text(
    lm: str, is_fused: bool, normalise: bool
) -> None:
    """The texts are long, and a beam and the greedy search return different texts for some rows."""
    torch.manual_seed(0)
    settings = {"width": 2, "normalise_score": normalise}
    if is_fused:
        settings |= {"lm": lm, **FUSION_KEYS}
    network = small_transducer(1)
    # A higher score of the blank gives a text one label in two frames, instead of five labels in one frame.
    network.joint.output.bias[-1] += 3.0
    scorer = TransducerScorer(LETTERS, 0.1, prediction=network.prediction, joint=network.joint)
    frames, lengths = torch.randn(64, 30, 8), torch.arange(64) % 21 + 10
    ctc_scores = (torch.randn(64, 30, 4) * 1.5).log_softmax(-1)
    assert_no_lower_score_than_greedy(TransducerBeam(**settings), scorer, frames, lengths)
    assert_no_lower_score_than_greedy(CTCBeam(**settings), CTCScorer(LETTERS, 0.1), ctc_scores, lengths)


def assert_no_lower_score_than_greedy(
    beam: BeamSearch, scorer: Scorer, frames: Tensor, lengths: Tensor
) -> None:
    beam_results = beam.decode(scorer, frames, lengths)
    greedy_results = Greedy().decode(scorer, frames, lengths)
    beam_texts = [result.labels for result in beam_results]
    greedy_texts = [result.labels for result in greedy_results]
    assert len(beam_texts) == len(greedy_texts)
    assert beam_texts != greedy_texts
    for row, labels in enumerate(greedy_texts):
        log_likelihood = scorer.log_likelihood(
            frames[row, None],
            lengths[row, None],
            torch.tensor([labels], dtype=torch.int64),
            torch.tensor([len(labels)]),
        )
        greedy_score = float(log_likelihood) + beam.fusion.text_score(labels)
        assert beam_results[row].score >= greedy_score - 1e-4


def test_start_search_names_each_phrase_that_the_tokenizer_cannot_write() -> None:
    fusion = Fusion(phrases=["ab", "zebra", "!", "Ba", ""], phrase_bonus=2.0)
    with pytest.raises(ConfigError) as error:
        fusion.start_search(LETTERS)
    assert str(error.value) == (
        "decoder.hotwords: 3 of 5 have symbols that the run's labels lack: 'zebra' ('e' 'r' 'z'), '!' ('!'), "
        "'' (no symbol). Remove them"
    )
    allowed = CTCBeam(hotwords=["ab", "Ba"])
    allowed.decode(CTCScorer(LETTERS, 0.1), torch.zeros(1, 2, 4).log_softmax(-1), torch.tensor([2]))


@pytest.mark.parametrize(
    ("texts", "line"),
    [
        (["AB AB B"], "0 of the 2 likeliest words of LM can be written by this run: it writes 'AB' as 'ab'"),
        (
            ["fü"],
            "0 of the 1 likeliest words of LM can be written by this run: its labels lack 'f' 'ü' of 'fü'",
        ),
        (
            ["cc cc a dd"],
            "1 of the 3 likeliest words of LM can be written by this run: its labels lack 'c' of 'cc'",
        ),
    ],
)
def test_start_search_warns_once_of_a_language_model_whose_words_the_run_cannot_write(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, texts: list[str], line: str
) -> None:
    lm = tmp_path / "lm.arpa"
    write_ngram(texts, lm, 2)
    fusion = Fusion(NGram(str(lm)), 0.8)
    fusion.start_search(LETTERS)
    fusion.start_search(LETTERS)
    (message,) = caplog.messages
    assert message.startswith("decoder.lm: " + line.replace("LM", str(lm)))
    assert message.endswith("speechtrain prepare lm --normaliser lower")
    assert fusion.missing_words(["ab b"]) == ""  # A second warning would say the same.


def test_a_language_model_that_has_the_words_of_the_run_is_not_warned_of(
    lm: str, caplog: pytest.LogCaptureFixture
) -> None:
    fusion = Fusion(NGram(lm), 0.8)
    fusion.start_search(LETTERS)
    assert fusion.missing_words(["ab a", "bbb b"]) == ""
    assert fusion.missing_words(["bbb aa", "bbb b"]) == (
        "1 of 4 words of the transcripts are in the model of decoder.lm, which lacks 'bbb'. "
        "Train it on texts of the run's language, as the run writes them: "
        "speechtrain prepare lm --normaliser lower"
    )
    assert not caplog.messages


def test_transducer_beam_refuses_a_missing_language_model(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"decoder.lm: .*none.arpa: No such file"):
        TransducerBeam(lm=str(tmp_path / "none.arpa"))


@pytest.mark.parametrize("beam", [CTCBeam(), CTCBeam(width=1)], ids=["default width", "width 1"])
def test_ctc_beam_returns_times_and_confidences_of_words(beam: CTCBeam) -> None:
    """A frame has 0.5 s."""
    labels_of_frames = [2, 3, 3, 0, 3, 1, 2, 2]  # b, blank, blank, space, blank, a, b, b
    scores = (torch.eye(4)[labels_of_frames] * 9).log_softmax(-1)[None]
    (result,) = beam.decode(CTCScorer(LETTERS, 0.5), scores, torch.tensor([8]))
    words = [(word.text, word.start, word.end) for word in result.words]
    assert words == [("b", 0.0, 0.5), ("ab", 2.5, 4.0)]
    assert all(0.9 < word.confidence <= 1 for word in result.words)
