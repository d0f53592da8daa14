"""LAMB: Adam's direction, with the step scaled by the norm of each parameter."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from speechtrain.dtensor import local
from speechtrain.optim.common import Step, TensorwiseOptimizer, check_settings


class LAMB(TensorwiseOptimizer):
    """LAMB (You et al., 2020, arXiv:1904.00962), the optimizer of MLPerf's RNN-T.

    With gradient g, ``m = b1 m + (1 − b1) g``, ``v = b2 v + (1 − b2) g²`` and their bias-corrected
    values m̂ and v̂, ``u = m̂ / (√v̂ + eps) + weight_decay · p`` and ``p −= lr · ‖p‖ / ‖u‖ · u``. The ratio is 1
    where either norm is 0, so that a bias that starts at 0 can train. The reference's optimizer also
    clips the global gradient norm; here the trainer does.
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

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Step:
        state = self.state[parameter]
        if not state:
            state["step"] = 0  # a host integer, so the host computes the bias corrections
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        mean, square = local(state["exp_avg"]), local(state["exp_avg_sq"])
        parameter, gradient = local(parameter), local(gradient)
        beta1, beta2 = group["betas"]
        mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)

        # m̂ / (√v̂ + eps) with both corrections factored out: two passes over memory fewer
        correction = math.sqrt(1 - beta2 ** state["step"])
        denominator = square.sqrt().add_(group["eps"] * correction)
        direction = parameter.mul(group["weight_decay"])
        direction.addcdiv_(mean, denominator, value=correction / (1 - beta1 ** state["step"]))

        squares = yield parameter, direction
        weight_norm, direction_norm = squares[0].sqrt(), squares[1].sqrt()
        both = (weight_norm > 0) & (direction_norm > 0)
        ratio = torch.where(both, weight_norm / direction_norm, torch.ones_like(weight_norm))
        parameter.sub_(direction.mul_(ratio * group["lr"]))
