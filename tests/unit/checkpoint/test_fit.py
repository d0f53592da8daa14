"""A state is compared with the part that loads it, and an update that is tried with it leaves no trace."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from speechtrain.checkpoint.fit import KERNELS, check_fit, load_optimizer
from speechtrain.optim.adamw import AdamW
from speechtrain.optim.lamb import LAMB
from speechtrain.optim.muon import Muon
from speechtrain.optim.novograd import NovoGrad

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: AdamW(parameters, lr=0.1),
    "fused adamw": lambda parameters: AdamW(parameters, lr=0.1, fused=True),
    "intel's adamw": lambda parameters: AdamW(parameters, lr=0.1, form="intel"),
    "muon": lambda parameters: Muon(parameters, lr=0.1, min_side=3),
    "lamb": lambda parameters: LAMB(parameters, lr=0.1),
    "novograd": lambda parameters: NovoGrad(parameters, lr=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
}


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 4)


def updated(optimizer: torch.optim.Optimizer, module: nn.Module, count: int) -> None:
    for number in range(count):
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, 0.1 * (number + 1))
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_that_is_tried_leaves_no_trace(name: str) -> None:
    whole = layer()
    optimizer = OPTIMIZERS[name](whole.parameters())
    updated(optimizer, whole, 3)
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(whole.state_dict())

    module = layer()
    module.load_state_dict(weights)
    loaded = OPTIMIZERS[name](module.parameters())
    load_optimizer(loaded, saved)
    found = loaded.state_dict()
    assert found["param_groups"] == saved["param_groups"]
    torch.testing.assert_close(found["state"], saved["state"], rtol=0, atol=0)
    torch.testing.assert_close(dict(module.state_dict()), dict(weights), rtol=0, atol=0)
    updated(optimizer, whole, 3)
    updated(loaded, module, 3)
    torch.testing.assert_close(dict(module.state_dict()), dict(whole.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["adamw", "lamb", "novograd"])
def test_half_a_state_of_an_optimizer_does_not_load(name: str) -> None:
    module = layer()
    optimizer = OPTIMIZERS[name](module.parameters())
    updated(optimizer, module, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0].pop(next(iter(saved["state"][0])))
    with pytest.raises(KeyError):
        load_optimizer(OPTIMIZERS[name](layer().parameters()), saved)


@pytest.mark.parametrize("name", ["adamw", "fused adamw", "lamb", "novograd", "sgd"])
def test_load_optimizer_refuses_a_state_of_another_shape(name: str) -> None:
    module = layer()
    optimizer = OPTIMIZERS[name](module.parameters())
    updated(optimizer, module, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    state_name = "momentum_buffer" if name == "sgd" else "exp_avg"
    saved["state"][0][state_name] = torch.zeros(7)
    with pytest.raises((RuntimeError, ValueError)):
        load_optimizer(OPTIMIZERS[name](layer().parameters()), saved)


@pytest.mark.parametrize(
    "settings", [{"fused": False, "foreach": False}, {"foreach": True}, {"capturable": True}]
)
def test_load_optimizer_keeps_the_kernels_of_its_device(settings: dict[str, bool]) -> None:
    """A run may continue on another device."""
    module = layer()
    optimizer = AdamW(module.parameters(), lr=0.1, fused=True)
    updated(optimizer, module, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.2
    other = AdamW(layer().parameters(), lr=0.1)
    other.param_groups[0].update(settings)
    kernels = {name: other.param_groups[0][name] for name in KERNELS}
    load_optimizer(other, saved)
    assert {name: other.param_groups[0][name] for name in KERNELS} == kernels
    assert other.param_groups[0]["lr"] == 0.2


def test_values_of_another_kind_do_not_fit() -> None:
    own = {"step": 3, "seconds": 0.5, "name": "a", "weight": torch.zeros(2)}
    check_fit({**own, "step": 4, "other": object()}, own, "part")
    for key, value in {"step": -1, "seconds": "1", "name": None, "weight": [0.0, 0.0]}.items():
        with pytest.raises(ValueError, match=f"part/{key} is"):
            check_fit({**own, key: value}, own, "part")
