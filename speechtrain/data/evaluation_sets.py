"""Evaluation sets: the recordings that validate a run, divided among the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from speechtrain.batch import Batch, Skip
from speechtrain.data.index import Index
from speechtrain.data.loader import REASONS, EvaluationLoader, collate
from speechtrain.data.sampler import BatchSize, EpochBatches, evaluation_batches
from speechtrain.data.skips import SkipLog
from speechtrain.data.sources import check_source
from speechtrain.data.static_shapes import Shape
from speechtrain.data.training_set import RecordingSet
from speechtrain.data.workers import Workers
from speechtrain.errors import DataError

_SMALL_SECONDS = 600  # Less audio is loaded in this process, because workers would take longer to start.


@dataclass
class EvaluationSet:
    """One evaluation set. It is opened at first use, and ``new_loader`` then gets its index."""

    name: str
    recordings: RecordingSet
    new_loader: Callable[[Index], EvaluationLoader]
    size: BatchSize
    workers: Workers
    skips: SkipLog

    @cached_property
    def loader(self) -> EvaluationLoader:
        return self.new_loader(self.recordings.index)

    @cached_property
    def epoch_batches(self) -> EpochBatches:
        rows = self.recordings.rows
        batches = evaluation_batches(self.loader.lengths(rows, self.size.depends_on_labels), self.size)
        # The batches number the cuts by their positions in ``rows``. The loader needs rows of the index.
        return replace(batches, rows=rows[batches.rows])


@dataclass
class EvaluationBatches(Iterable[Batch]):
    """A rank's batches of an evaluation set. They can be iterated several times.

    The iteration raises DataError if more of the rank's recordings are unusable than ``skips`` allows.

    Rank ``i % world_size`` gets batch i of the set. A rank with one batch fewer than other ranks also gets a
    batch of padding rows, because all ranks must take part in the same collectives.
    """

    set: EvaluationSet
    rank: int
    world_size: int

    @property
    def seconds(self) -> float:
        """The seconds of audio of the set, divided by the number of ranks."""
        seconds = self.set.loader.index.seconds[self.set.epoch_batches.rows]
        return float(seconds.sum(dtype=np.float64)) / self.world_size

    def __len__(self) -> int:
        return math.ceil(len(self.set.epoch_batches) / self.world_size)

    def __iter__(self) -> Iterator[Batch]:
        batches, loader, skips = self.set.epoch_batches, self.set.loader, self.set.skips
        workers = Workers() if self.seconds < _SMALL_SECONDS else self.set.workers
        numbers = range(self.rank, len(batches), self.world_size)
        unusable: list[Skip] = []
        for batch in workers.map(loader, (batches[number] for number in numbers)):
            unusable += batch.unusable
            if not skips.allows(len(unusable), len(batches.rows)):
                latest = unusable[-1]
                most_bad = skips.most_bad(len(batches.rows))
                raise DataError(
                    f"{latest.detail}: {REASONS[latest.reason]} (cut {latest.id!r}). {len(unusable)} of "
                    f"{len(batches.rows)} recordings of the set {self.set.name} are unusable. Repair or "
                    f"remove them, or raise data.max_bad={most_bad:.0f}"
                )
            yield batch
        if len(numbers) < len(self):
            shape = batches[len(batches) - 1].shape
            if shape is None:
                # One row of 0.1 s, with a label if the model reads labels.
                shape = Shape(1, round(loader.sample_rate * 0.1), int(loader.tokenizer.reads_text))
            yield collate([], loader.sample_rate, shape)


def named_sets(valid: Any, cache: str) -> dict[str, RecordingSet]:
    """Return the recordings of each evaluation set of ``data.valid``, by its name.

    A single source without a name is called ``valid``. ``cache`` is the cache folder (see ``open_index``).
    Raises ValueError for an invalid source.
    """
    specs = valid or {}
    if not isinstance(specs, dict) or "path" in specs:
        specs = {"valid": valid}
    for name, spec in specs.items():
        check_source(f"valid: {name}", spec, is_valid=True)
    return {name: RecordingSet(spec, cache) for name, spec in specs.items()}
