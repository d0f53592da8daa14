"""Shared parts of the optimizers: checks of settings, the update loop, a norm without host reads."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from speechtrain.dtensor import is_sharded, sum_shares

Step = Generator[Sequence[Tensor], list[Tensor], None]
"""A parameter's update: it yields tensors once and receives the squared norms () of the full tensors."""


def check_settings(settings: Mapping[str, Any]) -> None:
    """Check the ranges. Raises ValueError that names the first setting out of range."""
    for name in ("lr", "eps", "weight_decay"):
        if not settings[name] >= 0:
            raise ValueError(f"{name} is {settings[name]}; it must be 0 or above")
    betas = settings["betas"]
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas are {list(betas)}; they must be two numbers from 0 to below 1")


def squared_norm(tensor: Tensor) -> Tensor:
    """The squared Euclidean norm, a scalar tensor in fp32 or wider."""
    wide = tensor if tensor.dtype == torch.float64 else tensor.float()
    return (wide * wide).sum()


class TensorwiseOptimizer(torch.optim.Optimizer):
    """An optimizer whose update of a parameter depends on that parameter alone, its norms included.

    Where parameters are sharded, each rank updates its rows, and the norms are those of the full tensors:
    one all-reduce sums them for a whole group. Until it ends, the step of every row is in memory.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; the host reads nothing.

        Raises ValueError for a sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            pairs = [(p, p.grad) for p in group["params"] if p.grad is not None]
            if any(gradient.is_sparse for _, gradient in pairs):
                raise ValueError("sparse gradients are not supported; use embeddings with sparse=False")
            shared = [pair for pair in pairs if is_sharded(pair[0])]
            together = [shared, *([pair] for pair in pairs if not is_sharded(pair[0]))]
            for part in filter(None, together):
                _take([self._update(parameter, gradient, group) for parameter, gradient in part], part[0][0])
        return loss

    @abstractmethod
    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Step:
        """Update this rank's shard of ``parameter`` in place."""


def _take(steps: list[Step], parameter: Tensor) -> None:
    """Run the steps of tensors that are all sharded over the same ranks as ``parameter``, or all not."""
    asked = [list(next(step)) for step in steps]
    squares = [squared_norm(tensor) for tensors in asked for tensor in tensors]
    if is_sharded(parameter):
        squares = list(sum_shares(torch.stack(squares), parameter))
    found = iter(squares)
    for step, tensors in zip(steps, asked, strict=True):
        with contextlib.suppress(StopIteration):
            step.send([next(found) for _ in tensors])
