"""What autograd keeps of a forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def stored_bytes(module: nn.Module, *inputs: Any) -> tuple[int, Any]:
    """Return the bytes of the tensors that a forward keeps for backward, without weights, and its result."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    stored: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            stored[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = module(*inputs)
    return sum(tensor.untyped_storage().nbytes() for tensor in stored.values()), result
