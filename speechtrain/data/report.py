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
    """Return the entries of the report by their names.

    The entries are the number of unused recordings for each reason, the padded share (only with fixed
    shapes), the cropped share (only with crops), whether decoded audio is kept, the held-out recordings, and
    a description of each named set.
    """
    training_set, sampler = stream.training_set, stream.sampler
    stream.skips.refresh()
    entries: dict[str, Any] = {}
    filter_counts = np.bincount(training_set.filter_numbers, minlength=len(FILTERS)).tolist()
    for reason, count in zip(FILTERS, filter_counts, strict=True):
        if reason and count:  # The empty reason counts the recordings that are not filtered.
            entries[reason] = count
    entries |= stream.skips.counts
    is_cropped = math.isfinite(sampler.lengths.crop_seconds)
    if sampler.shapes or is_cropped:
        padded_share, cropped_share = sampler.waste(epoch=0)
        if sampler.shapes:
            entries["padding_share"] = round(padded_share, 4)
        if is_cropped:
            entries["cropped_share"] = round(cropped_share, 4)
    if stream.loader.decoded.is_kept:
        entries["decoded audio"] = "kept in memory"
    if training_set.hold_out:
        entries["held out"] = _describe_held_out(training_set)
    for name, description in _describe_named_sets(training_set, sampler.draws):
        entries[f"set {name}"] = description
    return entries


def _describe_held_out(training_set: TrainingSet) -> str:
    """Return the number, hours and speakers of the held-out recordings, as text."""
    index, usable, rows = training_set.index, training_set.usable, training_set.held_out
    if len(usable) == 1:
        return "nothing: the only recording is used both for training and for validation"
    is_one_recording = len(np.unique(index.recordings[usable])) == 1
    noun = "parts of the only recording" if is_one_recording else "recordings"
    text = f"{len(rows)} {noun}, {hours(index.seconds[rows]):.2f} h"
    held_out_speakers = set(index.speakers[rows].tolist())
    training_speakers = index.speakers[training_set.rows].tolist()
    if held_out_speakers.isdisjoint(training_speakers):
        text += f", {len(held_out_speakers)} speakers"
    return text


def _describe_named_sets(training_set: TrainingSet, draws: CutDraws) -> Iterator[tuple[str, str]]:
    """Yield the name and the description of each named set."""
    index, rows = training_set.index, training_set.rows
    facts_of_parts = index.facts  # the settings of each part of the source, such as its name
    part_names = np.array([facts.name for facts in facts_of_parts])
    # A set can have several parts. The sets of ``draws`` have the order in which the names first occur.
    set_names = dict.fromkeys(part_names.tolist())
    set_names.pop("", None)
    for number, name in enumerate(set_names):
        parts = np.flatnonzero(part_names == name)
        set_rows = rows[np.isin(index.parts[rows], parts)]
        description = [f"{len(set_rows)} recordings", f"{hours(index.seconds[set_rows]):.2f} h"]
        if draws.sets:
            description.append(f"{draws.sets[number].count / len(draws):.1%} of an epoch")
        facts = facts_of_parts[parts[0]]
        description += filter(None, (facts.normaliser, facts.language))
        yield name, ", ".join(description)


def counts(stream: TrainingStream) -> dict[str, int]:
    """Return the numbers of recordings of training and, if there is one, of the first evaluation set."""
    samples = {"train_samples": len(stream.training_set.rows)}
    for name in stream.evaluation_sets.names[:1]:
        samples["eval_samples"] = len(stream.evaluation_sets[name].plan.rows)
    return samples
