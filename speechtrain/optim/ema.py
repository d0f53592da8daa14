"""The average of the weights over updates, evaluated and exported instead of the last weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from speechtrain import torch_private
from speechtrain.dtensor import local
from speechtrain.errors import RunError


class Average:
    """An average of a module's state, stored outside the module; by default none."""

    updates: int = 0
    """Updates in the average so far."""

    def update(self, module: nn.Module, taken: Tensor | None = None) -> None:
        """Add the module's state after one more update to the average.

        ``taken`` () 1 or 0 on the device is whether the update counts; None: it counts.
        """

    def swapped(self, module: nn.Module) -> AbstractContextManager[None]:
        """A context in which the module holds the average; its own state returns afterwards, bit by bit."""
        return nullcontext()

    def averaged_state_dict(self, module: nn.Module) -> dict[str, Tensor]:
        """The module's ``state_dict`` with averaged values, in the module's dtypes, for export.

        It may share memory with the average or the module: save it before the next update.
        """
        return {name: value.detach() for name, value in _tensors(module).items()}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        return None


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """The module's own parameters and persistent buffers by name, not detached.

    A write into a plain ``state_dict`` would create views, which a lazy device's next graph would evaluate.
    """
    held = module.state_dict(keep_vars=True)
    return {name: value for name, value in held.items() if isinstance(value, Tensor)}


class NoEMA(Average):
    """No average: the weights are used as they are."""


class EMA(Average):
    """The exponential moving average ``e = d · e + (1 − d) · p``, in fp32; it starts at the module's state.

    Floating-point parameters and buffers are averaged, others (BatchNorm's counters) copied. With
    ``warmup`` the n-th update, n from 0, takes ``d = min(decay, (1 + n) / (10 + n))``, so that early
    evaluations are not of the initial weights. ``module`` fixes the names and shapes.
    """

    def __init__(self, module: nn.Module, decay: float, warmup: bool = True) -> None:
        if not 0 < decay < 1:
            raise ValueError(f"trainer.ema is {decay}; it must be above 0 and below 1, or 0 for no average")
        self.decay = decay
        self.warmup = warmup
        self.updates = 0
        self._average = {
            name: value.detach().clone().float() if value.is_floating_point() else value.detach().clone()
            for name, value in _tensors(module).items()
        }

    @torch.no_grad()
    def update(self, module: nn.Module, taken: Tensor | None = None) -> None:
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.warmup else self.decay
        self.updates += 1
        tensors = _tensors(module)
        # moved as data: a number that equals another number of the step would change the recorded graph
        share = None if taken is None else torch.tensor([1 - decay]).to(taken.device)[0] * taken
        pairs = [(local(average), local(tensors[name])) for name, average in self._average.items()]
        for average, value in pairs:
            if not average.is_floating_point():
                average.copy_(value)
            elif share is not None:
                average.add_((value - average) * share)
        if share is None:
            averages = [average for average, _ in pairs if average.is_floating_point()]
            values = [value for average, value in pairs if average.is_floating_point()]
            # by the difference, so that constant values stay bit by bit
            torch_private.foreach_add_(averages, torch_private.foreach_sub(values, averages), alpha=1 - decay)

    @contextmanager
    def swapped(self, module: nn.Module) -> Iterator[None]:
        tensors = _tensors(module)
        kept = {name: value.detach().clone() for name, value in tensors.items()}
        try:
            self._fill(tensors, self._average)
            yield
        finally:
            self._fill(tensors, kept)

    @staticmethod
    @torch.no_grad()
    def _fill(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            tensor.copy_(values[name])

    def averaged_state_dict(self, module: nn.Module) -> dict[str, Tensor]:
        return {name: self._average[name].to(value.dtype) for name, value in _tensors(module).items()}

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "average": dict(self._average)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the average. Raises RunError that names a missing, unknown or differently shaped tensor."""
        saved: Mapping[str, Tensor] = state["average"]
        for name in sorted(saved.keys() | self._average.keys()):
            ours, theirs = self._average.get(name), saved.get(name)
            if ours is None or theirs is None or ours.shape != theirs.shape:
                shapes = [None if t is None else tuple(t.shape) for t in (ours, theirs)]
                raise RunError(
                    f"the saved weight average does not fit the model at {name!r}: "
                    f"{shapes[1]} saved, {shapes[0]} in the model; use a new run_dir"
                )
        self.updates = int(state["updates"])
        self._fill(self._average, saved)
