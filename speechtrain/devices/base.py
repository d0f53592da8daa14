"""The interface of a device. Nothing above it knows which one it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from speechtrain.batch import Batch
from speechtrain.forms import Forms


class Device(ABC):
    """One kind of chip: its environment, its tensors, its memory."""

    name: str
    """Torch's device type, also what autocast is told."""

    collectives: str
    """torch.distributed backend."""

    switches: ClassVar[Mapping[str, bool]] = {}
    """Settings of torch's optimizers that this device needs, whatever the config says."""

    static_shapes: bool = False
    """Whether every tensor shape of a step must come from a fixed, printed set."""

    @abstractmethod
    def environment(self, processes: int) -> dict[str, str]:
        """Variables that must be set before Python starts, for ``processes`` ranks on this host.

        Pure: imports no vendor library. Values that the user has set win (the launcher sees to it).
        """

    @abstractmethod
    def open(self, local_rank: int) -> None:
        """Claim the chip for this process. Raises MachineError in one sentence where it cannot."""

    @abstractmethod
    def supports(self, dtype: torch.dtype) -> bool:
        """Whether training in ``dtype`` is supported here."""

    def why_fp32(self, dtype: torch.dtype) -> str:
        """Why training asked for in ``dtype`` is done in fp32 on this chip; empty where it is not."""
        return ""

    def settle(self, before: Mapping[str, Any]) -> dict[str, Any]:
        """Choose by measurement what is left to the device, or as this run did ``before`` on such a chip.

        Called after ``open``. Returns what the run is to keep, so that it computes alike when it is
        resumed; nothing where nothing was measured.
        """
        return {}

    @abstractmethod
    def move(self, batch: Batch) -> Batch:
        """The batch with its tensors on the device."""

    def forms(self, dtype: torch.dtype) -> Forms:
        """Which of their equal forms the model's blocks take here, for training in ``dtype``."""
        return Forms(static=self.static_shapes)

    def prepare(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Vendor transformations of a built and loaded module and its optimizer."""
        return module, optimizer

    def tensor(self, value: Tensor) -> Tensor:
        """One tensor on the device."""
        return value

    def mark(self) -> None:  # noqa: B027 - nothing is a sensible default
        """End of a graph segment: after each micro-batch's backward and after the optimizer step."""

    def synchronize(self) -> None:  # noqa: B027 - nothing is a sensible default
        """Wait for queued work; before a clock is read."""

    @abstractmethod
    def memory(self) -> int:
        """Peak bytes in use so far."""

    def graphs(self) -> int:
        """Compilations so far, where the device counts them."""
        return 0
