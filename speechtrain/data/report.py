"""The report on the data of a run: which recordings are used, and how much audio is padded or cropped."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from speechtrain.data.batches import SpeechBatches
from speechtrain.data.training_set import TrainingSet, hours


def report(data: SpeechBatches) -> dict[str, Any]:
    """Return the entries of the report by their names.

    The entries are the number of unused recordings for each reason, the padded share (only with fixed
    shapes), the cropped share (only with crops), whether decoded audio is kept, the held-out recordings, and
    a description of each named set.
    """
    training_set, sampler = data.training_set, data.sampler
    data.skips.refresh()
    filtered = training_set.filtered
    entries: dict[str, Any] = {reason: len(rows) for reason, rows in filtered.items() if len(rows)}
    entries |= data.skips.counts
    is_cropped = math.isfinite(sampler.lengths.crop_seconds)
    if sampler.shapes or is_cropped:
        padded_share, cropped_share = sampler.waste(epoch=0)
        if sampler.shapes:
            entries["padding_share"] = round(padded_share, 4)
        if is_cropped:
            entries["cropped_share"] = round(cropped_share, 4)
    if data.loader.keeps_decoded:
        entries["decoded audio"] = "kept in memory"
    if training_set.hold_out:
        entries["held out"] = _describe_held_out(training_set)
    for number, (facts, positions) in enumerate(training_set.sets):
        if facts.name:
            seconds = training_set.index.seconds[training_set.rows[positions]]
            description = [f"{len(seconds)} recordings", f"{hours(seconds):.2f} h"]
            if sampler.random_cuts.sets:
                share = sampler.random_cuts.sets[number].count / len(sampler.random_cuts)
                description.append(f"{share:.1%} of an epoch")
            description += filter(None, (facts.normaliser, facts.language))
            entries[f"set {facts.name}"] = ", ".join(description)
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
