"""The recordings of ``data.train``: filtered, held out for evaluation, or trained on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from speechtrain.batch import Skip
from speechtrain.counter_rng import RunStream, uniform_at
from speechtrain.data.filters import Filters
from speechtrain.data.formats.manifests import digest
from speechtrain.data.hold_out import NO_SIDES, Sides, held_out, read_sides
from speechtrain.data.index import Index, hash_of, open_index
from speechtrain.data.planned_lengths import Integers, Seconds
from speechtrain.data.sampler import WeightedSet, weighted_sets
from speechtrain.data.source import Facts, Source
from speechtrain.data.sources import check_source, open_source
from speechtrain.errors import DataError

_WHERE_TRANSCRIPTS_ARE = (
    "a folder has transcripts in a.txt beside a.wav, in *.trans.txt or in metadata.csv, a manifest has them "
    "as the text of each recording, and a table has them in the column COLUMN of {path: FILE, text: COLUMN}"
)


@dataclass
class RecordingSet:
    """The recordings of one set, opened at first use. They are rows of ``index``."""

    spec: Any  # the value of data.train, or of a set of data.valid (see ``open_source``)
    cache: str  # the cache folder (see ``open_index``)

    @cached_property
    def source(self) -> Source:
        return open_source(self.spec)

    @cached_property
    def index(self) -> Index:
        return open_index(self.source, self.cache)

    @cached_property
    def rows(self) -> Integers:
        """The rows of the index that the run uses, ascending."""
        return np.arange(len(self.index), dtype=np.int32)


@dataclass
class TrainingSet(RecordingSet):
    """The recordings of ``data.train``.

    A recording that ``filters`` exclude is not used at all. The share ``hold_out`` of the other recordings is
    held out. If ``needs_text`` is true, only recordings with a transcript can be held out. Recordings stay on
    the side on which ``run_dir`` or ``initial_run`` had them. Raises ValueError for invalid arguments.

    ``usable`` are all rows that are not filtered. ``held_out`` are the usable rows for evaluation, and
    ``rows`` are the usable rows for training.
    """

    filters: Filters
    hold_out: float
    needs_text: bool
    run_dir: str = ""
    initial_run: str = ""  # the run whose weights the run starts with

    def __post_init__(self) -> None:
        check_source("train", self.spec)
        if not 0 <= self.hold_out < 1:
            raise ValueError(f"hold_out={self.hold_out}: it must be a share of at least 0 and below 1")

    @cached_property
    def filtered(self) -> dict[str, Integers]:
        """The rows of the index that are filtered, ascending, by the reason."""
        return self.filters.filtered_rows(self.index)

    @cached_property
    def usable(self) -> Integers:
        """The rows of the index that are not filtered, ascending. Raises DataError if there are none."""
        is_usable = np.ones(len(self.index), bool)
        for filtered_rows in self.filtered.values():
            is_usable[filtered_rows] = False
        rows = np.flatnonzero(is_usable).astype(np.int32)
        if len(rows):
            return rows
        has_no_text = (self.filters.skip_empty or self.needs_text) and not self.index.characters.any()
        if has_no_text or len(self.filtered["untranscribed"]):
            raise DataError(
                f"data.train: no recording has a transcript: {where_transcripts_are(self.source)}"
            )
        raise DataError(
            f"data.train: none of {len(self.index)} recordings is {self.filters.describe_seconds()} long. "
            "Change data.min_seconds or data.max_seconds, or check the manifest's durations"
        )

    @cached_property
    def initial_sides(self) -> Sides:
        """The sides of the recordings in the run of the initial weights."""
        return read_sides(self.initial_run) or NO_SIDES

    @cached_property
    def former_sides(self) -> Sides:
        """The sides of the recordings in this run, or before its first start those in the initial run."""
        return read_sides(self.run_dir) or self.initial_sides

    def sides(self) -> Sides:
        """Return the sides of these recordings and of all former ones."""
        recordings = self.index.recordings
        return self.former_sides.with_more(recordings[self.rows], recordings[self.held_out])

    @cached_property
    def held_out(self) -> Integers:
        """The rows of the index that are held out, ascending."""
        rows, index = self.usable, self.index
        if not self.hold_out:
            return rows[:0]
        is_source_divided = np.array([facts.hold_out for facts in index.facts])
        rows = rows[np.flatnonzero(is_source_divided[index.source_numbers[rows]])]
        if not len(rows):
            raise DataError("data.train: no set is left of which a part can be held out. Set data.valid")
        if self.needs_text:
            rows = rows[index.characters[rows] > 0]
        groups, seconds = index.groups(rows), index.seconds[rows]
        is_held_out, _ = held_out(groups, seconds, self.hold_out, self.former_sides)
        return rows[is_held_out]

    def held_out_sets(self) -> dict[str, RecordingSet]:
        """Return ``held_out`` as an evaluation set by its name, or an empty mapping without ``hold_out``."""
        return {"held_out": HeldOutSet(self)} if self.hold_out else {}

    @cached_property
    def held_out_digest(self) -> str:
        """A digest of the ids of the held-out recordings."""
        return digest(self.index.keys[self.held_out].tolist())

    @cached_property
    def rows(self) -> Integers:
        """The rows of the index that are trained on, ascending.

        A single usable recording is both trained on and held out.
        """
        # ``setdiff1d`` is avoided if possible, because it sorts: 0.2 s for a million rows.
        if len(self.usable) < 2 or not len(self.held_out):
            return self.usable
        return np.setdiff1d(self.usable, self.held_out, assume_unique=True)

    @cached_property
    def sets(self) -> list[tuple[Facts, Integers]]:
        """The facts of each set, and the positions in ``rows`` of its recordings, ascending.

        A set can have several sources, such as the files of a list. Sources without a name are one set.
        """
        facts_of_sources = self.index.facts
        source_names = np.array([facts.name for facts in facts_of_sources])
        source_numbers = self.index.source_numbers[self.rows]
        sets = []
        for name, facts in {facts.name: facts for facts in facts_of_sources}.items():
            numbers = np.flatnonzero(source_names == name)
            sets.append((facts, np.flatnonzero(np.isin(source_numbers, numbers))))
        return sets

    def weighted_sets(self) -> list[WeightedSet]:
        """Return the sets if one of them has a weight, otherwise an empty list.

        A set without a weight has the weight 1. Raises DataError if a set has no recording.
        """
        if all(facts.weight is None for facts, _ in self.sets):
            return []
        for facts, members in self.sets:
            if not len(members):
                raise DataError(f"data.train.{facts.name}: no recording is left to train on. Remove the set")
        weights = [facts.weight or 1.0 for facts, _ in self.sets]
        return weighted_sets([members for _, members in self.sets], weights)

    def content(self) -> dict[str, str | float]:
        """Return the number of all recordings and a digest of their ids, durations and transcripts.

        ``hours`` and ``speakers`` count ``rows`` only. If a row names no speaker, ``speakers`` is left out.
        """
        content: dict[str, str | float] = {"recordings": len(self.index)}
        content["hours"] = round(hours(self.index.seconds[self.rows]), 4)
        speakers = np.unique(self.index.speakers[self.rows])
        is_every_speaker_known = bool((speakers >= 0).all())  # -1 is the number of an unknown speaker.
        if is_every_speaker_known:
            content["speakers"] = len(speakers)
        return {**content, "digest": hash_of(self.index.identity)}

    def filtered_recordings(self) -> Iterator[Skip]:
        """Yield each filtered recording with the reason. The detail of a skip is the duration."""
        reasons = {row: reason for reason, rows in self.filtered.items() for row in rows.tolist()}
        for row, reason in sorted(reasons.items()):
            yield Skip(self.index.cut(row)["id"], reason, f"{self.index.seconds[row]:.2f} s")

    def describe_held_out(self) -> str:
        """Return the number, hours and speakers of the held-out recordings, as text."""
        index, usable, rows = self.index, self.usable, self.held_out
        if len(usable) == 1:
            return "nothing: the only recording is used both for training and for validation"
        is_one_recording = len(np.unique(index.recordings[usable])) == 1
        noun = "parts of the only recording" if is_one_recording else "recordings"
        text = f"{len(rows)} {noun}, {hours(index.seconds[rows]):.2f} h"
        held_out_speakers = set(index.speakers[rows].tolist())
        training_speakers = index.speakers[self.rows].tolist()
        if held_out_speakers.isdisjoint(training_speakers):
            text += f", {len(held_out_speakers)} speakers"
        return text


class HeldOutSet(RecordingSet):
    """The recordings of a training set that are held out. They are rows of its index."""

    def __init__(self, training_set: TrainingSet) -> None:
        super().__init__(training_set.spec, training_set.cache)
        self._training_set = training_set

    @cached_property
    def source(self) -> Source:
        return self._training_set.source

    @cached_property
    def index(self) -> Index:
        return self._training_set.index

    @cached_property
    def rows(self) -> Integers:
        return self._training_set.held_out


def where_transcripts_are(source: Source) -> str:
    """Return where a source may have transcripts, for an error message about a source without any."""
    return source.text_hint() or _WHERE_TRANSCRIPTS_ARE


def sample_rows(rows: Integers, count: int, seed: int) -> Integers:
    """Return ``count`` random rows in ascending order. If there are not more than ``count``, return all."""
    if len(rows) <= count:
        return rows
    numbers = uniform_at(seed, RunStream.CHECKS, np.arange(len(rows)))
    smallest = np.argpartition(numbers, count)[:count]
    return np.sort(rows[smallest])


def hours(seconds: Seconds) -> float:
    return float(seconds.sum(dtype=np.float64)) / 3600
