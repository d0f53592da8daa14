"""NovoGrad: gradients normalised per parameter tensor, then momentum."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from speechtrain.dtensor import local
from speechtrain.optim.common import Step, TensorwiseOptimizer, check_settings


class NovoGrad(TensorwiseOptimizer):
    """NovoGrad (Ginsburg et al., 2019, arXiv:1905.11286), NeMo's optimizer for Jasper and ContextNet.

    The second moment v is one number for each parameter tensor: ``v = b2 v + (1 − b2) ‖g‖²``, and
    ``‖g‖²`` itself at the first gradient that is not zero. ``m = b1 m + g / (√v + eps) +
    weight_decay · p`` and ``p −= lr · m``; with ``grad_averaging``, the term after b1 m is scaled by 1 − b1.
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

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Step:
        state = self.state[parameter]
        (square,) = yield (local(gradient),)
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(square)
        beta1, beta2 = group["betas"]
        second = state["exp_avg_sq"]
        # selected by arithmetic: a branch would be a host read
        fresh = (second == 0).to(second.dtype)
        second.mul_(beta2).add_(square * (1 - beta2 + fresh * beta2))

        parameter, gradient = local(parameter), local(gradient)
        added = gradient / (second.sqrt() + group["eps"])
        added.add_(parameter, alpha=group["weight_decay"])
        mean = local(state["exp_avg"])
        mean.mul_(beta1).add_(added, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
        parameter.add_(mean, alpha=-group["lr"])
