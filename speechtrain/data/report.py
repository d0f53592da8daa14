"""The report on the data of a run: which recordings are used, and how much audio is padded or cropped."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from speechtrain.data.sampler import CutDraws
from speechtrain.data.training_set import FILTERS, TrainingSet, hours
from speechtrain.data.training_stream import TrainingStream


def report(stream: TrainingStream) -> dict[str, Any]:
    """Return the counts of unused recordings by reason, the padded and cropped shares, and facts of each set.

    The padded share is reported for fixed shapes only.
    """
    training_set, sampler = stream.training_set, stream.sampler
    stream.skips.refresh()
    facts: dict[str, Any] = {}
    counts = np.bincount(training_set.filters, minlength=len(FILTERS)).tolist()
    for reason, count in zip(FILTERS, counts, strict=True):
        if reason and count:
            facts[reason] = count
    facts |= stream.skips.counts
    if sampler.shapes:
        facts["padding_share"] = round(sampler.waste(0)[0], 4)
    if math.isfinite(sampler.lengths.crop_seconds):
        facts["cropped_share"] = round(sampler.waste(0)[1], 4)
    if training_set.hold_out:
        facts["held out"] = _held_out(training_set)
    return facts | dict(_named_sets(training_set, sampler.draws))


def _named_sets(training_set: TrainingSet, draws: CutDraws) -> Iterator[tuple[str, str]]:
    """Yield the key and the description of each named set."""
    index, rows = training_set.index, training_set.rows
    names = [facts.name for facts in index.facts]
    distinct_names = dict.fromkeys(filter(None, names))
    for number, name in enumerate(distinct_names):
        parts = np.flatnonzero(np.array(names) == name)
        set_rows = rows[np.isin(index.parts[rows], parts)]
        description = [f"{len(set_rows)} recordings", f"{hours(index.seconds[set_rows]):.2f} h"]
        if draws.sets:
            description.append(f"{draws.sets[number].count / len(draws):.1%} of an epoch")
        facts = index.facts[parts[0]]
        description += filter(None, (facts.normaliser, facts.language))
        yield f"set {name}", ", ".join(description)


def _held_out(training_set: TrainingSet) -> str:
    """Return the number, hours and speakers of the held-out recordings, as text."""
    index, usable, rows = training_set.index, training_set.usable, training_set.held_out
    if len(usable) == 1:
        return "nothing: the only recording is also what validates it"
    is_one_recording = len(np.unique(index.recordings[usable])) == 1
    noun = "parts of the only recording" if is_one_recording else "recordings"
    text = f"{len(rows)} {noun}, {hours(index.seconds[rows]):.2f} h"
    speakers = set(index.speakers[rows].tolist())
    if speakers.isdisjoint(index.speakers[training_set.rows].tolist()):
        text += f", {len(speakers)} speakers"
    return text


def counts(stream: TrainingStream) -> dict[str, int]:
    """Return the numbers of recordings of training and of the first evaluation set."""
    samples = {"train_samples": len(stream.training_set.rows)}
    for name in stream.evaluation_sets.names[:1]:
        samples["eval_samples"] = len(stream.evaluation_sets[name].plan.rows)
    return samples
