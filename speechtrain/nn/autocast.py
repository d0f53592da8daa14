"""What autocast is doing, asked in one way on all devices; some, as lazy tensors, have none."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """A context without autocast."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast makes of matrix products here and now; None where it is off."""
    kind = device.type
    is_on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_on else None


def at_least_fp32(x: Tensor) -> Tensor:
    """fp32, or fp64 where it is that already."""
    return x if x.dtype == torch.float64 else x.float()
