"""Computing in fp32 or wider in every run, whatever its precision.

The type is fp32, but matmuls and convolutions may round their inputs (``ComputePolicy.fp32_matmul``). On CUDA
this is the default unless precision is fp32. ``device.tf32=false`` prevents it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Return a context without autocast. Some devices, such as lazy ones, have none."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def at_least_fp32(x: Tensor) -> Tensor:
    """Return ``x`` as fp32. An fp64 ``x`` stays fp64."""
    return x if x.dtype == torch.float64 else x.float()
