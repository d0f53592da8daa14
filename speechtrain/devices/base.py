"""The interface of a device. Nothing above it knows which one it is."""

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

# of allocators that raise plain RuntimeErrors: torch's on the CPU, and vendors' bridges
_NO_MEMORY = re.compile("out of memory|not enough memory|can't allocate memory|cannot allocate memory", re.I)


class Device(ABC):
    """One kind of chip: its environment, its tensors, its memory."""

    name: str
    """Torch's device type, also what autocast is told."""

    collectives: str
    """torch.distributed backend."""

    optimizer_flags: ClassVar[Mapping[str, bool]] = {}
    """Settings of torch's optimizers that this device needs, whatever the config says."""

    static_shapes: bool = False
    """Whether every tensor shape of a step must come from a fixed, printed set."""

    @property
    def supports_fsdp(self) -> bool:
        """Whether its ranks may share out the parameters: not where graphs are recorded of fixed tensors."""
        return not self.static_shapes

    @abstractmethod
    def environment(self, processes: int) -> dict[str, str]:
        """Variables that must be set before Python starts, for ``processes`` ranks on this host.

        Pure: imports no vendor library. Values that the user has set win (the launcher sees to it).
        """

    def check(self, processes: int) -> None:  # noqa: B027 - nothing is a sensible default
        """Raise MachineError where this host plainly cannot run ``processes`` ranks; claims nothing.

        The command asks before it starts processes here; ``open`` has the last word.
        """

    def validate_shapes(self, shapes: Sequence[tuple[int, int, int]]) -> None:
        """Told the fixed shapes of training, none where they vary. Raises ConfigError where they must not."""
        if self.static_shapes and not shapes:
            raise ConfigError(
                f"data.shapes=0: device={self.name} compiles a graph for every shape; set data.shapes=8"
            )

    @abstractmethod
    def open(self, local_rank: int) -> None:
        """Claim the chip for this process. Raises MachineError in one sentence where it cannot."""

    @abstractmethod
    def supports(self, dtype: torch.dtype) -> bool:
        """Whether training in ``dtype`` is supported here."""

    def precision_fallback_reason(self, dtype: torch.dtype) -> str:
        """Why training asked for in ``dtype`` is done in fp32 on this chip; empty where it is not."""
        return ""

    def autotune(self, before: Mapping[str, Any]) -> dict[str, Any]:
        """Choose by measurement what is left to the device, or as this run did ``before`` on such a chip.

        Called after ``open``. Returns what the run is to keep, so that it computes alike when it is
        resumed; nothing where nothing was measured.
        """
        return {}

    @abstractmethod
    def move(self, batch: Batch) -> Batch:
        """The batch with its tensors on the device."""

    def policy(self, dtype: torch.dtype) -> ComputePolicy:
        """Which of their equal forms the model's blocks take here, for training in ``dtype``."""
        return ComputePolicy(static=self.static_shapes)

    def prepare(
        self, module: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Vendor transformations of a built and loaded module and its optimizer."""
        return module, optimizer

    def tensor(self, value: Tensor) -> Tensor:
        """One tensor on the device."""
        return value

    def mark_step(self) -> None:  # noqa: B027 - nothing is a sensible default
        """End of a graph segment: after each micro-batch's backward and after the optimizer step."""

    def synchronize(self) -> None:  # noqa: B027 - nothing is a sensible default
        """Wait for queued work; before a clock is read."""

    @abstractmethod
    def memory(self) -> int:
        """Peak bytes in use so far."""

    def counts(self) -> dict[str, int]:
        """For log lines, what this device counts since the run began: compilations, ends of graphs."""
        return {}

    def graphs(self) -> int:
        """Compilations so far, where the device counts them."""
        return 0

    def explain(
        self, error: BaseException, batch: Batch | None, footprint: Footprint, classes: int = 0
    ) -> SpeechtrainError | None:
        """What a failure of a step on host ``batch`` means to the user, where it is a lack of memory.

        ``classes``: of the output layer, 0 where it has none.
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
