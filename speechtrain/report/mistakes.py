"""What a recogniser gets wrong in a set of utterances: how much, how surely, where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from speechtrain.errors import SPELLING, printable
from speechtrain.metrics import character_errors, rate_interval
from speechtrain.report.page import KINDS, align
from speechtrain.task import Example, worst_examples

_CONFUSIONS = 10


def mistakes(examples: Sequence[Example], worst_count: int) -> dict[str, Any]:
    """Count the word errors of a set by kind, with 95 % intervals of WER and CER.

    The intervals are percentiles of 1,000 resamplings of the utterances (Bisani and Ney, 2004), drawn from
    a fixed seed. Also the ``worst_count`` utterances with the most word errors, and the ten most frequent
    confusions, each [word said, word written, times], with an empty word where one was left out or added.
    The order of the examples, which depends on the batches, changes nothing.
    """
    examples = sorted(examples, key=lambda one: one.id)
    kinds, confused = Counter[str](), Counter[tuple[str, str]]()
    counts = np.zeros((len(examples), 4))  # word errors, words, character errors, characters
    for number, one in enumerate(examples):
        pairs = align(one.reference, one.hypothesis)
        wrong = [pair for pair in pairs if pair[0] != "equal"]
        kinds.update(kind for kind, _, _ in wrong)
        confused.update((said, written) for _, said, written in wrong)
        words = sum(kind != "insert" for kind, _, _ in pairs)
        counts[number] = len(wrong), words, *character_errors(one.reference, one.hypothesis)
    found: dict[str, Any] = {name: kinds[kind] for kind, name in KINDS.items()}
    found |= {"words": int(counts[:, 1].sum()), "utterances": len(examples)}
    found |= {"wer_interval": rate_interval(counts[:, :2]), "cer_interval": rate_interval(counts[:, 2:])}
    rows = [example.row() for example in worst_examples(examples, worst_count)]
    found["worst"] = [one for one in rows if one["errors"]]
    found["confusions"] = [[*pair, times] for pair, times in confused.most_common(_CONFUSIONS)]
    return found


def lines_of(found: dict[str, Any]) -> list[str]:
    """``mistakes`` for people."""
    kinds = ", ".join(f"{found[name]} {name}" for name in KINDS.values())
    ranges = (
        f"95 % interval of the {rate.upper()} {100 * edges[0]:.2f} to {100 * edges[1]:.2f} %"
        for rate in ("wer", "cer")
        if (edges := found[f"{rate}_interval"])
    )
    lines = ["; ".join([f"{found['words']} words in {found['utterances']} utterances: {kinds}", *ranges])]
    if found["confusions"]:
        told = (
            f"{said or '(nothing)'} > {written or '(nothing)'} {n}"
            for said, written, n in found["confusions"]
        )
        lines.append(f"most frequent: {', '.join(told)}")
    for one in found["worst"]:
        lines += [f"worst: {one['id']}", f"  ref  {one['reference']}", f"  hyp  {one['hypothesis']}"]
    return [printable(f"  {line}", SPELLING) for line in lines]
