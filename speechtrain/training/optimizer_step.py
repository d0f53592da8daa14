"""One optimizer update from accumulated gradients: scaled, clipped, and skipped if it is not finite."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor, nn

from speechtrain import torch_private
from speechtrain.dtensor import local_shard, total_norm
from speechtrain.optim.common import squared_norm
from speechtrain.optim.ema import Average
from speechtrain.precision import Precision, gradients_of


class StepOutcome(Enum):
    TAKEN = "taken"
    SCALED = "skipped, and fp16's loss scale lowered"
    REFUSED = "skipped: a loss or gradient is not finite"


class Trained(NamedTuple):
    """The objects that an update changes."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    average: Average


@dataclass(eq=False)
class Update(ABC):
    """How a run updates its weights. A skipped update changes neither weights nor their average."""

    precision: Precision
    clip: float

    @abstractmethod
    def __call__(self, trained: Trained, rate: float, scale: Tensor, healthy: Tensor) -> Tensor:
        """Update ``trained.module``. Return the norm () of its gradients times ``scale``, before clipping.

        ``scale`` () turns the accumulated gradients into the gradients of the mean loss. ``healthy`` () bool
        is True if every loss is finite. Gradients are cleared afterwards.
        """

    @abstractmethod
    def outcomes(self, due: bool) -> list[StepOutcome]:
        """Return the outcomes of the updates since the last call.

        Outcomes that are still on the device are read only if ``due`` is True.
        """

    def _clipped(self, scale: Tensor, norm: Tensor) -> Tensor:
        """Return the scale () that also clips gradients of ``norm`` (), which includes ``scale`` ()."""
        if self.clip <= 0:
            return scale
        return scale * torch.full_like(norm, self.clip) / norm.clamp(min=self.clip)

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
        scale = self._clipped(scale, norm)
        # This is the only host read of an update. All ranks read the same.
        is_finite = bool(healthy.bool() & torch.isfinite(norm))
        if is_finite:
            torch_private.foreach_mul_([local_shard(gradient) for gradient in gradients], scale)
            self._set_rate(optimizer, rate)
            self.precision.step(optimizer)
            average.update(module)
            outcome = StepOutcome.TAKEN
        elif self.precision.overflow(optimizer):
            outcome = StepOutcome.SCALED
        else:
            outcome = StepOutcome.REFUSED
        self._outcomes.append(outcome)
        optimizer.zero_grad(set_to_none=True)
        return norm

    def outcomes(self, due: bool) -> list[StepOutcome]:
        outcomes, self._outcomes = self._outcomes, []
        return outcomes


@dataclass(eq=False)
class BranchFreeUpdate(Update):
    """Every update is computed, then kept or undone within the graph. The host reads nothing.

    Each step costs a copy of the weights and of the optimizer's state. The counter of updates that
    some optimizers keep on the host also counts skipped updates.
    """

    _flags: list[Tensor] = field(init=False, default_factory=list)  # () 1 or 0: whether an update is kept

    @torch.no_grad()
    def __call__(self, trained: Trained, rate: float, scale: Tensor, healthy: Tensor) -> Tensor:
        module, optimizer, average = trained
        gradients = gradients_of(optimizer)
        squared_norms = torch.stack([squared_norm(gradient) for gradient in gradients])
        norm = squared_norms.sum().sqrt() * scale
        scale = self._clipped(scale, norm)
        # The flag is 1 if the update is finite and kept, and 0 if it is undone.
        flag = healthy.to(norm.dtype) * torch.isfinite(norm).to(norm.dtype)
        scale = scale.masked_fill(~torch.isfinite(scale), 0.0)
        for gradient in gradients:
            # Zeros are filled in first, because 0 · inf and 0 · NaN are NaN.
            gradient.masked_fill_(~torch.isfinite(gradient), 0.0).mul_(scale)
        self._set_rate(optimizer, rate)
        self._step_if(flag, optimizer)
        average.update(module, flag)
        self._flags.append(flag)
        optimizer.zero_grad(set_to_none=True)
        return norm

    def _step_if(self, flag: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Compute a step of the optimizer. Keep it if ``flag`` () is 1, and undo it if ``flag`` is 0."""
        copies = {id(tensor): tensor.clone() for tensor in self._tensors_on_device(optimizer)}
        self.precision.step(optimizer)
        for tensor in self._tensors_on_device(optimizer):
            copy = copies.get(id(tensor))
            tensor.mul_(flag)
            # A state that this step created has no copy. It starts at 0.
            if copy is not None:
                tensor.add_(copy * (1 - flag))

    @staticmethod
    def _tensors_on_device(optimizer: torch.optim.Optimizer) -> list[Tensor]:
        """Return the weights with gradients, and the optimizer's state tensors on the same device."""
        tensors: list[Tensor] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                tensors.append(parameter)
                # State tensors on another device are counters on the host.
                for state in optimizer.state.get(parameter, {}).values():
                    if isinstance(state, Tensor) and state.device == parameter.device:
                        tensors.append(state)
        return tensors

    def outcomes(self, due: bool) -> list[StepOutcome]:
        if not due:
            return []
        outcomes = []
        for flag in self._flags:
            outcome = StepOutcome.TAKEN if flag.cpu() else StepOutcome.REFUSED
            outcomes.append(outcome)
        self._flags = []
        return outcomes
