"""Activation checkpointing: the repeated layers of a model keep their inputs only, and backward computes the
rest again (Chen et al., 2016)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from speechtrain.errors import ConfigError
from speechtrain.task import units_of


def checkpoint_layers(module: nn.Module) -> None:
    """Have the units of ``module`` (``shard_units``) computed again in backward.

    Losses, gradients and buffers are bit-equal to those without it: the second computation has the first
    one's random numbers, autocast and buffers. State keys do not change.
    Raises ConfigError for a module without units.
    """
    units = units_of(module)
    if not units:
        raise ConfigError(
            f"trainer.checkpoint_layers=true: no part of {type(module).__name__} names repeated layers in "
            "shard_units; set trainer.checkpoint_layers=false"
        )
    for unit in dict.fromkeys(units):
        # a class and no attribute: a copy of the module then computes with its own weights
        cls = type(unit)
        unit.__class__ = type(cls.__name__, (_Checkpointed, cls), {"__module__": cls.__module__})


class _Checkpointed(nn.Module):
    def forward(self, *inputs: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().forward(*inputs, **options)
        owners = [module._buffers for module in self.modules()]
        first = [{name: b if b is None else b.clone() for name, b in each.items()} for each in owners]

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            return nullcontext(), _buffers(owners, first)

        return checkpoint(super().forward, *inputs, use_reentrant=False, context_fn=contexts, **options)


@contextmanager
def _buffers(owners: list[dict[str, Any]], first: list[dict[str, Any]]) -> Iterator[None]:
    """Let a second computation have the buffers' ``first`` values, and change those copies only."""
    own = [dict(each) for each in owners]
    try:
        for each, values in zip(owners, first, strict=True):
            each.update(values)
        yield
    finally:
        for each, values in zip(owners, own, strict=True):
            each.update(values)
