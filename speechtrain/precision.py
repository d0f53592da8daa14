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

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Update the parameters; False where a loss scaler left this step out to lower its scale."""
        optimizer.step()
        return True

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
    """float16 by autocast with a dynamic loss scale (Micikevicius et al., ICLR 2018)."""

    name = "fp16"
    dtype = torch.float16

    def __init__(self, initial_scale: float = 65536.0, growth_interval: int = 2000) -> None:
        self.scaler = torch.amp.GradScaler(init_scale=initial_scale, growth_interval=growth_interval)

    def autocast(self, device: str) -> AbstractContextManager[object]:
        return torch.autocast(device, dtype=torch.float16)

    def backward(self, loss: Tensor) -> None:
        torch.autograd.backward(self.scaler.scale(loss))

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        before = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        return bool(self.scaler.get_scale() >= before)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.scaler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scaler.load_state_dict(state)
