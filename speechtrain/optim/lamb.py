"""LAMB: Adam's direction, with the step scaled by the norm of each parameter."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from speechtrain import torch_private
from speechtrain.dtensor import local_shard
from speechtrain.optim.common import TensorwiseOptimizer, check_settings, scalars, squared_norms


class LAMB(TensorwiseOptimizer):
    """LAMB (You et al., 2020, arXiv:1904.00962), the optimizer of MLPerf's RNN-T.

    For a parameter p with gradient g, the moments are ``m = b1 m + (1 − b1) g`` and
    ``v = b2 v + (1 − b2) g²``. With their bias-corrected values m̂ and v̂, the direction is
    ``u = m̂ / (√v̂ + eps) + weight_decay · p``, and the update is ``p −= lr · ‖p‖ / ‖u‖ · u``.

    The ratio of norms is 1 if one of them is 0, so that a bias that starts at 0 can train. MLPerf's optimizer
    also clips the norm of all gradients, as the trainer does here.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 4e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-9,
        weight_decay: float = 1e-3,
    ) -> None:
        settings = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        check_settings(settings)
        super().__init__(params, settings)

    def _update(self, parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                state["step"] = 0  # a number on the host, where the bias corrections are computed
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            state["step"] += 1
        means = [local_shard(state["exp_avg"]) for state in states]
        squares = [local_shard(state["exp_avg_sq"]) for state in states]
        beta1, beta2 = group["betas"]
        torch_private.foreach_mul_(means, beta1)
        torch_private.foreach_add_(means, gradients, alpha=1 - beta1)
        torch_private.foreach_mul_(squares, beta2)
        torch_private.foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)

        # ``m̂ / (√v̂ + eps)`` is ``factor · m / (√v + corrected_eps)``, which saves two passes over memory.
        factors, corrected_eps = [], []
        for state in states:
            step = state["step"]
            correction = math.sqrt(1 - beta2**step)
            factors.append(correction / (1 - beta1**step))
            corrected_eps.append(group["eps"] * correction)
        denominators = torch_private.foreach_sqrt(squares)
        torch_private.foreach_add_(denominators, corrected_eps)
        weights = [local_shard(parameter) for parameter in parameters]
        directions: list[Tensor] = torch_private.foreach_mul(weights, group["weight_decay"])
        torch_private.foreach_addcdiv_(directions, means, denominators, factors)

        norms = squared_norms([*weights, *directions], parameters[0]).sqrt()
        weight_norms, direction_norms = norms[: len(weights)], norms[len(weights) :]
        are_positive = (weight_norms > 0) & (direction_norms > 0)
        ratios = torch.where(are_positive, weight_norms / direction_norms, torch.ones_like(weight_norms))
        torch_private.foreach_mul_(directions, scalars(ratios * group["lr"]))
        torch_private.foreach_sub_(weights, directions)
