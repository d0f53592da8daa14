"""Checks that a saved state fits the run that would continue with it. Anybody can write and sign a state."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from speechtrain.dtensor import is_sharded
from speechtrain.errors import one_line

_MAX_COUNT = 2**62  # Integers of torch have 63 bits.
_UNFUSED = {"fused": None, "foreach": False}  # settings by which an optimizer updates tensors one by one


def check_fit(saved: Any, expected: Any, path: str) -> None:
    """Raise ValueError if ``saved`` has another kind of value than ``expected`` at a key that both have.

    A number must be at least 0, because parts save only counts, times, positions and scales.
    """
    if isinstance(expected, Mapping):
        fits = isinstance(saved, Mapping)
        if fits:
            for key in expected.keys() & saved.keys():
                check_fit(saved[key], expected[key], f"{path}/{key}")
    elif isinstance(expected, Tensor):
        fits = isinstance(saved, Tensor)
    elif isinstance(expected, bool) or not isinstance(expected, int | float):
        fits = isinstance(saved, type(expected))
    elif isinstance(expected, int):
        fits = type(saved) is int and 0 <= saved < _MAX_COUNT
    else:
        fits = type(saved) in (int, float) and 0 <= saved < math.inf
    if not fits:
        raise ValueError(f"{path} is {one_line(repr(saved)[:200], 80)}")


def load_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Load a state, and try an update with it if the optimizer allows that. Raises the error of that update.

    Settings that are not defaults of the optimizer, such as ``lr_scale``, stay as the run has them.
    """
    can_try = _update_error(optimizer) is None
    groups = []
    for group, saved_group in zip(optimizer.state_dict()["param_groups"], saved["param_groups"], strict=True):
        settings = {key: saved_group[key] for key in optimizer.defaults if key in saved_group}
        groups.append({**group, **settings})
    optimizer.load_state_dict({**saved, "param_groups": groups})
    error = _update_error(optimizer) if can_try else None
    if error is not None:
        raise error


def _update_error(optimizer: torch.optim.Optimizer) -> Exception | None:
    """Return the error of an update of tensors without values, or None if the update works.

    Some optimizers always fail, because they read values, need a closure, or have sharded parameters.
    """
    try:
        _trial_of(optimizer).step()
    except Exception as error:
        return error
    return None


def _trial_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a copy of an optimizer. Its parameters, gradients and state have shapes, and no values."""
    trial = copy.copy(optimizer)
    trial.param_groups, trial.state = [], defaultdict(dict)
    for group in optimizer.param_groups:
        twins = []
        for parameter in group["params"]:
            twin = nn.Parameter(_without_values(parameter))
            twin.grad = _without_values(parameter)
            twins.append(twin)
            for key, value in optimizer.state.get(parameter, {}).items():
                is_read = not isinstance(value, Tensor) or key == "step"  # The host reads torch's counter.
                trial.state[twin][key] = copy.deepcopy(value) if is_read else _without_values(value)
        trial_group = {**group, "params": twins}
        trial_group.update({key: flag for key, flag in _UNFUSED.items() if key in group})
        trial.param_groups.append(trial_group)
    return trial


def _without_values(tensor: Tensor) -> Tensor:
    if is_sharded(tensor):
        raise TypeError("a sharded tensor has no twin")
    return torch.empty_like(tensor, device="meta", requires_grad=False)
