"""The state of autocast, by one interface for all devices; lazy tensors, for example, have no autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """A context without autocast."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast gives matrix products at this point; None where autocast is off."""
    kind = device.type
    is_on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_on else None


def at_least_fp32(x: Tensor) -> Tensor:
    """``x`` as fp32; an fp64 ``x`` stays fp64."""
    return x if x.dtype == torch.float64 else x.float()
