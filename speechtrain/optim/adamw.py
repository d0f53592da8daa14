"""torch.optim.AdamW with the settings of a config file."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from speechtrain.optim.common import check_settings

_FORMS = ("torch", "fairseq", "intel")


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW (Loshchilov and Hutter, 2019) with one more setting, ``form``, and the same state.

    ``form`` selects the bias correction of update t:

    - ``torch`` adds ``eps`` to the corrected root of the second moment.
    - ``fairseq`` adds ``eps`` to the uncorrected root.
    - ``intel`` does the same, and multiplies the weight decay by the rate s instead of ``lr``:
      ``p −= s · (weight_decay · p + m / (√v + eps))`` with ``s = lr · √(1 − b2^t) / (1 − b1^t)``.

    With ``fused`` and ``foreach`` None, torch chooses the implementation.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        form: str = "torch",
        amsgrad: bool = False,
        fused: bool | None = None,
        foreach: bool | None = None,
    ) -> None:
        check_settings({"lr": lr, "eps": eps, "weight_decay": weight_decay, "betas": betas})
        if form not in _FORMS:
            raise ValueError(f"form is {form!r}. Choose one of {', '.join(_FORMS)}")
        super().__init__(
            params, lr, (betas[0], betas[1]), eps, weight_decay, amsgrad, fused=fused, foreach=foreach
        )
        self.form = form

    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient."""
        if self.form == "torch":
            return super().step(closure)
        settings = [(group["eps"], group["weight_decay"]) for group in self.param_groups]
        for group in self.param_groups:
            self._correct_settings(group)
        try:
            return super().step(closure)
        finally:
            for group, (eps, weight_decay) in zip(self.param_groups, settings, strict=True):
                group.update(eps=eps, weight_decay=weight_decay)

    def _correct_settings(self, group: dict[str, Any]) -> None:
        """Set ``eps`` and ``weight_decay`` to values with which torch's next update equals this form.

        t is the number of updates of the parameter with the most updates in the group. If a fused kernel
        counts the updates on the device, the host waits for them.
        """
        steps = [float(self.state[p]["step"]) for p in group["params"] if p in self.state]
        step = max(steps, default=0.0) + 1
        beta1, beta2 = group["betas"]
        momentum_correction = 1 - beta1**step
        root_correction = math.sqrt(1 - beta2**step)
        # torch divides by √v / root_correction + eps. With the new eps, this is (√v + eps) / root_correction.
        group["eps"] /= root_correction
        if self.form == "intel":
            # torch multiplies the weight decay by lr, and Intel by s.
            group["weight_decay"] *= root_correction / momentum_correction
