"""The forms of Adam's bias correction, against steps that were computed with 40 decimal digits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from speechtrain.optim.adamw import AdamW

STEPS = {
    "torch": (0.9987696078431372549, 0.9982601509671139886),
    "fairseq": (0.9991374258867227931, 0.9987175572166187456),
    "intel": (0.9993083689452185836, 0.9990794961383430898),
}
"""The weight 1 after gradients 0.5 and -0.25: lr 1e-3, betas 0.9 and 0.999, eps 0.01, weight decay 0.25."""

IMPLEMENTATIONS = ({"fused": True}, {"foreach": True}, {"fused": False, "foreach": False})


def optimizer_of(parameter: nn.Parameter, form: str, **flags: bool) -> AdamW:
    return AdamW([parameter], lr=1e-3, eps=0.01, weight_decay=0.25, form=form, **flags)


@pytest.mark.parametrize("flags", IMPLEMENTATIONS, ids=str)
@pytest.mark.parametrize("form", STEPS)
def test_two_steps_by_hand(form: str, flags: dict[str, bool]) -> None:
    parameter = nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = optimizer_of(parameter, form, **flags)
    for gradient, weight in zip((0.5, -0.25), STEPS[form], strict=True):
        parameter.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        assert parameter.item() == pytest.approx(weight, rel=1e-15)
    group = optimizer.param_groups[0]
    assert (group["eps"], group["weight_decay"]) == (0.01, 0.25)
