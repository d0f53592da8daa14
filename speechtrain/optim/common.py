"""What the optimizers here share: the ranges of their settings, their loop, a norm without host reads."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raises ValueError naming the first setting out of its range."""
    for name in ("lr", "eps", "weight_decay"):
        if not settings[name] >= 0:
            raise ValueError(f"{name} is {settings[name]}; it must be 0 or above")
    betas = settings["betas"]
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas are {list(betas)}; they are two numbers from 0 to below 1")


def dense_gradients(group: Mapping[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Each parameter of a group that has a gradient, with it. Raises ValueError for a sparse one."""
    pairs = [(p, p.grad) for p in group["params"] if p.grad is not None]
    if any(gradient.is_sparse for _, gradient in pairs):
        raise ValueError("sparse gradients are not supported; use embeddings with sparse=False")
    return pairs


def squared_norm(tensor: Tensor) -> Tensor:
    """The squared Euclidean norm, a scalar tensor of fp32 at least.

    Spelt out: ``vector_norm`` leaves the graph on the lazy rehearsal device.
    """
    wide = tensor if tensor.dtype == torch.float64 else tensor.float()
    return (wide * wide).sum()


class TensorwiseOptimizer(torch.optim.Optimizer):
    """An optimizer whose update of a parameter depends on that parameter alone."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient; the host reads nothing."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter, gradient in dense_gradients(group):
                self._update(parameter, gradient, group)
        return loss

    @abstractmethod
    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Change ``parameter`` in place."""
