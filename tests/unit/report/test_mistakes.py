"""What a recogniser gets wrong, against jiwer and against the interval of a known rate."""

from __future__ import annotations

import jiwer
import numpy as np
import pytest

from speechtrain.metrics import rate_interval
from speechtrain.report.mistakes import lines_of, mistakes
from speechtrain.task import Example

WORDS = ["one", "two", "three", "four", "the", "a"]


def examples(count: int, seed: int = 0) -> list[Example]:
    """Sentences and what was heard: words replaced, left out and added at random."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(count):
        said = [str(rng.choice(WORDS)) for _ in range(rng.integers(1, 9))]
        heard: list[str] = []
        for word in said:
            fate = rng.random()
            heard += [] if fate < 0.1 else [str(rng.choice(WORDS))] if fate < 0.3 else [word]
            heard += [str(rng.choice(WORDS))] if rng.random() < 0.05 else []
        found.append(Example(f"u{number}", " ".join(said), " ".join(heard)))
    return found


def test_counts_are_those_of_jiwer() -> None:
    rows = examples(200)
    found = mistakes(rows, 3)
    told = jiwer.process_words([e.reference for e in rows], [e.hypothesis for e in rows])
    total = told.substitutions + told.deletions + told.insertions
    assert found["substituted"] + found["deleted"] + found["inserted"] == total
    assert (found["words"], found["utterances"]) == (sum(len(e.reference.split()) for e in rows), 200)
    # alignments of equal length may differ in kind, not in what is left out less what is added
    assert found["deleted"] - found["inserted"] == told.deletions - told.insertions
    assert found["wer_interval"][0] < told.wer < found["wer_interval"][1]
    assert mistakes(rows, 3) == found
    characters = jiwer.process_characters([e.reference for e in rows], [e.hypothesis for e in rows])
    assert found["cer_interval"][0] < characters.cer < found["cer_interval"][1]
    of_each = [jiwer.process_words(e.reference, e.hypothesis) for e in rows]
    errors = [one.substitutions + one.deletions + one.insertions for one in of_each]
    assert [one["errors"] for one in found["worst"]] == sorted(errors, reverse=True)[:3]


def test_the_order_of_the_utterances_changes_nothing() -> None:
    """It depends on the batches: longest first, or by shape."""
    rows = examples(100)
    assert mistakes(rows[::-1], 5) == mistakes(rows, 5)


def test_only_what_is_wrong_is_among_the_worst() -> None:
    rows = [Example("a", "one", "one"), Example("b", "one", "two"), Example("c", "", "")]
    assert [one["id"] for one in mistakes(rows, 5)["worst"]] == ["b"]
    assert mistakes(rows, 0)["worst"] == []


def test_confusions_are_counted_with_what_is_left_out_and_added() -> None:
    rows = [Example("a", "one two", "one too")] * 3 + [Example("b", "the cat", "cat")] * 2
    rows += [Example("c", "a dog", "a big dog"), Example("d", "right", "right")]
    found = mistakes(rows, 2)
    assert found["confusions"] == [["two", "too", 3], ["the", "", 2], ["", "big", 1]]
    assert (found["substituted"], found["deleted"], found["inserted"]) == (3, 2, 1)
    assert [one["id"] for one in found["worst"]] == ["a", "a"]
    told = "\n".join(lines_of(found))
    assert "two > too 3, the > (nothing) 2, (nothing) > big 1" in told
    assert "13 words in 7 utterances: 3 substituted, 2 deleted, 1 inserted" in told


def test_the_interval_is_that_of_resampled_utterances() -> None:
    """Utterances of few kinds are drawn by kind: the same distribution as one by one, by its definition."""
    rng = np.random.default_rng(3)
    counts = np.stack([rng.integers(0, 4, 50), rng.integers(1, 9, 50)], axis=1).astype(float)
    sums = counts[rng.integers(50, size=(20_000, 50))].sum(axis=1)
    edges = np.percentile(sums[:, 0] / sums[:, 1], (2.5, 97.5))
    assert rate_interval(counts) == pytest.approx(edges, abs=0.1 * (edges[1] - edges[0]))
    assert rate_interval(counts[rng.permutation(50)]) == rate_interval(counts)


def test_a_set_without_words_has_no_interval() -> None:
    found = mistakes([Example("a", "", "one\x1b[0m")], 1)
    assert found["wer_interval"] == []
    assert found["inserted"] == 1
    assert "\x1b" not in "".join(lines_of(found))
