"""What the optimizers here share: the ranges of their settings, and a norm without host reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raises ValueError naming the first setting out of its range."""
    for name in ("lr", "eps", "weight_decay"):
        if not settings[name] >= 0:
            raise ValueError(f"{name} is {settings[name]}; it must be 0 or above")
    betas = settings["betas"]
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas are {list(betas)}; they are two numbers from 0 to below 1")


def dense_gradients(group: Mapping[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Each parameter of a group that has a gradient, with it. Raises ValueError for a sparse one."""
    pairs = [(p, p.grad) for p in group["params"] if p.grad is not None]
    if any(gradient.is_sparse for _, gradient in pairs):
        raise ValueError("sparse gradients are not supported; use embeddings with sparse=False")
    return pairs


def squared_norm(tensor: Tensor) -> Tensor:
    """The squared Euclidean norm, a scalar tensor of fp32 at least.

    Spelt out: ``vector_norm`` leaves the graph on the lazy rehearsal device.
    """
    wide = tensor if tensor.dtype == torch.float64 else tensor.float()
    return (wide * wide).sum()
