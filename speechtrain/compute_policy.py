"""How to compute on this machine: the forms of a block that a device chooses from, and the usable CPUs.

The forms of a block have equal results and parameters, and use other operations.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ComputePolicy:
    """What a device wants of the blocks that can compute in more than one way.

    ``static``: no shape depends on data and nothing is read back by the host within a step.
    ``lstm``: ``fused`` is torch's own, ``loop`` a loop over frames (devices without a fused one, and
    bf16 on CPU, where the fused one's backward is slower than in fp32).
    """

    static: bool = False
    lstm: str = "fused"


class PolicyAware(ABC):
    """A block with several forms; checkpoints do not depend on which is used."""

    @abstractmethod
    def apply_policy(self, policy: ComputePolicy) -> None:
        """Compute as ``policy`` says from now on."""


def apply_policy(module: nn.Module, policy: ComputePolicy) -> None:
    """Tell every adaptive block of ``module``, itself included."""
    for block in module.modules():
        if isinstance(block, PolicyAware):
            block.apply_policy(policy)


def times(scalar: Tensor, factor: float) -> Tensor:
    """A scalar tensor () by a number, in the tensor's dtype: lazy tensors would make the product fp64."""
    return scalar * torch.full_like(scalar, factor)


def usable_cpus() -> set[int]:
    """The CPUs that this process may use: its affinity mask, which cgroups narrow (Linux), else all."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
