"""Checks that a saved state has the types and shapes that the run expects.

A run directory may come from a stranger, so a state may be malicious although its checksums are correct.
"""

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

_MAX_COUNT = 2**62  # Torch's int64 can represent sums of two such counts.
KERNELS = {"fused", "foreach", "capturable", "differentiable"}
"""Settings of torch's optimizers that belong to the device, and not to the run."""
_TENSOR_BY_TENSOR = {"fused": None, "foreach": False}
"""Settings with which an optimizer of torch updates one tensor at a time, with basic operations."""


def check_fit(saved: Any, expected: Any, path: str) -> None:
    """Raise ValueError if a value in ``saved`` has another type than the value in ``expected``.

    Mappings are compared at the keys that both have. A number must be at least 0, because all saved numbers
    are counts, times, positions and scales. ``path`` is the position in the state, for the message.
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
    """Load the state ``saved`` into ``optimizer``, and test it by an update of tensors without values.

    Raises the error of the test. The test is omitted if it already fails before the state is loaded. Settings
    of parameter groups that the optimizer does not know, such as ``lr_scale``, are not loaded, nor are
    ``KERNELS``.
    """
    can_test = _update_error(optimizer) is None
    groups = []
    for group, saved_group in zip(optimizer.state_dict()["param_groups"], saved["param_groups"], strict=True):
        keys = (optimizer.defaults.keys() & saved_group.keys()) - KERNELS
        settings = {key: saved_group[key] for key in keys}
        groups.append({**group, **settings})
    optimizer.load_state_dict({**saved, "param_groups": groups})
    error = _update_error(optimizer) if can_test else None
    if error is not None:
        raise error


def _update_error(optimizer: torch.optim.Optimizer) -> Exception | None:
    """Return the error of an update of tensors without values, or None if the update works.

    Some optimizers always fail, because they read values, need a closure, or have sharded parameters.
    """
    try:
        _copy_without_values(optimizer).step()
    except Exception as error:
        return error
    return None


def _copy_without_values(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a copy of an optimizer whose parameters, gradients and state are on the meta device."""
    trial = object.__new__(type(optimizer))
    # ``copy.copy`` loses the attributes of a subclass, because torch's optimizers pickle only their state.
    vars(trial).update(vars(optimizer))
    trial.param_groups, trial.state = [], defaultdict(dict)
    for group in optimizer.param_groups:
        meta_parameters = []
        for parameter in group["params"]:
            meta_parameter = nn.Parameter(_meta_tensor(parameter))
            meta_parameter.grad = _meta_tensor(parameter)
            meta_parameters.append(meta_parameter)
            for key, value in optimizer.state.get(parameter, {}).items():
                # Torch's optimizers read the value of ``step`` on the host.
                needs_value = not isinstance(value, Tensor) or key == "step"
                trial.state[meta_parameter][key] = (
                    copy.deepcopy(value) if needs_value else _meta_tensor(value)
                )
        trial_group = {**group, "params": meta_parameters}
        trial_group.update({key: flag for key, flag in _TENSOR_BY_TENSOR.items() if key in group})
        trial.param_groups.append(trial_group)
    return trial


def _meta_tensor(tensor: Tensor) -> Tensor:
    if is_sharded(tensor):
        raise TypeError("a sharded tensor cannot be copied to the meta device")
    return torch.empty_like(tensor, device="meta", requires_grad=False)
