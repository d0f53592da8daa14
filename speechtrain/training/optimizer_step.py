"""One optimizer update from accumulated gradients: scaled, clipped, and skipped if it is not finite."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor, nn

from speechtrain import torch_private
from speechtrain.dtensor import local, total_norm
from speechtrain.optim.common import squared_norm
from speechtrain.optim.ema import Average
from speechtrain.precision import Precision, gradients_of


class StepOutcome(Enum):
    TAKEN = "taken"
    SCALED = "skipped, and fp16's loss scale lowered"
    REFUSED = "skipped: a loss or gradient is not finite"


class Trained(NamedTuple):
    """What an update changes."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    average: Average


@dataclass(eq=False)
class Update(ABC):
    """How a run updates its weights; a skipped update changes neither weights nor their average."""

    precision: Precision
    clip: float

    @abstractmethod
    def __call__(self, trained: Trained, rate: float, scale: Tensor, healthy: Tensor) -> Tensor:
        """Update ``trained.module``; returns the norm () of its gradients times ``scale``, before clipping.

        ``scale`` () turns the accumulated gradients into those of the mean loss; ``healthy`` () bool is
        True if every loss is finite. Gradients are cleared afterwards.
        """

    @abstractmethod
    def outcomes(self, due: bool) -> list[StepOutcome]:
        """Outcomes of the updates since the last call; those still on the device are read when ``due``."""

    def _set_rate(self, optimizer: torch.optim.Optimizer, rate: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)


@dataclass(eq=False)
class HostCheckedUpdate(Update):
    """The host reads whether the update is finite, and skips it if it is not."""

    _outcomes: list[StepOutcome] = field(init=False, default_factory=list)

    def __call__(self, trained: Trained, rate: float, scale: Tensor, healthy: Tensor) -> Tensor:
        module, optimizer, average = trained
        self.precision.unscale(optimizer)
        gradients = gradients_of(optimizer)
        norm = total_norm(gradients) * scale
        if self.clip > 0:
            scale = scale * torch.full_like(norm, self.clip) / norm.clamp(min=self.clip)
        if bool(healthy.bool() & torch.isfinite(norm)):  # its only host read: every rank decides the same
            torch_private.foreach_mul_([local(gradient) for gradient in gradients], scale)
            self._set_rate(optimizer, rate)
            self.precision.step(optimizer)
            average.update(module)
            outcome = StepOutcome.TAKEN
        else:
            outcome = StepOutcome.SCALED if self.precision.overflow(optimizer) else StepOutcome.REFUSED
        self._outcomes.append(outcome)
        optimizer.zero_grad(set_to_none=True)
        return norm

    def outcomes(self, due: bool) -> list[StepOutcome]:
        found, self._outcomes = self._outcomes, []
        return found


@dataclass(eq=False)
class BranchFreeUpdate(Update):
    """Every update is computed, then taken or undone within the graph: nothing is read back.

    Costs a copy of the weights and of the optimizer's state in every step. The counter of updates that
    some optimizers keep on the host also counts skipped updates.
    """

    _taken: list[Tensor] = field(init=False, default_factory=list)

    @torch.no_grad()
    def __call__(self, trained: Trained, rate: float, scale: Tensor, healthy: Tensor) -> Tensor:
        module, optimizer, average = trained
        gradients = gradients_of(optimizer)
        norm = torch.stack([squared_norm(gradient) for gradient in gradients]).sum().sqrt() * scale
        if self.clip > 0:
            scale = scale * torch.full_like(norm, self.clip) / norm.clamp(min=self.clip)
        taken = healthy.to(norm.dtype) * torch.isfinite(norm).to(norm.dtype)
        scale = scale.masked_fill(~torch.isfinite(scale), 0.0)
        for gradient in gradients:  # filled first: 0 · inf and 0 · NaN are NaN
            gradient.masked_fill_(~torch.isfinite(gradient), 0.0).mul_(scale)
        before = {id(tensor): tensor.clone() for tensor in self._changing(optimizer)}
        self._set_rate(optimizer, rate)
        self.precision.step(optimizer)
        for tensor in self._changing(optimizer):
            kept = before.get(id(tensor))  # None for a state that this update created: it starts at 0
            tensor.mul_(taken)
            if kept is not None:
                tensor.add_(kept * (1 - taken))
        average.update(module, taken)
        self._taken.append(taken)
        optimizer.zero_grad(set_to_none=True)
        return norm

    @staticmethod
    def _changing(optimizer: torch.optim.Optimizer) -> list[Tensor]:
        """The weights, and the optimizer's state tensors on the same device."""
        changing: list[Tensor] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                states = optimizer.state.get(parameter, {}).values()
                tensors = [state for state in states if isinstance(state, Tensor)]
                # the other tensors are counters on the host
                changing += [parameter, *(t for t in tensors if t.device == parameter.device)]
        return changing

    def outcomes(self, due: bool) -> list[StepOutcome]:
        if not due:
            return []
        found = [StepOutcome.TAKEN if float(taken.cpu()) else StepOutcome.REFUSED for taken in self._taken]
        self._taken = []
        return found
