"""Steps that leave no trace: how a device compiles its graphs before a run's first step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from speechtrain.batch import Batch
from speechtrain.optim.ema import Average


def padding_batch(rows: int, samples: int, labels: int) -> Batch:
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
def without_side_effects(
    module: nn.Module, optimizer: torch.optim.Optimizer, average: Average
) -> Iterator[None]:
    """A context in which updates that are not taken leave nothing behind, the host's counters included.

    Weights, moments and average are such an update's own business; buffers (BatchNorm's statistics) are
    written by forward, and put back.
    """
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    before = {parameter: _counters(parameter, state) for parameter, state in optimizer.state.items()}
    updates = average.updates
    yield
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
    for parameter, state in optimizer.state.items():
        for name, now in _counters(parameter, state).items():
            kept = before.get(parameter, {}).get(name, 0)
            state[name] = torch.full_like(now, float(kept)) if isinstance(now, Tensor) else kept
    average.updates = updates


def _counters(parameter: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """What an optimizer keeps of a parameter on the host."""
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in state.items()
        if not isinstance(value, Tensor) or value.is_cpu != parameter.is_cpu
    }
