"""An optimizer whose step asks for more memory than a machine has, for one learning rate."""

from __future__ import annotations

from typing import Any

import torch

from speechtrain.optim.adamw import AdamW

HUNGRY_RATE = 2e-3


class HungryAdamW(AdamW):
    """Allocates 2^50 bytes in each step of a network with the learning rate ``HUNGRY_RATE``.

    The start of a run steps an optimizer of one parameter, which passes.
    """

    def step(self, closure: Any = None) -> Any:
        if self.defaults["lr"] == HUNGRY_RATE and len(self.param_groups[0]["params"]) > 1:
            torch.empty(2**50, dtype=torch.uint8)
        return super().step(closure)
