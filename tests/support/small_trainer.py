"""A task, its data and a tracker that are small enough to check a trainer by hand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from speechtrain.batch import Batch
from speechtrain.checkpoint.checkpointer import Checkpointer
from speechtrain.data.base import DataModule
from speechtrain.devices.cpu import CPU
from speechtrain.distributed.group import SingleProcess
from speechtrain.nn.norm import MaskedBatchNorm
from speechtrain.optim.ema import EMA, NoEMA
from speechtrain.optim.schedules import Constant
from speechtrain.precision import Precision
from speechtrain.task import Alarm, Evaluation, Loss, Task
from speechtrain.tracking.base import Tracker
from speechtrain.trainer_config import TrainerConfig
from speechtrain.training.saving import choose_checkpoint
from speechtrain.training.trainer import Trainer

MICRO_BATCHES = 7  # of an epoch; a number that no accumulation divides


class Line(Task):
    """Sum of squared errors of a linear map of the audio, with dropout, weighted by its valid rows."""

    metric = "loss"

    def __init__(self, poison: set[int] | None = None, alarms: list[int] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 1)
        self.dropout = nn.Dropout(0.2)
        self.poison = poison or set()
        self.advanced: list[int] = []
        self.update_seeds: list[int] = []
        self.alarms = alarms or []
        self.host_seeds: list[int] = []
        self.seen: list[int] = []

    def forward(self, batch: Batch) -> Loss:
        self.seen += [int(seed) for seed in batch.extra.values()]
        error = self.linear(self.dropout(batch.audio))[:, 0] - batch.audio.sum(1)
        total = (error.square() * batch.weight).sum()
        if batch.epoch * MICRO_BATCHES + batch.index in self.poison:
            total = self.damage(total)
        return Loss(total, batch.weight.sum())

    def damage(self, total: Tensor) -> Tensor:
        return total * torch.nan

    def evaluate(self, batch: Batch, decoder: Any) -> Evaluation:
        loss = self(batch)
        return Evaluation({"loss": (loss.total, loss.weight)})

    def advance(self, step: int, seed: int) -> None:
        self.advanced.append(step)
        self.update_seeds.append(seed)

    def watch(self, step: int, means: Mapping[str, float]) -> Alarm | None:
        assert "loss" in means
        if step in self.alarms:
            self.alarms.remove(step)
            return Alarm(step - 1, "the line has collapsed; lower optimizer.lr")
        return None

    def prepare(self, batch: Batch, seed: int) -> Batch:
        self.host_seeds.append(seed)
        return replace(batch, extra={"seed": torch.tensor(seed)})


class NormalisedLine(Line):
    """A Line on audio that BatchNorm has normalised."""

    def __init__(self, poison: set[int] | None = None, alarms: list[int] | None = None) -> None:
        super().__init__(poison, alarms)
        self.norm = MaskedBatchNorm(4)

    def forward(self, batch: Batch) -> Loss:
        frames = self.norm(batch.audio[:, None], torch.ones(len(batch.audio)))
        return super().forward(replace(batch, audio=frames[:, 0]))


class Counted(DataModule):
    """Micro-batches whose content is a function of their address; row counts are ragged."""

    def __init__(self, fails: dict[str, Exception] | None = None) -> None:
        self.next = 0
        self.is_validating = False
        self.fails = fails or {}

    @property
    def micro_batches_per_epoch(self) -> int:
        return MICRO_BATCHES

    def at(self, number: int) -> Batch:
        rows = 2 + number % 3
        audio = torch.randn(rows, 4, generator=torch.Generator().manual_seed(number))
        weight = torch.ones(rows)
        weight[-1] = float(number % 2)
        zeros = torch.zeros(rows, dtype=torch.int64)
        ids = tuple(f"{number}-{row}" for row in range(rows))
        return Batch(
            audio, zeros + 4, zeros[:, None], zeros, weight, zeros, ids, ids,
            epoch=number // MICRO_BATCHES, index=number % MICRO_BATCHES, seconds=1.0,
        )  # fmt: skip

    def train(self, rank: int = 0, world_size: int = 1, accumulate: int = 1) -> Iterator[Batch]:
        while True:
            first = self.next
            for micro in range(accumulate):
                if micro == accumulate - 1:
                    self.next = first + world_size * accumulate
                if error := self.fails.get(str(first + micro * world_size + rank)):
                    raise error
                yield self.at(first + micro * world_size + rank)

    def valid(self, rank: int = 0, world_size: int = 1) -> dict[str, Iterable[Batch]]:
        return {"dev": self._validating()}

    def _validating(self) -> Iterator[Batch]:
        self.is_validating = True
        if error := self.fails.get("valid"):
            raise error
        yield from (self.at(1000), self.at(1001))
        self.is_validating = False

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class Recorder(Tracker):
    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def log(self, event: str, values: Any) -> None:
        self.events.append((event, dict(values)))

    def of(self, event: str) -> list[dict[str, Any]]:
        return [values for name, values in self.events if name == event]


class Rig:
    """One process's worth of parts."""

    def __init__(
        self,
        run_dir: Path,
        stop_at: int | None = None,
        poison: set[int] | None = None,
        resume: str = "auto",
        precision: Precision | None = None,
        stop_in_validation: bool = False,
        alarms: list[int] | None = None,
        fails: dict[str, Exception] | None = None,
        line: type[Line] | None = None,
        **limits: Any,
    ) -> None:
        run_dir.mkdir(exist_ok=True)
        self.task = (line or Line)(poison, alarms)
        self.data = Counted(fails)
        self.recorder = Recorder()
        settings = replace(TrainerConfig(log_every=1, validate_every=1000, ema=0.9), **limits)

        def stop() -> bool:
            if stop_in_validation:
                return self.data.is_validating
            return self.trainer.progress.step + len(self.task.advanced[-1:]) == stop_at

        self.trainer = Trainer(
            settings, CPU(), run_dir, self.recorder, precision, checkpointer=Checkpointer(run_dir, 3),
            stop_requested=stop,
        )  # fmt: skip
        self.optimizer = torch.optim.AdamW(self.task.parameters(), lr=1.0)
        average = EMA(self.task, settings.ema) if settings.ema else NoEMA()
        checkpoint = choose_checkpoint(SingleProcess(), self.trainer.checkpointer, resume)
        self.status = self.trainer.fit(
            self.task, self.data, self.optimizer, Constant(peak=0.05), average, checkpoint
        )

    @property
    def losses(self) -> dict[int, float]:
        return {row["step"]: row["loss"] for row in self.recorder.of("train")}
