"""One optimizer update from accumulated gradients. They are scaled and clipped first.

An update with a loss or a gradient that is not finite is skipped.
"""

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
from speechtrain.task import Loss, Sums, detached


class UpdateResult(Enum):
    """The result of an update."""

    APPLIED = "applied"
    SCALE_LOWERED = "skipped, and fp16's loss scale lowered"
    NOT_FINITE = "skipped: a loss or gradient is not finite"


class Trained(NamedTuple):
    """The objects that an update changes."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    average: Average


class LossDetails(NamedTuple):
    """The loss of a micro-batch without gradients, for messages."""

    terms: Sums  # the metrics
    rows: Tensor | None  # (B,) the loss of each row


@dataclass(eq=False)
class Update(ABC):
    """The way in which a run updates its weights. A skipped update changes neither weights nor average."""

    precision: Precision
    clip: float  # the largest norm of the gradients, or 0 for no clipping

    @abstractmethod
    def __call__(self, trained: Trained, rate: float, scale: Tensor, healthy: Tensor) -> Tensor:
        """Update ``trained`` with the learning rate ``rate``. Return the norm () of its scaled gradients.

        - ``scale`` () turns the accumulated gradients into the gradients of the mean loss.
        - ``healthy`` () is 1 if every loss is finite, else 0, in the type of ``scale``.

        The norm is the norm before clipping. Gradients are cleared afterwards.
        """

    def rehearse(self, trained: Trained, rate: float, scale: Tensor, healthy: Tensor) -> object:
        """Compute an update without applying it, to compile its graph. By default, an update has no graph."""
        return None

    def loss_details(self, loss: Loss) -> list[LossDetails]:
        """Return the details of the loss of a micro-batch, or [] if the device cannot store them."""
        return []

    @abstractmethod
    def results(self, due: bool) -> list[UpdateResult]:
        """Return the results of the updates since the last call that returned any.

        Reading results that are on the device is expensive. So they are returned only if ``due`` is True.
        """

    def _clipping_scale(self, scale: Tensor, norm: Tensor) -> Tensor:
        """Return ``scale`` () times the factor that clips gradients whose scaled norm is ``norm`` ()."""
        if self.clip <= 0:
            return scale
        return scale * torch.full_like(norm, self.clip) / norm.clamp(min=self.clip)

    def _set_rate(self, optimizer: torch.optim.Optimizer, rate: float) -> None:
        """Set the learning rate of each parameter group, times the group's ``lr_scale`` if it has one."""
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)


@dataclass(eq=False)
class HostCheckedUpdate(Update):
    """An update that the host skips if it is not finite. This costs one read from the device."""

    _results: list[UpdateResult] = field(init=False, default_factory=list)

    def __call__(self, trained: Trained, rate: float, scale: Tensor, healthy: Tensor) -> Tensor:
        module, optimizer, average = trained
        self.precision.unscale(optimizer)
        gradients = gradients_of(optimizer)
        norm = total_norm(gradients) * scale
        scale = self._clipping_scale(scale, norm)
        if self._is_finite(healthy, norm):
            torch_private.foreach_mul_([local_shard(gradient) for gradient in gradients], scale)
            self._set_rate(optimizer, rate)
            self.precision.step(optimizer)
            average.update(module)
            result = UpdateResult.APPLIED
        elif self.precision.overflow(optimizer):
            result = UpdateResult.SCALE_LOWERED
        else:
            result = UpdateResult.NOT_FINITE
        self._results.append(result)
        optimizer.zero_grad(set_to_none=True)
        return norm

    def loss_details(self, loss: Loss) -> list[LossDetails]:
        return [LossDetails(detached(loss.metrics), loss.rows)]

    def _is_finite(self, healthy: Tensor, norm: Tensor) -> bool:
        """Read from the device whether an update is finite. All ranks read the same value.

        This is the only host read of an update, and the host waits for the device here.
        """
        return bool(healthy.bool() & torch.isfinite(norm))

    def results(self, due: bool) -> list[UpdateResult]:
        results, self._results = self._results, []
        return results


@dataclass(eq=False)
class BranchFreeUpdate(Update):
    """An update that is always computed, and undone within the graph if it is not finite.

    The host reads nothing and the graph has no branch. Each step costs a copy of the weights and of the
    optimizer's state. Some optimizers count their updates on the host. They also count skipped updates.
    No details of a loss are stored, because each stored tensor would be an output of the graph.
    """

    _flags: list[Tensor] = field(init=False, default_factory=list)  # for each update: () 1 if finite, else 0

    def __call__(self, trained: Trained, rate: float, scale: Tensor, healthy: Tensor) -> Tensor:
        return self._select(trained, rate, scale, healthy * _flag(1.0, healthy))

    def rehearse(self, trained: Trained, rate: float, scale: Tensor, healthy: Tensor) -> object:
        return self._select(trained, rate, scale, healthy * _flag(0.0, healthy))

    @torch.no_grad()
    def _select(self, trained: Trained, rate: float, scale: Tensor, healthy: Tensor) -> Tensor:
        """Compute an update, and undo it if ``healthy`` () is 0. Return the norm () of the gradients."""
        module, optimizer, average = trained
        gradients = gradients_of(optimizer)
        squared_norms = torch.stack([squared_norm(gradient) for gradient in gradients])
        norm = squared_norms.sum().sqrt() * scale
        scale = self._clipping_scale(scale, norm)
        is_finite = healthy.to(norm.dtype) * torch.isfinite(norm).to(norm.dtype)  # () 1 or 0
        # An update that is undone must not contain inf or NaN either, because 0 · inf and 0 · NaN are NaN.
        scale = scale.masked_fill(~torch.isfinite(scale), 0.0)
        is_overflow = ~torch.isfinite(norm)
        for gradient in gradients:
            gradient.masked_fill_(is_overflow, 0.0).mul_(scale)
        self._set_rate(optimizer, rate)
        copies = {id(tensor): tensor.clone() for tensor in self._tensors_on_device(optimizer)}
        self.precision.step(optimizer)
        undo = 1 - is_finite
        for tensor in self._tensors_on_device(optimizer):
            copy = copies.get(id(tensor))
            tensor.mul_(is_finite)
            # A state that this step created has no copy. It starts at 0.
            if copy is not None:
                tensor.addcmul_(copy, undo)
        average.update(module, is_finite)
        self._flags.append(is_finite)
        optimizer.zero_grad(set_to_none=True)
        return norm

    @staticmethod
    def _tensors_on_device(optimizer: torch.optim.Optimizer) -> list[Tensor]:
        """Return the weights with gradients, and the optimizer's state tensors on the same device."""
        tensors: list[Tensor] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                tensors.append(parameter)
                # State tensors on another device are counters on the host. They are not undone.
                for state in optimizer.state.get(parameter, {}).values():
                    if isinstance(state, Tensor) and state.device == parameter.device:
                        tensors.append(state)
        return tensors

    def results(self, due: bool) -> list[UpdateResult]:
        if not due:
            return []
        results = []
        for flag in self._flags:
            result = UpdateResult.APPLIED if flag.cpu() else UpdateResult.NOT_FINITE
            results.append(result)
        self._flags = []
        return results


def _flag(flag: float, like: Tensor) -> Tensor:
    """Return a number () on the device of ``like``.

    It is an element of a tensor, because the lazy backend merges equal scalars, so that a rehearsal and a
    real update would have different graphs.
    """
    return torch.tensor([flag]).to(like.device, non_blocking=True)[0]
