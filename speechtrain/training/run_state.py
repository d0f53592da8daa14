"""What a run trains with, where it is, and what happened since the last log line."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from speechtrain.batch import Batch
from speechtrain.checkpoint.fit import fit
from speechtrain.checkpoint.whole import Stateful
from speechtrain.data.base import DataModule
from speechtrain.metrics import MetricSums
from speechtrain.optim.ema import Average
from speechtrain.optim.schedules import Schedule
from speechtrain.precision import Precision
from speechtrain.task import Loss, Task
from speechtrain.training.optimizer_step import Trained


@dataclass
class Progress:
    """Where a run is; part of every checkpoint."""

    step: int = 0
    wall_s: float = 0.0
    backward_divisor: float = 0.0  # the constant that backward's loss is divided by, a power of two
    bad_updates: int = 0  # non-finite ones in a row
    skipped_updates: int = 0  # non-finite ones in all
    scale_skips: int = 0  # updates skipped to lower fp16's loss scale
    validated: int = 0  # step of the latest complete validation
    metrics: dict[str, float] = field(default_factory=dict)  # of the latest validation
    epochs: float = 0.0
    utterances: int = 0  # of all ranks
    audio_s: float = 0.0  # of all ranks
    train_s: float = 0.0  # of updates, without the validations and checkpoints between them
    epoch_start_utterances: int = 0  # ``utterances`` when the epoch began
    epoch_start_s: float = 0.0  # ``train_s`` when the epoch began
    decode_ms_per_audio_s: float = 0.0  # of the latest validation's first set

    def speed(self) -> dict[str, float]:
        """The figures of ``run_directory.SPEED``, none before the first update."""
        if not self.train_s:
            return {}
        return {
            "utterances_per_s": self.utterances / self.train_s,
            "audio_s_per_s": self.audio_s / self.train_s,
            "epoch_s": self.train_s / max(1e-9, self.epochs),
            "decode_ms_per_audio_s": self.decode_ms_per_audio_s,
        }

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        values = dict(state)
        metrics = values.pop("metrics", self.metrics)
        fit(values, vars(self), "progress")
        self.metrics = {str(name): value for name, value in metrics.items() if type(value) in (int, float)}
        vars(self).update({name: value for name, value in values.items() if name in vars(self)})


@dataclass(kw_only=True)
class Parts:
    """What one call of ``Trainer.fit`` trains with."""

    task: Task
    data: DataModule
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    average: Average
    precision: Precision
    progress: Progress
    wrapped: nn.Module = field(init=False)  # the task as the group synchronises it, once weights are restored
    latest: Batch | None = None  # the batch that was started last, in training or evaluation, on the host
    micro_batches: list[Batch] = field(default_factory=list)  # of the current step

    @property
    def trained(self) -> Trained:
        return Trained(self.task, self.optimizer, self.average)

    @property
    def states(self) -> dict[str, Stateful]:
        """What a checkpoint holds, by name."""
        names = ("task", "optimizer", "average", "schedule", "data", "precision", "progress")
        return {name: getattr(self, name) for name in names}


@dataclass
class Interval:
    """What happened since the last log line; sums stay on the device until a line is due."""

    sums: MetricSums = field(default_factory=MetricSums)
    utterances: int = 0
    audio_s: float = 0.0
    waited_s: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    def add(self, batch: Batch, loss: Loss) -> None:
        self.sums.add({"loss": (loss.total.detach(), loss.weight), **loss.metrics})
        self.utterances += batch.utterances
        self.audio_s += batch.seconds

    def speed(self, world_size: int) -> dict[str, float]:
        """The seconds, the work of all ranks in one of them, and the share that this rank waited for data."""
        seconds = max(1e-9, time.perf_counter() - self.started)
        found = {"utterances_per_s": self.utterances, "audio_s_per_s": self.audio_s}
        rates = {name: value * world_size / seconds for name, value in found.items()}
        return {"seconds": seconds, **rates, "data_wait": self.waited_s / seconds}
