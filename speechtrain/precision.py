"""Precision: the arithmetic of forward and backward. Losses and softmaxes are fp32 whatever it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


class Precision(ABC):
    """How a step computes: a context for the forward, a way back, a guarded optimizer step."""

    name: str
    dtype: torch.dtype

    @abstractmethod
    def autocast(self, device: str) -> AbstractContextManager[object]:
        """The context of forward passes on torch device type ``device``."""

    def backward(self, loss: Tensor) -> None:
        """Backpropagate one micro-batch's scaled loss."""
        torch.autograd.backward(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027 - nothing is a sensible default
        """Take the loss scale out of the gradients, before their norm is measured."""

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the parameters from finite gradients."""
        optimizer.step()

    def overflow(self, optimizer: torch.optim.Optimizer) -> bool:
        """Told of non-finite gradients instead of ``step``; True where lowering a loss scale is the answer."""
        return False

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 - nothing to restore
        return None


class FP32(Precision):
    """Single precision throughout."""

    name = "fp32"
    dtype = torch.float32

    def autocast(self, device: str) -> AbstractContextManager[object]:
        return nullcontext()


class BF16(Precision):
    """bfloat16 matrix products and convolutions by autocast; weights and sums stay fp32. No scaler."""

    name = "bf16"
    dtype = torch.bfloat16

    def autocast(self, device: str) -> AbstractContextManager[object]:
        return torch.autocast(device, dtype=torch.bfloat16)


class FP16(Precision):
    """float16 by autocast with a dynamic loss scale (Micikevicius et al., ICLR 2018).

    An overflow halves the scale; below ``floor`` it counts as a non-finite update."""

    name = "fp16"
    dtype = torch.float16

    def __init__(
        self, initial_scale: float = 65536.0, growth_interval: int = 2000, floor: float = 1e-4
    ) -> None:
        self.floor = floor
        self.scaler = torch.amp.GradScaler(init_scale=initial_scale, growth_interval=growth_interval)

    def autocast(self, device: str) -> AbstractContextManager[object]:
        return torch.autocast(device, dtype=torch.float16)

    def backward(self, loss: Tensor) -> None:
        torch.autograd.backward(self.scaler.scale(loss))

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self.scaler.step(optimizer)
        self.scaler.update()

    def overflow(self, optimizer: torch.optim.Optimizer) -> bool:
        self.scaler.step(optimizer)  # leaves the step out: unscale has seen the overflow
        self.scaler.update()
        return bool(self.scaler.get_scale() >= self.floor)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.scaler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scaler.load_state_dict(state)
