"""AdamW of torch, with the settings of a config file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from speechtrain.optim.common import check_settings


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW (Loshchilov and Hutter, 2019), with its settings and its state.

    ``fused`` and ``foreach`` None leave the choice of the implementation to torch.
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
        check_settings({"lr": lr, "eps": eps, "weight_decay": weight_decay, "betas": betas})
        super().__init__(
            params, lr, (betas[0], betas[1]), eps, weight_decay, amsgrad, fused=fused, foreach=foreach
        )
