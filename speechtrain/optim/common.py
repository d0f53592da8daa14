"""Shared parts of the optimizers: checks of settings, the update loop, norms without host reads."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from speechtrain import torch_private
from speechtrain.dtensor import is_sharded, local_shard, sum_shares


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise ValueError for the first of ``lr``, ``eps``, ``weight_decay`` and ``betas`` out of range."""
    for name in ("lr", "eps", "weight_decay"):
        if not settings[name] >= 0:
            raise ValueError(f"{name} is {settings[name]}. It must be 0 or above")
    betas = settings["betas"]
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas are {list(betas)}. They must be two numbers from 0 to below 1")


def squared_norm(tensor: Tensor) -> Tensor:
    """Return the squared Euclidean norm () in fp32 or wider."""
    wide = _at_least_fp32(tensor)
    return (wide * wide).sum()


def squared_norms(shards: Sequence[Tensor], example: Tensor) -> Tensor:
    """Return the squared Euclidean norms (N,) of whole tensors, from this rank's N ``shards`` of them.

    All of the tensors are sharded like the parameter ``example``.
    """
    wide = [_at_least_fp32(shard) for shard in shards]
    sums = [squares.sum() for squares in torch_private.foreach_mul(wide, wide)]
    return sum_shares(torch.stack(sums), example)


def _at_least_fp32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def scalars(vector: Tensor) -> list[Tensor]:
    """Return the elements () of ``vector``.

    They are selected by index, because lazy tensors cannot be unbound without gradients.
    """
    return [vector[index] for index in range(len(vector))]


class TensorwiseOptimizer(torch.optim.Optimizer):
    """An optimizer whose update of a parameter does not depend on other parameters.

    If parameters are sharded, each rank updates its rows. Norms are the norms of the whole tensors. One
    all-reduce sums them for a whole group. All parameters of a group are updated together, so that a GPU gets
    few launches. This needs memory for all their steps at the same time.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient. The host reads nothing.

        Raises ValueError for a sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            with_gradients = [p for p in group["params"] if p.grad is not None]
            if any(p.grad.is_sparse for p in with_gradients):
                raise ValueError("sparse gradients are not supported. Use embeddings with sparse=False")
            sharded = [p for p in with_gradients if is_sharded(p)]
            unsharded = [p for p in with_gradients if not is_sharded(p)]
            for parameters in (sharded, unsharded):
                if parameters:
                    self._update(parameters, [local_shard(p.grad) for p in parameters], group)
        return loss

    @abstractmethod
    def _update(self, parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        """Update this rank's shards of ``parameters`` in place, by this rank's shards of the gradients.

        The parameters are sharded alike, or none of them is sharded. ``group`` has the settings.
        """
