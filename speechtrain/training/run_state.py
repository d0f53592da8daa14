"""The state of a run: its progress and its parts, and what an update did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from speechtrain.batch import Batch
from speechtrain.checkpoint.checkpointer import Stateful
from speechtrain.checkpoint.fit import check_fit
from speechtrain.data.base import DataModule
from speechtrain.metrics import MetricSums
from speechtrain.optim.ema import Average
from speechtrain.optim.optimizer_step import LossDetails, Trained
from speechtrain.optim.schedules import Schedule
from speechtrain.precision import Precision
from speechtrain.task import Task


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
    data_wait_s: float = 0.0  # the seconds of ``train_s`` in which this rank waited for data
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


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The objects of one call of ``Trainer.fit``."""

    task: Task
    data: DataModule
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    average: Average
    precision: Precision
    progress: Progress
    updates_per_epoch: float

    @property
    def trained(self) -> Trained:
        """The parts that an update changes."""
        return Trained(self.task, self.optimizer, self.average)

    @property
    def states(self) -> dict[str, Stateful]:
        """The parts whose states a checkpoint contains, by their names in the checkpoint."""
        names = ("task", "optimizer", "average", "schedule", "data", "precision", "progress")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class GlobalBatch:
    """A global batch after backward. Tensors are on the device."""

    micro_batches: list[Batch]  # of this rank, on the host, as the task has prepared them
    loss_details: list[LossDetails]  # of each micro-batch, or [] if the device cannot store them
    sums: MetricSums  # the loss and the metrics of this rank
    data_wait_s: float  # the seconds in which this rank waited for data
    # All ranks agree on the fields below.
    weight: Tensor  # (), the sum of the loss weights
    scale: Tensor  # (), turns the accumulated gradients into the gradients of the mean loss
    healthy: Tensor  # (), 1 if every loss is finite and any recording is usable, else 0
    is_stop_requested: bool
    is_late: bool  # whether the time limit of the run is over


@dataclass(frozen=True)
class UpdateRecord:
    """What an update did."""

    batch: GlobalBatch
    rate: float  # the learning rate
    norm: Tensor  # (), the norm of the gradients before clipping
