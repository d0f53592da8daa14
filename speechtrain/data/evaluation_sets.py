"""Evaluation sets: the recordings that validate a run, divided among the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from speechtrain.batch import Batch, Skip
from speechtrain.data.hold_out import Sides
from speechtrain.data.index import open_index
from speechtrain.data.loader import REASONS, BatchLoader, collate
from speechtrain.data.sampler import BatchSize, Plan, evaluation_plan
from speechtrain.data.skips import SkipLog
from speechtrain.data.source import Source
from speechtrain.data.sources import open_source
from speechtrain.data.static_shapes import Shape
from speechtrain.data.training_set import TrainingSet, check_source
from speechtrain.data.workers import InProcess, Workers
from speechtrain.errors import DataError

_HELD_OUT = "held_out"  # the name of the set that is held out of the training recordings
_SMALL_SECONDS = 600  # Less audio is loaded in this process, because workers would take longer to start.


class EvaluationSet(NamedTuple):
    """One evaluation set: the loader of its recordings and the plan of its batches."""

    loader: BatchLoader
    plan: Plan


@dataclass
class EvaluationSets:
    """The evaluation sets by name, each opened at first use.

    ``specs`` maps the name of each set to its source. If it is empty, the recordings that ``training_set``
    holds out are the only set. Otherwise its ``hold_out`` must be 0. ``new_loader`` returns a loader for an
    index. Raises ValueError for an invalid source.
    """

    specs: dict[str, Any]
    training_set: TrainingSet
    new_loader: Callable[..., BatchLoader]
    size: BatchSize
    workers: Workers
    skips: SkipLog

    def __post_init__(self) -> None:
        for name, spec in self.specs.items():
            check_source(f"valid: {name}", spec, is_valid=True)
        self._sets: dict[str, EvaluationSet] = {}

    @property
    def names(self) -> list[str]:
        return [_HELD_OUT] if self.training_set.hold_out else list(self.specs)

    def source(self, name: str) -> Source:
        return open_source(self.specs[name]) if self.specs else self.training_set.source

    def __getitem__(self, name: str) -> EvaluationSet:
        if name not in self._sets:
            training_set = self.training_set
            if self.specs:
                index = open_index(self.source(name), training_set.cache)
                rows = np.arange(len(index), dtype=np.int32)
            else:
                index, rows = training_set.index, training_set.held_out
            loader = self.new_loader(index)
            plan = evaluation_plan(loader.lengths(rows, self.size.depends_on_labels), self.size)
            # The plan numbers the cuts by their positions in ``rows``. The loader needs rows of the index.
            self._sets[name] = EvaluationSet(loader, replace(plan, rows=rows[plan.rows]))
        return self._sets[name]

    def batches(self, rank: int, world_size: int) -> dict[str, Iterable[Batch]]:
        """Return a rank's batches of each set, by the name of the set."""
        batches: dict[str, Iterable[Batch]] = {}
        for name in self.names:
            loader, plan = self[name]
            batches[name] = EvaluationBatches(name, loader, plan, self.workers, self.skips, rank, world_size)
        return batches

    def trained_counts(self, sides: Sides) -> dict[str, str]:
        """Return the number of recordings among those trained on, with an example, by the set."""
        counts = {}
        for name in self.names:
            index, rows = self[name].loader.index, self[name].plan.rows
            trained_rows = rows[np.isin(index.recordings[rows], sides.trained)]
            if len(trained_rows):
                example = index.cut(int(trained_rows.min()))["id"]
                counts[name] = f"{len(trained_rows)} of {len(rows)} recordings, such as {example!r}"
        return counts

    def shapes(self) -> list[tuple[int, int, int]]:
        """Return the fixed (rows, samples, labels) of all sets. Without fixed shapes it is empty."""
        return sorted({shape for name in self.names for shape in self[name].plan.shapes})


@dataclass
class EvaluationBatches(Iterable[Batch]):
    """A rank's batches of the evaluation set ``name``. They can be iterated several times.

    The iteration raises DataError if more of the rank's recordings are unusable than ``skips`` allows.

    Rank ``i % world_size`` gets batch i of the plan. A rank with one batch fewer than other ranks also gets a
    batch of padding rows, because all ranks must take part in the same collectives.
    """

    name: str
    loader: BatchLoader
    plan: Plan
    workers: Workers
    skips: SkipLog
    rank: int
    world_size: int

    @property
    def seconds(self) -> float:
        """The seconds of audio of the set, divided by the number of ranks."""
        return float(self.loader.index.seconds[self.plan.rows].sum(dtype=np.float64)) / self.world_size

    def __len__(self) -> int:
        return math.ceil(len(self.plan) / self.world_size)

    def __iter__(self) -> Iterator[Batch]:
        plan, loader = self.plan, self.loader
        workers = InProcess() if self.seconds < _SMALL_SECONDS else self.workers
        numbers = range(self.rank, len(plan), self.world_size)
        unusable: list[Skip] = []
        for batch in workers.map(loader, (plan[number] for number in numbers)):
            unusable += batch.unusable
            if not self.skips.allows(len(unusable), len(plan.rows)):
                latest = unusable[-1]
                most_bad = self.skips.most_bad(len(plan.rows))
                raise DataError(
                    f"{latest.detail}: {REASONS[latest.reason]} (cut {latest.id!r}). {len(unusable)} of "
                    f"{len(plan.rows)} recordings of the set {self.name} are unusable. Repair or remove "
                    f"them, or raise data.max_bad={most_bad:.0f}"
                )
            yield batch
        if len(numbers) < len(self):
            shape = plan[len(plan) - 1].shape
            if shape is None:
                # One row of 0.1 s, with a label if the model reads labels.
                shape = Shape(1, round(loader.sample_rate * 0.1), int(loader.tokenizer.reads_text))
            yield collate([], loader.sample_rate, shape)


def named_sets(valid: Any) -> dict[str, Any]:
    """Return the sources of ``data.valid`` by name. A single source without a name is called ``valid``."""
    if not valid:
        return {}
    has_names = isinstance(valid, dict) and "path" not in valid
    return valid if has_names else {"valid": valid}
