"""Equal forms of a block, of which a device chooses one: same numbers and parameters, other operations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Forms:
    """What a device wants of the blocks that can compute in more than one way.

    ``static``: no shape depends on data and nothing is read back by the host within a step.
    ``lstm``: ``fused`` is torch's own, ``loop`` a loop over frames (devices without a fused one, and
    bf16 on CPU, where the fused one's backward is slower than in fp32).
    """

    static: bool = False
    lstm: str = "fused"


class Adaptive(ABC):
    """A block with several forms; checkpoints do not depend on which is used."""

    @abstractmethod
    def adapt(self, forms: Forms) -> None:
        """Compute as ``forms`` says from now on."""


def adapt(module: nn.Module, forms: Forms) -> None:
    """Tell every adaptive block of ``module``, itself included."""
    for block in module.modules():
        if isinstance(block, Adaptive):
            block.adapt(forms)


def times(scalar: Tensor, factor: float) -> Tensor:
    """A scalar tensor () by a number, in the tensor's dtype: lazy tensors would make the product fp64."""
    return scalar * torch.full_like(scalar, factor)
