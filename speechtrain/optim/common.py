"""Shared parts of the optimizers: checks of settings, the update loop, a norm without host reads."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from speechtrain import torch_private
from speechtrain.dtensor import is_sharded, local, sum_shares


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


def squared_norms(shares: Sequence[Tensor], model: Tensor) -> Tensor:
    """The squared Euclidean norms (N,) of the tensors that ``shares`` are parts of, sharded as ``model``."""
    wide = [share if share.dtype == torch.float64 else share.float() for share in shares]
    return sum_shares(torch.stack([square.sum() for square in torch_private.foreach_mul(wide, wide)]), model)


def scalars(vector: Tensor) -> list[Tensor]:
    """The elements () of ``vector``, by their index: lazy tensors cannot be unbound without gradients."""
    return [vector[index] for index in range(len(vector))]


class TensorwiseOptimizer(torch.optim.Optimizer):
    """An optimizer whose update of a parameter depends on that parameter alone, its norms included.

    Where parameters are sharded, each rank updates its rows, and the norms are those of the full tensors:
    one all-reduce sums them for a whole group. A group is updated at once, so that a GPU gets few launches;
    its steps are in memory together.
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
            trained = [p for p in group["params"] if p.grad is not None]
            if any(p.grad.is_sparse for p in trained):
                raise ValueError("sparse gradients are not supported; use embeddings with sparse=False")
            shared = [p for p in trained if is_sharded(p)]
            rest = [p for p in trained if not is_sharded(p)]
            for parameters in filter(None, (shared, rest)):
                self._update(parameters, [local(p.grad) for p in parameters], group)
        return loss

    @abstractmethod
    def _update(self, parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        """Update this rank's shards of ``parameters`` in place; they are all sharded alike, or all not."""
