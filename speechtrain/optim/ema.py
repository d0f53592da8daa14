"""The average of the weights over updates. It is evaluated and exported instead of the last weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from speechtrain import torch_private
from speechtrain.dtensor import local_shard
from speechtrain.errors import RunError


class Average:
    """An average of a module's state, stored outside the module. This base class does not average."""

    updates: int = 0
    """The number of updates in the average so far."""

    def update(self, module: nn.Module, is_counted: Tensor | None = None) -> None:
        """Add the module's state after an update to the average.

        ``is_counted`` () is 1 on the device if the update counts, else 0. With None it counts.
        """

    def use_average(self, module: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which the module has the average. Afterwards it has its own state again."""
        return nullcontext()

    def averaged_state_dict(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the module's ``state_dict`` with averaged values, in the module's dtypes, for export.

        It may share memory with the average or the module, so save it before the next update.
        """
        return {name: tensor.detach() for name, tensor in _tensors(module).items()}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        return None


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the module's parameters and persistent buffers by name.

    They are not detached as in a plain ``state_dict``. A write into detached tensors would create views,
    which the next graph of a lazy device would evaluate.
    """
    state = module.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}


class NoEMA(Average):
    """No average: the weights are used as they are."""


class EMA(Average):
    """The exponential moving average ``e = d · e + (1 − d) · p`` in fp32, which starts at the module's state.

    Floating-point parameters and buffers are averaged. Other buffers, such as BatchNorm's counters, are
    copied. In the n-th update, counted from 0, d is ``min(decay, (1 + n) / (10 + n))``. So early averages do
    not consist of the initial weights. ``module`` decides names and shapes.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        if not 0 < decay < 1:
            raise ValueError(f"decay is {decay}. It must be above 0 and below 1. NoEMA does not average")
        self.decay = decay
        self.updates = 0
        self._average = {}
        for name, tensor in _tensors(module).items():
            copy = tensor.detach().clone()
            self._average[name] = copy.float() if copy.is_floating_point() else copy

    @torch.no_grad()
    def update(self, module: nn.Module, is_counted: Tensor | None = None) -> None:
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        tensors = _tensors(module)
        averages, values = [], []
        for name, average in self._average.items():
            if average.is_floating_point():
                averages.append(local_shard(average))
                values.append(local_shard(tensors[name]))
            else:
                local_shard(average).copy_(local_shard(tensors[name]))
        # The difference is added, so that the average of a constant value has exactly this value.
        if is_counted is None:
            differences = torch_private.foreach_sub(values, averages)
            torch_private.foreach_add_(averages, differences, alpha=1 - decay)
            return
        # The rate is a tensor. If it was a Python number that equals another number of the step, the recorded
        # graph would change.
        rates = torch.tensor([1 - decay]).to(is_counted.device)
        rate = rates[0] * is_counted
        for average, value in zip(averages, values, strict=True):
            average.addcmul_(value - average, rate)

    @contextmanager
    def use_average(self, module: nn.Module) -> Iterator[None]:
        tensors = _tensors(module)
        copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        try:
            self._fill(tensors, self._average)
            yield
        finally:
            self._fill(tensors, copies)

    @staticmethod
    @torch.no_grad()
    def _fill(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        """Write ``values`` into ``tensors`` of the same names."""
        for name, tensor in tensors.items():
            tensor.copy_(values[name])

    def averaged_state_dict(self, module: nn.Module) -> dict[str, Tensor]:
        return {name: self._average[name].to(tensor.dtype) for name, tensor in _tensors(module).items()}

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "average": dict(self._average)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the average. Raises RunError for a missing tensor, an unknown tensor or another shape."""
        saved_average: Mapping[str, Tensor] = state["average"]
        for name in sorted(saved_average.keys() | self._average.keys()):
            saved_shape = _shape(saved_average.get(name))
            shape = _shape(self._average.get(name))
            if saved_shape != shape:
                raise RunError(
                    f"the saved weight average does not fit the model at {name!r}: "
                    f"{saved_shape} saved, {shape} in the model. Use a new run_dir"
                )
        self.updates = int(state["updates"])
        self._fill(self._average, saved_average)


def average_of(module: nn.Module, decay: float) -> Average:
    """Return the average of ``module`` with ``decay``, which averages nothing if that is 0."""
    return EMA(module, decay) if decay else NoEMA()


def _shape(tensor: Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tuple(tensor.shape)
