"""Runs of the real trainer with a planted clock, which only updates and evaluations move."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from speechtrain.batch import Batch
from speechtrain.checkpoint.checkpointer import Checkpointer
from speechtrain.devices.cpu import CPU
from speechtrain.distributed.group import SingleProcess
from speechtrain.optim.ema import NoEMA
from speechtrain.optim.schedules import Cosine, Schedule
from speechtrain.task import Evaluation, Loss
from speechtrain.trainer_config import TrainerConfig
from speechtrain.training import trainer as trainer_module
from speechtrain.training.saving import choose_checkpoint
from speechtrain.training.trainer import Trainer
from tests.support.small_trainer import Counted, Line, Recorder

SECONDS = 1800.0
UPDATE_S = 3.0
VALIDATION_S = 12.0
BATCHES = 20  # of a validation


class Timed(Line):
    """A line whose updates and evaluations take the seconds of a planted clock."""

    def __init__(self, update_s: Callable[[float], float], validation_s: float) -> None:
        super().__init__()
        self.update_s = update_s
        self.batch_s = validation_s / BATCHES
        self.clock_s = 0.0
        self.update_seconds = 0.0
        self.lengths: list[float] = []

    def forward(self, batch: Batch) -> Loss:
        if self.training:
            self.update_seconds += self.update_s(self.clock_s)
            self.clock_s += self.update_s(self.clock_s)
        else:
            self.clock_s += self.batch_s
        return super().forward(batch)

    def evaluate(self, batch: Batch, decoder: Any) -> Evaluation:
        loss = self(batch)
        return Evaluation({"loss": (loss.total, loss.weight)})

    def advance(self, step: int, seed: int) -> None:
        self.lengths.append(self.planned_updates)


class ValidationSet(list[Batch]):
    seconds = float(BATCHES)


class Data(Counted):
    def valid(self, rank: int = 0, world_size: int = 1) -> dict[str, Iterable[Batch]]:
        return {"dev": ValidationSet([self.at(1000)] * BATCHES)}


class Run:
    """One start of a run whose clock only updates and evaluations move."""

    def __init__(
        self,
        run_dir: Path,
        monkeypatch: pytest.MonkeyPatch,
        update_s: Callable[[float], float] = lambda clock_s: UPDATE_S,
        validation_s: float = VALIDATION_S,
        seconds: float = SECONDS,
        schedule: Schedule | None = None,
        stop_at: int | None = None,
        start_s: float = 0.0,
        **settings: Any,
    ) -> None:
        self.task = Timed(update_s, validation_s)
        self.task.clock_s = start_s
        self.recorder = Recorder()
        monkeypatch.setattr(trainer_module, "time", SimpleNamespace(perf_counter=lambda: self.task.clock_s))
        config = replace(TrainerConfig(log_every=1, max_hours=seconds / 3600), **settings)
        trainer = Trainer(
            config, CPU(), run_dir, self.recorder, checkpointer=Checkpointer(run_dir, 99),
            stop_requested=lambda: trainer.progress.step + 1 == stop_at,
        )  # fmt: skip
        optimizer = torch.optim.AdamW(self.task.parameters(), lr=1.0)
        self.status = trainer.fit(
            self.task,
            Data(),
            optimizer,
            schedule or Cosine(1e-3, warmup_steps=None, planned_steps=1),
            NoEMA(),
            choose_checkpoint(SingleProcess(), trainer.checkpointer),
        )
        self.progress = trainer.progress

    @property
    def steps(self) -> int:
        return self.progress.step

    @property
    def wall_s(self) -> float:
        return self.progress.wall_s

    @property
    def validations(self) -> list[int]:
        return [row["step"] for row in self.recorder.of("valid")]

    @property
    def warnings(self) -> list[str]:
        return [row["message"] for row in self.recorder.of("warning")]

    @property
    def rates(self) -> dict[int, float]:
        return {row["step"]: row["lr"] for row in self.recorder.of("train")}

    @property
    def losses(self) -> dict[int, float]:
        return {row["step"]: row["loss"] for row in self.recorder.of("train")}
