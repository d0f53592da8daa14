"""The state of a run: its progress, its parts, and the counts since the last log line."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from speechtrain.batch import Batch
from speechtrain.checkpoint.fit import check_fit
from speechtrain.checkpoint.whole import Stateful
from speechtrain.data.base import DataModule
from speechtrain.metrics import MetricSums
from speechtrain.optim.ema import Average
from speechtrain.optim.schedules import Schedule
from speechtrain.precision import Precision
from speechtrain.task import Loss, Sums, Task
from speechtrain.training.optimizer_step import Trained


@dataclass
class Progress:
    """The progress of a run. Every checkpoint contains it. All counts include earlier starts of the run."""

    step: int = 0  # the number of updates
    wall_s: float = 0.0  # the seconds of the run, with validations and checkpoints
    # Before backward, the loss is divided by this power of two. 0 means that it is not chosen yet.
    backward_divisor: float = 0.0
    # the number of latest updates in a row that were not finite or had no usable recording
    bad_updates: int = 0
    skipped_updates: int = 0  # the number of all such updates
    scale_skips: int = 0  # the number of updates that were skipped to lower fp16's loss scale
    validated: int = 0  # the step of the latest complete validation, or 0
    metrics: dict[str, float] = field(default_factory=dict)  # the metrics of the latest validation
    epochs: float = 0.0  # the number of passes through the training data
    utterances: int = 0  # the number of training utterances of all ranks
    audio_s: float = 0.0  # the seconds of training audio of all ranks
    train_s: float = 0.0  # the seconds of all updates, without validations and checkpoints
    epoch_start_utterances: int = 0  # ``utterances`` when the epoch began
    epoch_start_s: float = 0.0  # ``train_s`` when the epoch began
    # Milliseconds of evaluation for each second of audio, in the first set of the latest validation.
    decode_ms_per_audio_s: float = 0.0

    def speed(self) -> dict[str, float]:
        """Return the metrics of ``run_directory.SPEED``. They are empty before the first update."""
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
        """Load a stored progress. Raises ValueError if a field has another type.

        Unknown fields, and metrics that are not numbers, are ignored. Fields that ``state`` lacks stay.
        """
        fields = dict(state)
        metrics = fields.pop("metrics", self.metrics)
        check_fit(fields, vars(self), "progress")
        self.metrics = {str(name): mean for name, mean in metrics.items() if type(mean) in (int, float)}
        for name, stored_value in fields.items():
            if name in vars(self):
                setattr(self, name, stored_value)


@dataclass(kw_only=True)
class Parts:
    """The objects of one call of ``Trainer.fit``."""

    task: Task
    data: DataModule
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    average: Average
    precision: Precision
    progress: Progress
    # The task in the wrapper of the group, such as DDP. The trainer sets it after the weights are restored.
    wrapped: nn.Module = field(init=False)
    latest: Batch | None = None  # the latest batch of training or evaluation, on the host
    micro_batches: list[Batch] = field(default_factory=list)  # this rank's micro-batches of the current step
    # the terms and the rows of the loss of each micro-batch, except on a device with static shapes
    losses: list[tuple[Sums, Tensor | None]] = field(default_factory=list)
    weight: Tensor = field(default_factory=lambda: torch.ones(()))  # (), the loss weight of the latest update

    @property
    def trained(self) -> Trained:
        """The parts that an update changes."""
        return Trained(self.task, self.optimizer, self.average)

    @property
    def states(self) -> dict[str, Stateful]:
        """The parts whose states a checkpoint contains, by their names in the checkpoint."""
        names = ("task", "optimizer", "average", "schedule", "data", "precision", "progress")
        return {name: getattr(self, name) for name in names}


@dataclass
class Interval:
    """The counts of this rank since the last log line.

    The sums of losses and metrics stay on the device until the next line is due.
    """

    sums: MetricSums = field(default_factory=MetricSums)
    utterances: int = 0
    audio_s: float = 0.0  # seconds of audio
    data_wait_s: float = 0.0  # seconds of waiting for data
    start_clock: float = field(default_factory=time.perf_counter)  # the clock at the start of the interval

    def add(self, batch: Batch, loss: Loss) -> None:
        """Add a micro-batch and its loss, without a read from the device."""
        self.sums.add({"loss": (loss.total.detach(), loss.weight), **loss.metrics})
        self.utterances += batch.utterances
        self.audio_s += batch.seconds

    def speed(self, world_size: int) -> dict[str, float]:
        """Return metrics of speed by their names in the log.

        The throughput is this rank's times the number of ranks. ``data_wait`` is the fraction of the time
        that this rank waited for data.
        """
        seconds = max(1e-9, time.perf_counter() - self.start_clock)
        return {
            "seconds": seconds,
            "utterances_per_s": self.utterances * world_size / seconds,
            "audio_s_per_s": self.audio_s * world_size / seconds,
            "data_wait": self.data_wait_s / seconds,
        }
