"""Steps that leave no trace: how a device compiles its graphs before the first step of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from speechtrain.batch import Batch
from speechtrain.optim.ema import Average


def filler(rows: int, samples: int, labels: int) -> Batch:
    """A batch of that shape, all its rows silent and of weight 0."""
    return Batch(
        audio=torch.zeros(rows, samples),
        audio_lengths=torch.full((rows,), samples),
        labels=torch.zeros(rows, labels, dtype=torch.int64),
        label_lengths=torch.zeros(rows, dtype=torch.int64),
        weight=torch.zeros(rows),
        keys=torch.zeros(rows, dtype=torch.int64),
        ids=("",) * rows,
        texts=("",) * rows,
    )


@contextmanager
def undone(module: nn.Module, optimizer: torch.optim.Optimizer, average: Average) -> Iterator[None]:
    """A context after which weights, buffers, the optimizer's state and the average are as before.

    In place, so that what a device knows of the tensors stays true; a state that the optimizer has begun
    within is left at zero, where every optimizer here begins.
    """
    kept = {name: value.detach().clone() for name, value in module.state_dict().items()}
    states = {
        parameter: {key: _copy(value) for key, value in state.items()}
        for parameter, state in optimizer.state.items()
    }
    averaged = {key: _copy(value) for key, value in average.state_dict().items()}
    yield
    with torch.no_grad():
        for name, value in module.state_dict().items():
            value.copy_(kept[name])
        for parameter, state in optimizer.state.items():
            before = states.get(parameter, {})
            for key, value in state.items():
                if not isinstance(value, Tensor):
                    state[key] = before.get(key, type(value)())
                elif key in before:
                    value.copy_(before[key])
                else:
                    value.zero_()
    average.load_state_dict(averaged)


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return {key: _copy(inner) for key, inner in value.items()} if isinstance(value, dict) else value
