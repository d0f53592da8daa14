"""The interface of a device. No code above it depends on the kind of device."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from speechtrain.batch import Batch, Footprint
from speechtrain.compute_policy import ComputePolicy
from speechtrain.errors import ConfigError, MachineError, SpeechtrainError
from speechtrain.precision import NAMES, Precision

# messages of allocators that raise RuntimeError: torch's on the CPU, and those of vendors' bridges
_NO_MEMORY = re.compile("out of memory|not enough memory|can't allocate memory|cannot allocate memory", re.I)


class Device(ABC):
    """One kind of chip: its environment, its tensors, its memory."""

    name: str
    """Torch's device type, also for autocast."""

    collectives: str
    """torch.distributed backend."""

    optimizer_flags: ClassVar[Mapping[str, bool]] = {}
    """Settings of torch's optimizers that this device needs; they override the config."""

    static_shapes: bool = False
    """Whether every tensor shape of a step must come from a fixed, printed set."""

    @property
    def supports_fsdp(self) -> bool:
        """Whether its ranks may shard parameters: not on a device that records graphs of fixed tensors."""
        return not self.static_shapes

    @abstractmethod
    def environment(self, processes: int) -> dict[str, str]:
        """Variables that must be set before Python starts, for ``processes`` ranks on this host.

        Imports no vendor library. The launcher lets values that the user has set override these.
        """

    def check(self, processes: int) -> None:  # noqa: B027 - nothing is a sensible default
        """Raise MachineError if this host clearly cannot run ``processes`` ranks; claims no chip.

        The command calls it before it starts processes; ``open`` makes the final check.
        """

    def validate_shapes(self, shapes: Sequence[tuple[int, int, int]]) -> None:
        """Check the fixed shapes of training, none if they vary. Raises ConfigError if they must not vary."""
        if self.static_shapes and not shapes:
            raise ConfigError(
                f"data.shapes=0: device={self.name} compiles a graph for every shape; set data.shapes=8"
            )

    @abstractmethod
    def open(self, local_rank: int) -> None:
        """Claim the chip for this process. Raises MachineError if that fails."""

    def check_precision(self, precision: Precision) -> None:
        """Raise MachineError if this device cannot train in ``precision``."""
        if not self.supports(precision.dtype):
            others = " or ".join(f"precision={name}" for dtype, name in NAMES.items() if self.supports(dtype))
            fault = f"precision={precision.name}: device={self.name} does not train in it"
            raise MachineError(f"{fault}; use {others}")

    @abstractmethod
    def supports(self, dtype: torch.dtype) -> bool:
        """Whether training in ``dtype`` is supported here."""

    def precision_fallback_reason(self, dtype: torch.dtype) -> str:
        """Why training in ``dtype`` falls back to fp32 on this chip; empty if it does not."""
        return ""

    def autotune(self, before: Mapping[str, Any]) -> dict[str, Any]:
        """Measure and choose the settings that are ``auto``, or take those in ``before`` of the same chip.

        Called after ``open``. Returns what the run stores, so that it computes the same when it is
        resumed; empty if nothing was measured.
        """
        return {}

    @abstractmethod
    def move(self, batch: Batch) -> Batch:
        """The batch with its tensors on the device."""

    def policy(self, dtype: torch.dtype) -> ComputePolicy:
        """Which of their equivalent implementations the model's blocks use here in ``dtype``."""
        return ComputePolicy(static=self.static_shapes)

    def prepare(
        self, module: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Apply vendor transformations to a built and loaded module and its optimizer."""
        return module, optimizer

    def tensor(self, value: Tensor) -> Tensor:
        """One tensor on the device."""
        return value

    def mark_step(self) -> None:  # noqa: B027 - nothing is a sensible default
        """End of a graph segment: after each micro-batch's backward and after the optimizer step."""

    def synchronize(self) -> None:  # noqa: B027 - nothing is a sensible default
        """Wait for queued work; called before a clock is read."""

    @abstractmethod
    def memory(self) -> int:
        """Peak bytes in use so far."""

    def counts(self) -> dict[str, int]:
        """Counts since the run started, for log lines: compilations, cache hits, ends of graphs."""
        return {}

    def graphs(self) -> int:
        """Number of compilations so far; 0 if the device does not count them."""
        return 0

    def explain(
        self, error: BaseException, batch: Batch | None, footprint: Footprint, classes: int = 0
    ) -> SpeechtrainError | None:
        """The user's error for a step on host ``batch`` that ran out of memory; None for another failure.

        ``classes``: of the output layer, 0 if it has none.
        """
        is_memory = isinstance(error, torch.OutOfMemoryError | MemoryError) or (
            isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error)))
        )
        if not is_memory:
            return None
        knob = "lower data.batch.memory_gib or data.batch.count and raise trainer.accumulate"
        if batch is None:
            return MachineError(
                f"device={self.name} is out of memory before the first batch: the model is too large"
            )
        rows, samples = batch.audio.shape
        labels = batch.labels.shape[1]
        valid = float(batch.audio_lengths[batch.weight > 0].sum())
        seconds = samples * batch.seconds / valid if valid else 0.0
        predicted = footprint.bytes(rows, seconds, labels)
        width = f", V={classes} classes" if classes else ""
        return MachineError(
            f"device={self.name} is out of memory at a micro-batch of B={rows} rows, T={seconds:.1f} s, "
            f"U={labels} labels{width}, predicted {predicted:,.0f} bytes beyond the weights; {knob}"
        )
