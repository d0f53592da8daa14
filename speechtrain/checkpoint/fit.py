"""Whether a saved state fits the run that would continue with it: anybody can write one, and sign it."""

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

_MOST = 2**62  # of a count; torch's integers have 63 bits


def fit(saved: Any, own: Any, path: str) -> None:
    """Raise ValueError where ``saved`` has another kind of value than ``own``, of what both have.

    A number is at least 0: all those that parts save are counts, times, positions and scales.
    """
    if isinstance(own, Mapping):
        fits = isinstance(saved, Mapping)
        for key in own.keys() & saved.keys() if fits else ():
            fit(saved[key], own[key], f"{path}/{key}")
    elif isinstance(own, int | float) and not isinstance(own, bool):
        kinds = (int,) if isinstance(own, int) else (int, float)
        fits = type(saved) in kinds and 0 <= saved < (_MOST if isinstance(own, int) else math.inf)
    else:
        fits = isinstance(saved, Tensor if isinstance(own, Tensor) else type(own))
    if not fits:
        raise ValueError(f"{path} is {one_line(repr(saved)[:200], 80)}")


def load_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Load a state and try an update with it, where one can be tried. Raises what that update raises.

    Settings that are not the optimizer's own, such as ``lr_scale``, stay those of the run.
    """
    can_try = _update_fails(optimizer) is None
    groups = [
        {**ours, **{key: theirs[key] for key in optimizer.defaults if key in theirs}}
        for ours, theirs in zip(optimizer.state_dict()["param_groups"], saved["param_groups"], strict=True)
    ]
    optimizer.load_state_dict({**saved, "param_groups": groups})
    if can_try and (error := _update_fails(optimizer)):
        raise error


def _update_fails(optimizer: torch.optim.Optimizer) -> Exception | None:
    """Why an update fails that has the real one's shapes and settings and no values; None if it works.

    Some never work: they read values, need a closure, or have sharded parameters.
    """
    twins: dict[Tensor, nn.Parameter] = {}
    trial, plain = copy.copy(optimizer), {"fused": None, "foreach": False}
    trial.param_groups, trial.state = [], defaultdict(dict)
    try:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                twins[parameter] = nn.Parameter(_without_values(parameter))
                twins[parameter].grad = _without_values(parameter)
            flags = {key: value for key, value in plain.items() if key in group}
            trial.param_groups.append({**group, **flags, "params": [twins[p] for p in group["params"]]})
        for parameter, twin in twins.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                is_read = not isinstance(value, Tensor) or key == "step"  # torch's counter, by the host
                trial.state[twin][key] = copy.deepcopy(value) if is_read else _without_values(value)
        trial.step()
    except Exception as error:
        return error
    return None


def _without_values(tensor: Tensor) -> Tensor:
    if is_sharded(tensor):
        raise TypeError("a sharded tensor has no twin")
    return torch.empty_like(tensor, device="meta", requires_grad=False)
