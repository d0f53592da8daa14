"""A data module of a user's own: it writes down what it hands over, which a run's record does not say."""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from speechtrain.batch import Batch
from speechtrain.data.module import SpeechData
from speechtrain.errors import DataError


class RecordingData(SpeechData):
    """Appends each training batch's address, ids and a checksum of its audio to ``handed.jsonl``.

    The ids of evaluation batches go to ``scored.jsonl``, however many ranks there are.
    """

    def _folder(self) -> Path:
        """Return the run's folder, where the list of skipped recordings is."""
        assert self.skips.path is not None
        return self.skips.path.parent

    def train(self, rank: int = 0, world_size: int = 1, accumulate: int = 1) -> Iterator[Batch]:
        return self._recorded(super().train(rank, world_size, accumulate))

    def _recorded(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        with (self._folder() / "handed.jsonl").open("a", buffering=1) as file:
            for batch in batches:
                audio = zlib.crc32(batch.audio.numpy().tobytes())
                file.write(json.dumps([batch.epoch, batch.index, batch.ids, audio]) + "\n")
                yield batch

    def valid(self, rank: int = 0, world_size: int = 1) -> dict[str, Iterable[Batch]]:
        return {name: self._scored(batches) for name, batches in super().valid(rank, world_size).items()}

    def _scored(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        with (self._folder() / "scored.jsonl").open("a", buffering=1) as file:
            for batch in batches:
                file.write(json.dumps([name for name in batch.ids if name]) + "\n")
                yield batch


class MeetingData(RecordingData):
    """The check of each rank waits until the check of the other rank has begun."""

    def check(self) -> None:
        (self._folder() / f"checking-{os.environ['RANK']}.txt").touch()
        deadline = time.monotonic() + 60
        while len(list(self._folder().glob("checking-*"))) < 2:
            if time.monotonic() > deadline:
                raise DataError("the other rank does not check its data")
            time.sleep(0.01)
        super().check()


class FailingData(SpeechData):
    """The second rank meets an error at its third batch."""

    def train(self, rank: int = 0, world_size: int = 1, accumulate: int = 1) -> Iterator[Batch]:
        for number, batch in enumerate(super().train(rank, world_size, accumulate)):
            if rank == 1 and number == 2:
                raise DataError("rank 1 fails as it was told to")
            yield batch
