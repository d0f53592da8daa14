"""Computing in fp32 or wider in every run, for every setting of ``precision``.

Tensors are fp32 or wider, but matmuls and convolutions may round their inputs to fewer bits
(``ComputePolicy.fp32_matmul``). On CUDA this rounding is the default unless ``precision`` is fp32.
``device.tf32=false`` prevents the rounding.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Return a context without autocast. Some devices, such as lazy ones, do not have autocast."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def at_least_fp32(x: Tensor) -> Tensor:
    """Return ``x`` in fp32, or in fp64 if it is fp64."""
    return x if x.dtype == torch.float64 else x.float()
