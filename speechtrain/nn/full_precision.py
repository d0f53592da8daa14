"""Blocks that compute in fp32 or wider whatever the precision of a run is."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """A context without autocast; lazy tensors, for example, have none."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def at_least_fp32(x: Tensor) -> Tensor:
    """``x`` as fp32; an fp64 ``x`` stays fp64."""
    return x if x.dtype == torch.float64 else x.float()
