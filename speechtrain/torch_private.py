"""The private functions and classes of torch that this package uses. All of them are listed here.

A private part is looked up at its first use. If a version of torch lacks it, the error names the part and the
version. So the package requires no maximum version of torch, which vendors' images decide. All parts were
checked with torch 2.7 to 2.14.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor, nn

from speechtrain.errors import MachineError

_FOREACH = ("add_", "addcdiv_", "addcmul_", "div", "mul", "mul_", "sqrt", "sub", "sub_")
PARTS = {
    # Operations on many tensors in one call. Public operations start a kernel for each tensor.
    **{f"foreach_{name}": f"torch._foreach_{name}" for name in _FOREACH},
    # Matmuls in bf16 with a weight that is reordered once. Public operations reorder it in each call.
    "is_onednn_bf16_supported": "torch.ops.mkldnn._is_mkldnn_bf16_supported",
    "reorder_linear_weight": "torch.ops.mkldnn._reorder_linear_weight",
    "linear_pointwise": "torch.ops.mkldnn._linear_pointwise",
    # torch.compile: the limit for the graphs of a compiled layer, and the number of graphs so far.
    "dynamo_config": "torch._dynamo.config",
    "dynamo_counters": "torch._dynamo.utils.counters",
    # The method through which each change of the device or dtype of a module's tensors goes.
    "apply": "torch.nn.Module._apply",
    # The processes of torchrun.
    "process_context": "torch.distributed.elastic.multiprocessing.PContext",
    # PyTorch's lazy tensors.
    "start_lazy": "torch._lazy.ts_backend.init",
    "mark_lazy_step": "torch._lazy.mark_step",
    "wait_lazy": "torch._lazy.wait_device_ops",
    "lazy_counter_names": "torch._lazy.metrics.counter_names",
    "lazy_counter_value": "torch._lazy.metrics.counter_value",
}
"""The path of each part in torch, by its name as an attribute of this module."""


def __getattr__(name: str) -> Any:
    """Return a part of ``PARTS``. Raises MachineError if this torch lacks it."""
    if name not in PARTS:
        raise AttributeError(f"{__name__} has no {name}")
    return _part(PARTS[name])


@cache
def _part(path: str) -> Any:
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        raise MachineError(f"torch {torch.__version__} has no {path}. Install torch 2.7 to 2.14") from None


def limit_shutdown(seconds: int) -> None:
    """Let torchrun in this process wait at most ``seconds`` for the end of ranks, whatever it would wait."""
    context = _part(PARTS["process_context"])
    close = context.close
    context.close = lambda self, death_sig=None, timeout=0: close(self, death_sig, seconds)


class MovedModule(nn.Module):
    """A module whose ``after_move`` is called after each change of the device or dtype of its tensors."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.after_move()
        return self

    def after_move(self) -> None:
        """Adjust tensors that depend on device or dtype. Subclasses override this."""
