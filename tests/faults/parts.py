"""Parts of a user's own that real runs of these tests are given."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from recording import RecordingData

from speechtrain.batch import Batch
from speechtrain.launch.launcher import Job, Launcher, LaunchResult


class Nothing(Launcher):
    """Starts no process: what a command decides before that is seen without the seconds of a rank."""

    is_here = True

    def __init__(self, inline: bool = False) -> None:
        self.inline = inline

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
            if number == 1 and self.workers.count:
                self.workers.wait_until_ready()
                with Path(os.environ["FAULTS_WORKERS"]).open("a") as file:
                    file.write(json.dumps(self.workers.pids) + "\n")
            time.sleep(float(os.environ.get("FAULTS_PAUSE", "0")))
            yield batch
