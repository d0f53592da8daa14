"""Activation checkpointing (Chen et al., 2016).

For the repeated layers of a model, forward stores only their inputs. Backward computes the activations again.
"""

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
    """Change the units of ``module``, which ``shard_units`` names, so that backward computes them again.

    Losses, gradients and buffers are bit-equal to a run without this change, because the second computation
    has the random numbers, autocast and buffers of the first one. State keys do not change. Raises
    ConfigError for a module without units.
    """
    units = units_of(module)
    if not units:
        raise ConfigError(
            f"trainer.checkpoint_layers=true: no part of {type(module).__name__} names repeated layers in "
            "shard_units. Set trainer.checkpoint_layers=false"
        )
    for unit in dict.fromkeys(units):  # A unit may be in several modules.
        # The class is replaced, because an attribute ``forward`` would bind the weights of this module, also
        # in a copy of the module.
        cls = type(unit)
        unit.__class__ = type(cls.__name__, (_Checkpointed, cls), {"__module__": cls.__module__})


class _Checkpointed(nn.Module):
    """The first base class of a changed unit. Its ``forward`` checkpoints the unit's own ``forward``."""

    def forward(self, *inputs: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().forward(*inputs, **options)
        buffers = {name: buffer.clone() for name, buffer in self.named_buffers(remove_duplicate=False)}

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            """Return the contexts of the first and of the second computation."""
            return nullcontext(), _with_buffers(self, buffers)

        return checkpoint(super().forward, *inputs, use_reentrant=False, context_fn=contexts, **options)


@contextmanager
def _with_buffers(module: nn.Module, buffers: dict[str, Tensor]) -> Iterator[None]:
    """Return a context in which ``module`` has other ``buffers``. A computation in it changes only these."""
    module_buffers = dict(module.named_buffers(remove_duplicate=False))
    try:
        _set_buffers(module, buffers)
        yield
    finally:
        _set_buffers(module, module_buffers)


def _set_buffers(module: nn.Module, buffers: dict[str, Tensor]) -> None:
    for path, buffer in buffers.items():
        owner, _, name = path.rpartition(".")
        setattr(module.get_submodule(owner), name, buffer)
