"""Parts of a user's own that real runs of these tests are given."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from recording import RecordingData

from speechtrain.batch import Batch
from speechtrain.data.module import SpeechData
from speechtrain.data.workers import Processes
from speechtrain.launcher import Job, Launcher, LaunchResult


class Nothing(Launcher):
    """Starts no process: what a command decides before that is seen without the seconds of a rank."""

    def __init__(self, inline: bool = False) -> None:
        self.inline = inline

    def is_here(self, job: Job) -> bool:
        return True

    def launch(self, job: Job) -> LaunchResult:
        return LaunchResult(0, stop_hint="started")

    def render(self, job: Job) -> str:
        return "nothing"


class SlowData(RecordingData):
    """Waits ``FAULTS_PAUSE`` seconds before each training batch, so that a fault finds a run in progress.

    The second batch waits for the data workers. Their process ids are then listed in ``FAULTS_WORKERS``.
    """

    def train(self, rank: int = 0, world_size: int = 1, accumulate: int = 1) -> Iterator[Batch]:
        for number, batch in enumerate(super().train(rank, world_size, accumulate)):
            if number == 1 and isinstance(self.workers, Processes):
                self.workers.wait_until_ready()
                with Path(os.environ["FAULTS_WORKERS"]).open("a") as file:
                    file.write(json.dumps(self.workers.pids) + "\n")
            time.sleep(float(os.environ.get("FAULTS_PAUSE", "0")))
            yield batch


class FillingData(SpeechData):
    """Fills the disk of the run directory at a moment of the run: ``FILL_AT`` names it.

    ``train``: before the third batch; ``valid``: before the first evaluation batch; ``close``: when
    training has ended. ``FILL_LEFT`` bytes stay free. Without ``FILL_AT`` it does nothing.
    """

    def train(self, rank: int = 0, world_size: int = 1, accumulate: int = 1) -> Iterator[Batch]:
        for number, batch in enumerate(super().train(rank, world_size, accumulate)):
            if number == 2:
                self._fill("train")
            yield batch

    def valid(self, rank: int = 0, world_size: int = 1) -> dict[str, Iterable[Batch]]:
        return {name: self._filled(batches) for name, batches in super().valid(rank, world_size).items()}

    def _filled(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        self._fill("valid")
        yield from batches

    def close(self) -> None:
        self._fill("close")
        super().close()

    def _fill(self, moment: str) -> None:
        if os.environ.get("FILL_AT") != moment:
            return
        disk = self.skips.path.parent.parent
        free = os.statvfs(disk)
        with (disk / "filler").open("ab") as file:
            size = free.f_bavail * free.f_frsize - int(os.environ["FILL_LEFT"])
            if size > 0:
                os.posix_fallocate(file.fileno(), file.tell(), size)
