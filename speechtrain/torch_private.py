"""The private functions and classes of torch that this package uses. All of them are listed here.

A private part is looked up at its first use. If a version of torch lacks it, the error names the part and the
version. So the package requires no maximum version of torch, which vendors' images decide. All parts were
checked with torch 2.7 to 2.14.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    # A backend of torch.compile for forward and backward, and the number of the function that is compiled.
    "aot_autograd": "torch._dynamo.backends.common.aot_autograd",
    "make_boxed_func": "functorch.compile.make_boxed_func",
    "compile_id": "torch._guards.CompileContext.current_compile_id",
    # Interception of each operation below autograd. The number of an autograd node connects an operation of
    # the backward pass with the operation of the forward pass.
    "TorchDispatchMode": "torch.utils._python_dispatch.TorchDispatchMode",
    "autograd_node": "torch._C._current_autograd_node",
    "next_node_number": "torch.autograd._get_sequence_nr",
    # The method through which each change of the device or dtype of a module's tensors goes.
    "apply": "torch.nn.Module._apply",
    # A device without kernels, and tensors without values (rank/fake_step.py).
    "register_python_backend": ("torch.utils.backend_registration._setup_privateuseone_for_python_backend"),
    "FakeTensorMode": "torch._subclasses.fake_tensor.FakeTensorMode",
    "without_fake_mode": "torch._subclasses.fake_tensor.unset_fake_temporarily",
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


def backward_node() -> int | None:
    """Return the number of the autograd node whose backward runs in this thread, or None outside backward."""
    node = _part("torch._C._current_autograd_node")()
    return None if node is None else int(node._sequence_nr())


class MovedModule(nn.Module):
    """A module whose ``after_move`` is called after each change of the device or dtype of its tensors."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.after_move()
        return self

    def after_move(self) -> None:
        """Adjust tensors that depend on device or dtype. Subclasses override this."""


@contextmanager
def replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Return a context in which ``function`` replaces the attribute ``name`` of torch or its class ``owner``.

    It intercepts calls in a Python function of a backward pass also, where modes of torch are not active.
    """
    original_function = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, original_function)
