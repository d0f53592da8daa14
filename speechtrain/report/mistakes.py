"""Counts the word errors of a recogniser in a set of utterances, by kind and by word, with intervals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from speechtrain.errors import SPELLING, printable
from speechtrain.metrics import character_errors, rate_interval
from speechtrain.report.page import KINDS, WordPair, align
from speechtrain.task import Example, worst_examples

_CONFUSIONS = 10


def mistakes(examples: Sequence[Example], worst_count: int) -> dict[str, Any]:
    """Return the word errors of a set by kind, the intervals of its rates, and its worst utterances.

    - ``wer_interval`` and ``cer_interval`` are 95 % intervals: percentiles of 1,000 resamplings of the
      utterances with a fixed seed (Bisani and Ney, 2004).
    - ``worst`` are the ``worst_count`` utterances with the most word errors.
    - ``confusions`` are the ten most frequent ones, each [reference word, hypothesis word, times]. A word
      that was left out or added has an empty counterpart.

    The order of the examples, which depends on the batches, changes nothing.
    """
    examples = sorted(examples, key=lambda example: example.id)
    alignments = [align(example.reference, example.hypothesis) for example in examples]
    errors: list[WordPair] = []
    for pairs in alignments:
        errors += _errors_of(pairs)
    kinds = Counter(pair.kind for pair in errors)
    confusions = Counter((pair.reference, pair.hypothesis) for pair in errors)
    rows = [example.row() for example in worst_examples(examples, worst_count)]
    return {
        **{name: kinds[kind] for kind, name in KINDS.items()},
        **_rates(examples, alignments),
        "worst": [row for row in rows if row["errors"]],
        "confusions": [[*words, times] for words, times in confusions.most_common(_CONFUSIONS)],
    }


def _errors_of(pairs: Sequence[WordPair]) -> list[WordPair]:
    return [pair for pair in pairs if pair.kind != "equal"]


def _rates(examples: Sequence[Example], alignments: Sequence[Sequence[WordPair]]) -> dict[str, Any]:
    """Return the sizes of a set and the intervals of its rates."""
    word_counts = np.zeros((len(examples), 2))  # errors, words
    character_counts = np.zeros((len(examples), 2))  # errors, characters
    for index, (example, pairs) in enumerate(zip(examples, alignments, strict=True)):
        words = sum(pair.kind != "insert" for pair in pairs)
        word_counts[index] = len(_errors_of(pairs)), words
        character_counts[index] = character_errors(example.reference, example.hypothesis)
    return {
        "words": int(word_counts[:, 1].sum()),
        "utterances": len(examples),
        "wer_interval": rate_interval(word_counts),
        "cer_interval": rate_interval(character_counts),
    }


def lines_of(mistakes: dict[str, Any]) -> list[str]:
    """Return the printed lines of the mistakes of a set."""
    kinds = ", ".join(f"{mistakes[name]} {name}" for name in KINDS.values())
    counts = [f"{mistakes['words']} words in {mistakes['utterances']} utterances: {kinds}"]
    for rate in ("wer", "cer"):
        if mistakes[f"{rate}_interval"]:
            low, high = mistakes[f"{rate}_interval"]
            counts.append(f"95 % interval of the {rate.upper()} {100 * low:.2f} to {100 * high:.2f} %")
    lines = ["; ".join(counts)]
    confusions = []
    for reference, hypothesis, times in mistakes["confusions"]:
        confusions.append(f"{reference or '(nothing)'} > {hypothesis or '(nothing)'} {times}")
    if confusions:
        lines.append(f"most frequent: {', '.join(confusions)}")
    for row in mistakes["worst"]:
        lines += [f"worst: {row['id']}", f"  ref  {row['reference']}", f"  hyp  {row['hypothesis']}"]
    return [printable(f"  {line}", SPELLING) for line in lines]
