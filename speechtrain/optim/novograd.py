"""NovoGrad: gradients normalised per parameter tensor, then momentum."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from speechtrain import torch_private
from speechtrain.dtensor import local_shard
from speechtrain.optim.common import TensorwiseOptimizer, check_settings, scalars, squared_norms


class NovoGrad(TensorwiseOptimizer):
    """NovoGrad (Ginsburg et al., 2019, arXiv:1905.11286), NeMo's optimizer for Jasper and ContextNet.

    The second moment v is one number for each parameter tensor: ``v = b2 v + (1 − b2) ‖g‖²``, and
    ``‖g‖²`` itself at the first gradient that is not zero. The updates are ``m = b1 m + g / (√v + eps) +
    weight_decay · p`` and ``p −= lr · m``. With ``grad_averaging``, the terms after b1 m are multiplied by
    1 − b1.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.05,
        betas: tuple[float, float] = (0.95, 0.25),
        eps: float = 1e-8,
        weight_decay: float = 1e-3,
        grad_averaging: bool = False,
    ) -> None:
        settings = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        check_settings(settings)
        super().__init__(params, {**settings, "grad_averaging": grad_averaging})

    def _update(self, parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        squares = squared_norms(gradients, parameters[0])
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(squares[0])
        means = [local_shard(state["exp_avg"]) for state in states]
        second_moments = [state["exp_avg_sq"] for state in states]
        beta1, beta2 = group["betas"]
        # ‖g‖² has the factor 1 − b2, or 1 at the first gradient. The factor is computed by arithmetic,
        # because a branch would be a host read. ``to`` copies nothing if the moments are on the device of the
        # gradients.
        is_zero = torch.stack(second_moments).to(squares.device) == 0
        factor = 1 - beta2 + is_zero.to(squares.dtype) * beta2
        torch_private.foreach_mul_(second_moments, beta2)
        torch_private.foreach_add_(second_moments, scalars(squares * factor))

        weights = [local_shard(parameter) for parameter in parameters]
        denominators = torch.stack(second_moments).sqrt() + group["eps"]
        directions = torch_private.foreach_div(gradients, scalars(denominators))
        torch_private.foreach_add_(directions, weights, alpha=group["weight_decay"])
        direction_factor = 1 - beta1 if group["grad_averaging"] else 1.0
        torch_private.foreach_mul_(means, beta1)
        torch_private.foreach_add_(means, directions, alpha=direction_factor)
        torch_private.foreach_add_(weights, means, alpha=-group["lr"])
