"""Precision: the dtype of a run's matmuls, and the loss scale of fp16. Losses and softmaxes are fp32."""

from __future__ import annotations

from abc import ABC
from typing import Any

import torch
from torch import Tensor

from speechtrain import torch_private
from speechtrain.dtensor import all_finite, local_shard


class Precision(ABC):
    """The arithmetic of a step: the dtype of matmuls, the backward pass and the optimizer step.

    The device's compute policy for ``dtype`` selects autocast and the dtypes of blocks.
    """

    name: str  # the choice of the config group ``precision``
    dtype: torch.dtype  # of matmuls
    faster_dtypes: tuple[torch.dtype, ...] = ()  # of matmuls, if they are faster than in ``dtype``

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of one micro-batch's loss, multiplied by the loss scale, to the parameters."""
        torch.autograd.backward(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027 - nothing is a sensible default
        """Divide the gradients by the loss scale. The trainer calls this before it computes their norm."""

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the parameters. The trainer calls this only if all gradients are finite."""
        optimizer.step()

    def overflow(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether a lower loss scale may avoid the non-finite loss or gradient of this update.

        The trainer calls this instead of ``step`` for such an update. If the result is True, the scale has
        been lowered.
        """
        return False

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return None


class FP32(Precision):
    """Single precision throughout."""

    name = "fp32"
    dtype = torch.float32


class Auto(FP32):
    """The faster of fp32 and bf16, by a timing at the start (``training.autotune``)."""

    name = "auto"
    faster_dtypes = (torch.bfloat16,)


class BF16(Precision):
    """bfloat16 matmuls and convolutions by autocast, without a loss scale. Weights and sums stay fp32."""

    name = "bf16"
    dtype = torch.bfloat16


class FP16(Precision):
    """float16 by autocast with a dynamic loss scale (Micikevicius et al., ICLR 2018).

    The scale doubles after ``growth_interval`` updates without an overflow. An overflow halves it. If the
    scale is at ``floor``, an overflow counts as a non-finite update. Unlike torch's GradScaler, the scale is
    a number on the host, because the host reads anyway whether the gradients are finite. So the same code
    works on every device.
    """

    name = "fp16"
    dtype = torch.float16

    def __init__(
        self, initial_scale: float = 65536.0, growth_interval: int = 2000, floor: float = 1.0e-4
    ) -> None:
        if not 0 < floor <= initial_scale or growth_interval < 1:
            raise ValueError(
                f"initial_scale={initial_scale}, floor={floor}, growth_interval={growth_interval}: "
                "set 0 < floor <= initial_scale and growth_interval >= 1"
            )
        self.scale = initial_scale
        self.growth_interval = growth_interval
        self.floor = floor
        self.healthy = 0
        """Updates since the last change of the scale, or since the last overflow if it is later."""

    def backward(self, loss: Tensor) -> None:
        torch.autograd.backward(loss * self.scale)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        gradients = [local_shard(gradient) for gradient in gradients_of(optimizer)]
        if gradients:
            torch_private.foreach_mul_(gradients, 1.0 / self.scale)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        self.healthy += 1
        if self.healthy >= self.growth_interval:
            self.scale, self.healthy = self.scale * 2.0, 0

    def overflow(self, optimizer: torch.optim.Optimizer) -> bool:
        self.healthy = 0
        # If the gradients are finite, the loss itself is not, and a lower scale does not change that.
        if self.scale <= self.floor or all_finite(gradients_of(optimizer)):
            return False
        self.scale = max(self.floor, self.scale / 2.0)
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "healthy": self.healthy}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale, self.healthy = float(state["scale"]), int(state["healthy"])


NAMES = {kind.dtype: kind.name for kind in (FP32, BF16, FP16)}
"""The name of the precision by the dtype of its matmuls."""


def gradients_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the gradients that the optimizer's next step would use."""
    gradients: list[Tensor] = []
    for group in optimizer.param_groups:
        gradients += [p.grad for p in group["params"] if p.grad is not None]
    return gradients
