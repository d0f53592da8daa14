"""Compute policy: which implementation of a block a device uses, and the usable CPUs.

The implementations of a block have equal results and parameters, but use different operations.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ComputePolicy:
    """A device's choice for blocks that have several implementations.

    ``static``: no shape depends on data, and the host reads nothing back within a step.
    ``lstm``: ``fused`` is torch's own, ``loop`` a loop over frames (for devices without a fused LSTM, and
    for bf16 on CPU, where the backward of the fused LSTM is slower than in fp32).
    """

    static: bool = False
    lstm: str = "fused"


class PolicyAware(ABC):
    """A block with several implementations; checkpoints do not depend on the choice."""

    @abstractmethod
    def apply_policy(self, policy: ComputePolicy) -> None:
        """Use the implementation that ``policy`` selects."""


def apply_policy(module: nn.Module, policy: ComputePolicy) -> None:
    """Apply ``policy`` to ``module`` and to every block in it that is ``PolicyAware``."""
    for block in module.modules():
        if isinstance(block, PolicyAware):
            block.apply_policy(policy)


def times(scalar: Tensor, factor: float) -> Tensor:
    """Multiply a scalar tensor () by a number in the tensor's dtype; lazy tensors would return fp64."""
    return scalar * torch.full_like(scalar, factor)


def usable_cpus() -> set[int]:
    """The CPUs that this process may use: its affinity mask (Linux; cgroups reduce it), else all CPUs."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
