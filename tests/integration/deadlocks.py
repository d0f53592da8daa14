"""Parts of a user's own that hang on rank 1 in the third update: in its data, its forward, a collective."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from speechtrain.batch import Batch
from speechtrain.data.module import SpeechData
from speechtrain.distributed.group import TorchGroup
from speechtrain.models.rnnt import RNNT
from speechtrain.task import Loss

LAST_STEP = 2  # that is done
_LONG = 600.0


def planted() -> None:
    """Write down when this rank began to hang, and hang."""
    (Path(os.environ["PLANTED"])).write_text(str(time.time()))
    time.sleep(_LONG)


class SleepingData(SpeechData):
    """The source of rank 1 gives no third batch."""

    def train(self, rank: int = 0, world_size: int = 1, accumulate: int = 1) -> Iterator[Batch]:
        for number, batch in enumerate(super().train(rank, world_size, accumulate)):
            if rank == world_size - 1 and number == LAST_STEP:
                planted()
            yield batch


class SleepingTask(RNNT):
    """The network of rank 1 does not come out of its third batch."""

    def forward(self, batch: Batch) -> Loss:
        if self.training and os.environ["RANK"] == "1" and batch.index >= 2 * LAST_STEP:
            planted()
        return super().forward(batch)


class SkippingTask(RNNT):
    """Rank 1 leaves out the third agreement, for a message that nobody sends."""

    def forward(self, batch: Batch) -> Loss:
        if self.training and os.environ["RANK"] == "1" and batch.index >= 2 * LAST_STEP:
            TorchGroup.all_reduce_status = _elsewhere  # type: ignore[assignment]
        return super().forward(batch)


def _elsewhere(*arguments: object, **named: object) -> Tensor:
    (Path(os.environ["PLANTED"])).write_text(str(time.time()))
    awaited = torch.zeros(1)
    dist.recv(awaited, src=0)
    return awaited


class StoppingTask(RNNT):
    """Rank 1 stops being run at all."""

    def forward(self, batch: Batch) -> Loss:
        if self.training and os.environ["RANK"] == "1" and batch.index >= 2 * LAST_STEP:
            (Path(os.environ["PLANTED"])).write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().forward(batch)
