"""AdamW of torch, with a second implementation that stays inside a recorded graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from speechtrain.dtensor import local
from speechtrain.optim.common import dense_gradients


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW (Loshchilov and Hutter, 2019), with its settings and its state.

    Where both ``fused`` and ``foreach`` are off, this class computes the update, parameter by parameter.
    torch's own update then uses ``lerp``, which breaks the graph on lazy tensors and gives wrong results
    there (torch 2.13: a weight of 256 × 256 is off by 1.8 after three updates).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        fused: bool | None = None,
        foreach: bool | None = None,
    ) -> None:
        super().__init__(
            params, lr, (betas[0], betas[1]), eps, weight_decay, amsgrad, fused=fused, foreach=foreach
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        if any(group["fused"] is not False or group["foreach"] is not False for group in self.param_groups):
            loss: float | None = super().step(closure)
            return loss
        if closure is not None:
            raise ValueError("AdamW.step takes no closure, since AdamW evaluates the loss only once")
        for group in self.param_groups:
            for parameter, gradient in dense_gradients(group):
                self._update(parameter, gradient, group)
        return None

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())  # on the host, which computes the bias corrections
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
            if group["amsgrad"]:
                state["max_exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        step, (beta1, beta2) = float(state["step"]), group["betas"]
        mean, square = local(state["exp_avg"]), local(state["exp_avg_sq"])
        parameter, gradient = local(parameter), local(gradient)
        mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if group["amsgrad"]:
            largest = local(state["max_exp_avg_sq"])
            square = torch.maximum(largest, square)
            largest.copy_(square)
        denominator = (square.sqrt() / math.sqrt(1 - beta2**step)).add_(group["eps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(mean, denominator, value=-group["lr"] / (1 - beta1**step))
