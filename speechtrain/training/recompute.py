"""Activation checkpointing: the repeated layers of a model keep their inputs only, and backward computes the
rest again (Chen et al., 2016)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
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
        first = {name: buffer.clone() for name, buffer in self.named_buffers(remove_duplicate=False)}

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            return nullcontext(), _with_buffers(self, first)

        return checkpoint(super().forward, *inputs, use_reentrant=False, context_fn=contexts, **options)


@contextmanager
def _with_buffers(module: nn.Module, buffers: dict[str, Tensor]) -> Iterator[None]:
    """Let a second computation have other ``buffers``, and change those only."""
    former = dict(module.named_buffers(remove_duplicate=False))
    try:
        _set_buffers(module, buffers)
        yield
    finally:
        _set_buffers(module, former)


def _set_buffers(module: nn.Module, buffers: dict[str, Tensor]) -> None:
    for path, buffer in buffers.items():
        owner, _, name = path.rpartition(".")
        setattr(module.get_submodule(owner), name, buffer)
