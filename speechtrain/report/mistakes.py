"""The mistakes of a recogniser in a set of utterances: counts, intervals, confusions and worst utterances."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from speechtrain.errors import FORMAT_CHARACTERS, escape_controls
from speechtrain.metrics import character_errors, rate_interval
from speechtrain.report.page import KINDS, align
from speechtrain.task import Example, worst_examples

_MAX_CONFUSIONS = 10


def mistakes(examples: Sequence[Example], worst_count: int) -> dict[str, Any]:
    """Return the numbers of word errors of a set by kind, with 95 % intervals of WER and CER.

    The intervals are percentiles of 1,000 resamplings of the utterances (Bisani and Ney, 2004), drawn from
    a fixed seed. The result also has the ``worst_count`` utterances with the most word errors, and the ten
    most frequent confusions. A confusion is [word of the reference, word of the hypothesis, count]. The word
    of the hypothesis is empty for a deletion, and the word of the reference for an insertion.
    """
    # The order of the examples depends on the batches, and the result must not depend on it.
    examples = sorted(examples, key=lambda example: example.id)
    kinds = Counter[str]()
    confusions = Counter[tuple[str, str]]()
    # A row for each example: word errors, words, character errors and characters.
    counts = np.zeros((len(examples), 4))
    for number, example in enumerate(examples):
        errors = words = 0
        for kind, reference_word, hypothesis_word in align(example.reference, example.hypothesis):
            if kind != "insert":
                words += 1
            if kind != "equal":
                errors += 1
                kinds[kind] += 1
                confusions[reference_word, hypothesis_word] += 1
        counts[number] = errors, words, *character_errors(example.reference, example.hypothesis)
    rows = [example.row() for example in worst_examples(examples, worst_count)]
    return {
        **{name: kinds[kind] for kind, name in KINDS.items()},
        "words": int(counts[:, 1].sum()),
        "utterances": len(examples),
        "wer_interval": rate_interval(counts[:, :2]),
        "cer_interval": rate_interval(counts[:, 2:]),
        "worst": [row for row in rows if row["errors"]],
        "confusions": [[*words, count] for words, count in confusions.most_common(_MAX_CONFUSIONS)],
    }


def lines_of(summary: dict[str, Any]) -> list[str]:
    """Return the result of ``mistakes`` as lines of text."""
    error_counts = ", ".join(f"{summary[name]} {name}" for name in KINDS.values())
    phrases = [f"{summary['words']} words in {summary['utterances']} utterances: {error_counts}"]
    for rate in ("wer", "cer"):
        interval = summary[f"{rate}_interval"]
        if interval:
            low, high = interval
            phrases.append(f"95 % interval of the {rate.upper()} {100 * low:.2f} to {100 * high:.2f} %")
    lines = ["; ".join(phrases)]
    confusions = []
    for reference_word, hypothesis_word, count in summary["confusions"]:
        confusions.append(f"{reference_word or '(nothing)'} > {hypothesis_word or '(nothing)'} {count}")
    if confusions:
        lines.append(f"most frequent: {', '.join(confusions)}")
    for row in summary["worst"]:
        lines += [f"worst: {row['id']}", f"  ref  {row['reference']}", f"  hyp  {row['hypothesis']}"]
    return [escape_controls(f"  {line}", FORMAT_CHARACTERS) for line in lines]
