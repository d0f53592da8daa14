"""The batches of speech data: an endless stream for training, and those of the evaluation sets.

The state of the stream is the epoch and the position of the next micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from speechtrain.batch import Batch, Skip
from speechtrain.data.base import DataModule
from speechtrain.data.evaluation_sets import EvaluationBatches, EvaluationSet
from speechtrain.data.hold_out import Sides, write_sides
from speechtrain.data.index import Index
from speechtrain.data.loader import TrainingLoader
from speechtrain.data.sampler import BatchSize, RandomCuts, Sampler
from speechtrain.data.skips import ACOUSTIC_REASONS, SkipLog
from speechtrain.data.speed import speed_grid
from speechtrain.data.training_set import HeldOutSet, TrainingSet, sample_rows
from speechtrain.data.workers import Workers
from speechtrain.errors import DataError

_BYTES_OF_SAMPLE = 4  # float32
MOST_CHECKED = 10_000
"""Training recordings whose headers are read before the run. Each takes 0.2 ms, and 10 ms on a slow disk."""


@dataclass(eq=False)
class SpeechBatches(DataModule):
    """The batches of one rank.

    The state also identifies the recordings of ``evaluation_sets``. ``new_loader`` returns a loader of
    training recordings for an index. ``speed`` is the lowest and the highest speed factor. ``decoded_gib``
    are the GiB of decoded recordings that the rank keeps in memory at most. A set that needs more is not
    kept, because a part of a large set is rarely used again. Raises ValueError for an invalid speed or size.
    """

    training_set: TrainingSet
    evaluation_sets: dict[str, EvaluationSet]
    workers: Workers
    skips: SkipLog
    new_loader: Callable[[Index], TrainingLoader]
    size: BatchSize
    speed: Sequence[float]
    decoded_gib: float | str = 0.0

    def __post_init__(self) -> None:
        gib = 0.0 if self.decoded_gib == "auto" else self.decoded_gib
        if isinstance(gib, str) or not 0 <= gib < math.inf:
            raise ValueError(f"decoded_gib={gib}: it must be auto, or a number from 0 on")
        self.decoded_bytes = gib * 2**30
        speed_grid(self.speed)  # This raises ValueError for an invalid speed.
        self._address = (0, 0)  # epoch and position of the next micro-batch, over all ranks

    @cached_property
    def loader(self) -> TrainingLoader:
        loader = self.new_loader(self.training_set.index)
        loader.acoustics.open(self.training_set.cache)
        seconds = float(loader.index.seconds[self.training_set.rows].sum())
        processes = max(1, self.workers.count)  # Each process keeps the recordings.
        needed_bytes = processes * seconds * loader.sample_rate * _BYTES_OF_SAMPLE
        return replace(loader, keeps_decoded=needed_bytes <= self.decoded_bytes)

    @cached_property
    def sampler(self) -> Sampler:
        """The training batches of each epoch."""
        loader, rows = self.loader, self.training_set.rows
        sets = self.training_set.weighted_sets()
        random_cuts = RandomCuts(loader.seed, loader.index.keys[rows], self.speed, sets)
        lengths = loader.lengths(rows, self.size.depends_on_labels)
        return Sampler(random_cuts, lengths, self.size, rows)

    @cached_property
    def unusable(self) -> dict[int, Skip]:
        """The training recordings that are known to be unusable without decoding them, by row.

        Of a set with more than MOST_CHECKED recordings, this number of them is checked.
        """
        rows = sample_rows(self.training_set.rows, MOST_CHECKED, self.loader.seed)
        skips = {}
        for row in rows.tolist():
            skip = self.loader.skip_of(row)
            if skip is not None:
                skips[row] = skip
        return skips

    @property
    def valid_sets(self) -> dict[str, EvaluationSet]:
        """The evaluation sets of ``data.valid``, without the held-out recordings of ``data.train``."""
        return {
            name: evaluation_set
            for name, evaluation_set in self.evaluation_sets.items()
            if not isinstance(evaluation_set.recordings, HeldOutSet)
        }

    @property
    def micro_batches_per_epoch(self) -> int:
        return self.sampler.length(0)

    def train(self, rank: int = 0, world_size: int = 1, accumulate: int = 1) -> Iterator[Batch]:
        """Return the batches of a rank (see ``DataModule.train``).

        Rank 0 also writes the lists of the filtered and of the unusable recordings, and of the sides.
        """
        training_set = self.training_set
        if rank == 0 and len(training_set.usable) < len(training_set.index):
            self.skips.list_filtered(training_set.filtered_recordings())
        self.skips.refresh()
        if rank == 0:
            if self.skips.run_dir:
                write_sides(self.skips.run_dir, training_set.sides())
            for skip in self.unusable.values():
                self.skips.add(skip, len(training_set.rows))
        return self._batches(rank, world_size, accumulate)

    def _batches(self, rank: int, world_size: int, accumulate: int) -> Iterator[Batch]:
        epoch, position = self._address
        planned = self.sampler.micro_batches(epoch, position, rank, world_size)
        acoustics = self.loader.acoustics.indices
        totals = {ACOUSTIC_REASONS[name]: len(index) for name, index in acoustics.items()}
        for number, batch in enumerate(self.workers.map(self.loader, planned), 1):
            for skip in batch.skipped:
                self.skips.add(skip, totals.get(skip.reason, len(self.training_set.rows)))
            # The address changes when a batch is yielded, because workers load batches ahead.
            if number % accumulate == 0:
                epoch, position = self._address
                self._address = self.sampler.advance(epoch, position, world_size * accumulate)
            yield batch

    def valid(self, rank: int = 0, world_size: int = 1) -> dict[str, Iterable[Batch]]:
        return {
            name: EvaluationBatches(evaluation_set, rank, world_size)
            for name, evaluation_set in self.evaluation_sets.items()
        }

    def shapes(self) -> list[tuple[int, int, int]]:
        return list(self.sampler.shapes)

    def evaluation_shapes(self) -> list[tuple[int, int, int]]:
        sets = self.evaluation_sets.values()
        return sorted({shape for evaluation_set in sets for shape in evaluation_set.epoch_batches.shapes})

    def trained_counts(self, sides: Sides) -> dict[str, str]:
        """Return the number of recordings among those trained on, with an example, by the evaluation set."""
        counts = {}
        for name, evaluation_set in self.evaluation_sets.items():
            index, rows = evaluation_set.recordings.index, evaluation_set.recordings.rows
            trained_rows = rows[np.isin(index.recordings[rows], sides.trained)]
            if len(trained_rows):
                example = index.cut(int(trained_rows.min()))["id"]
                counts[name] = f"{len(trained_rows)} of {len(rows)} recordings, such as {example!r}"
        return counts

    def sample(self) -> Batch:
        positions = self.sampler.tensor_sizes(0).argsort()
        middle = int(positions[len(positions) // 2])
        return self.loader(self.sampler.epoch_batches(0)[middle])

    def state_dict(self) -> dict[str, Any]:
        epoch, position = self._address
        return {
            "epoch": epoch,
            "position": position,
            "sets": {name: torch.from_numpy(index.identity) for name, index in self._indices.items()},
            "held_out": self.training_set.held_out_digest,
            "skipped": dict(self.skips.reasons),
            "acoustics": self.loader.acoustics.content(),
        }

    @cached_property
    def _indices(self) -> dict[str, Index]:
        """The index of ``data.train`` as ``train``, and of each set of ``data.valid`` as ``valid.NAME``."""
        indices = {"train": self.training_set.index}
        for name, evaluation_set in self.valid_sets.items():
            indices[f"valid.{name}"] = evaluation_set.recordings.index
        return indices

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the address in ``state``.

        Raises DataError if the training cuts, their transcripts, the held-out recordings, the noise or the
        rooms have changed.
        """
        for name, former in state["sets"].items():
            difference = self._indices[name].difference(former.numpy()) if name in self._indices else ""
            if difference:
                raise DataError(other_data(name, difference, self.skips.run_dir))
        if self.training_set.hold_out and state["held_out"] != self.training_set.held_out_digest:
            raise DataError(
                "other recordings would be held out, so the run would validate on recordings that it has "
                "trained on. The folders of the recordings have other names, or another release began the "
                "run. Give the folders their former names, or use another run_dir"
            )
        if state["acoustics"] != self.loader.acoustics.content():
            raise DataError(
                "the recordings of augment.noise or augment.rooms have changed since the checkpoint. Restore "
                "them, or use another run_dir"
            )
        self._address = (int(state["epoch"]), int(state["position"]))
        self.skips.restore(state["skipped"])


def other_data(name: str, difference: str, run_dir: str) -> str:
    """Return the message that ``data.NAME`` is not the data of the run in ``run_dir``, and how to go on."""
    run = run_dir or "RUN"
    return (
        f"data.{name} is not the data of the run: {difference}. data.{name}=PLACE of its data continues the "
        f"run, and init_from={run} run_dir=NEW starts another one from its weights"
    )
