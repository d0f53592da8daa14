"""Captions of random transcripts: two lines, 7 s, no overlap."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest

from speechtrain.decoding.base import Hypothesis
from speechtrain.inference.transcript import Segment, Transcript, format_transcript
from speechtrain.text.vocabulary import Characters

Timed = tuple[str, float, float]  # a word, its start and its end in seconds


def spoken(words: list[Timed], is_timed: bool) -> Hypothesis:
    """A hypothesis of words, which lose their times if not ``is_timed``."""
    tokenizer, labels, times, ends = Characters(), list[int](), list[float](), list[float]()
    for text, start, end in words:
        spelling = tokenizer.encode(f" {text}")
        labels += spelling
        times += itertools.repeat(start, len(spelling))
        ends += itertools.repeat(end, len(spelling))
    text = " ".join(text for text, *_ in words)
    hypothesis = Hypothesis(tuple(labels), text, -1.0, tuple(times), tokenizer=tokenizer)
    if is_timed:
        return replace(hypothesis, ends=tuple(ends), confidences=(0.5,) * len(labels))
    return hypothesis


def random_words(rng: np.random.Generator, seconds: float) -> list[Timed]:
    """Words in the order of their starts. They overlap, last long and have up to 200 characters."""
    words = []
    starts = rng.uniform(0, seconds, rng.integers(0, 40))
    starts.sort()
    for start in starts.round(2).tolist():
        letters = int(rng.choice([1, 5, 12, 50, 200], p=[0.2, 0.5, 0.25, 0.04, 0.01]))
        duration = float(rng.exponential(1.5)) * letters / 5
        words.append(("w" * letters, start, start + duration))
    return words


def random_transcript(seed: int, is_timed: bool = True) -> Transcript:
    """Twenty minutes of random words in pieces of random lengths."""
    rng = np.random.default_rng(seed)
    bounds = {0, 1200, *rng.integers(0, 1200, 80).tolist()}
    pieces = []
    for start, end in itertools.pairwise(sorted(bounds)):
        hypothesis = spoken(random_words(rng, end - start), is_timed)
        pieces.append(Segment(start, end, hypothesis))
    return Transcript("a.wav", "a.wav", 1200.0, tuple(pieces))


def milliseconds(clock: str) -> int:
    hours, minutes, seconds, thousandths = map(int, re.split(r"[:.,]", clock))
    return hours * 3_600_000 + minutes * 60_000 + seconds * 1000 + thousandths


@pytest.mark.parametrize("form", ["srt", "vtt"])
@pytest.mark.parametrize("is_timed", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_captions_have_two_lines_and_7_seconds_and_never_overlap(
    seed: int, is_timed: bool, form: str
) -> None:
    transcript = random_transcript(seed, is_timed)
    before, letters = 0, ""
    for cue in format_transcript(transcript, form).removeprefix("WEBVTT\n\n").rstrip().split("\n\n"):
        clocks, *lines = re.sub(r"^\d+\n", "", cue).split("\n")
        start, end = map(milliseconds, clocks.split(" --> "))
        assert before <= start <= end <= start + 7000
        assert 1 <= len(lines) <= 2
        assert max(map(len, lines)) <= 42
        before = end
        letters += "".join(lines).replace(" ", "")
    assert before <= 1_200_000
    assert letters == transcript.text.replace(" ", "")


def test_a_caption_ends_at_a_pause() -> None:
    words = [("a", 0.1, 0.5), ("bc", 0.6, 1.0), ("d", 1.4, 1.6)]
    segments = (
        Segment(10.0, 12.0, spoken(words, True), pauses=(11.2,)),
        Segment(12.0, 13.0, spoken([("e", 0.0, 0.5)], True)),
    )
    captions = Transcript("a.wav", "a.wav", 13.0, segments).captions()
    assert [(start, text) for start, _, text in captions] == [(10.1, "a bc"), (11.4, "d"), (12.0, "e")]


def test_a_word_ends_at_a_pause() -> None:
    labels = Characters().encode("ab cd")
    times = (0.0, 0.1, 0.2, 0.3, 0.9)
    ends = tuple(time + 0.1 for time in times)
    hypothesis = Hypothesis(
        tuple(labels), "ab cd", -1.0, times, ends, (0.5,) * len(labels), tokenizer=Characters()
    )
    transcript = Transcript("a", "a", 2.0, (Segment(1.0, 2.0, hypothesis, pauses=(1.6,)),))
    assert transcript.text == "ab c d"
    assert [(word.text, word.start) for word in transcript.words] == [("ab", 1.0), ("c", 1.3), ("d", 1.9)]
    assert transcript.score == -1.0


def test_a_text_that_a_task_has_changed_stays_at_a_pause() -> None:
    hypothesis = spoken([("a", 0.1, 0.5), ("b", 1.4, 1.6)], True)
    for changed in (replace(hypothesis, text="A B"), replace(hypothesis, tokenizer=None)):
        assert Transcript("a", "a", 2.0, (Segment(0.0, 2.0, changed, pauses=(1.0,)),)).text == changed.text


@pytest.mark.parametrize("seed", range(5))
def test_a_word_ends_before_the_next_one_begins(seed: int) -> None:
    transcript = random_transcript(seed)
    before = 0.0
    for word in transcript.words:
        assert before <= word.start <= word.end <= 1200.0
        before = word.end
    assert " ".join(word.text for word in transcript.words) == transcript.text
