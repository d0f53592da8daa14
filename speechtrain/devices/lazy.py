"""A device for rehearsals: PyTorch's lazy tensors on the CPU. They record graphs like Gaudi's lazy mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from speechtrain import torch_private
from speechtrain.devices.base import DeviceFacts
from speechtrain.devices.static import StaticDevice
from speechtrain.errors import MachineError, first_line


def _where(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    a, b = torch.broadcast_tensors(a, b)  # type: ignore[no-untyped-call]
    dtype = torch.promote_types(a.dtype, b.dtype)
    # Multiplying by 0 instead of masking would turn infinite values into NaN.
    selected_a = a.to(dtype).masked_fill(condition == 0, 0)
    selected_b = b.to(dtype).masked_fill(condition, 0)
    return selected_a + selected_b


def _bitwise_not(x: Tensor) -> Tensor:
    return x == 0 if x.dtype == torch.bool else -1 - x


def _bitwise_xor(a: Tensor, b: Tensor) -> Tensor:
    return a != b if a.dtype == torch.bool else a + b - 2 * (a & b)


DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    "argmax": lambda x, dim, keepdim=False: x.max(dim, keepdim).indices,
    "bitwise_not": _bitwise_not,
    "bitwise_xor.Tensor": _bitwise_xor,
    "bitwise_right_shift.Tensor_Scalar": lambda x, n: torch.div(x, 2**n, rounding_mode="floor"),
    "lerp.Scalar": lambda x, end, weight: x + (end - x) * weight,
    "logaddexp": lambda a, b: torch.maximum(a, b) + F.softplus(-(a - b).abs()),
    "unbind_copy.int": lambda x, dim=0: [x.select(dim, index) for index in range(x.shape[dim])],
    "where.self": _where,
}
"""Implementations of operations by other operations that torch's lazy backend can record, by ATen's names.

Without them, these operations would end the graph and run on the CPU.
"""

ALLOWED = {"aten::copy": "An evaluation copies averaged weights into the model. Training steps do not copy."}
"""Operations without a decomposition that may run on the CPU, each with the reason."""

# The library of the decompositions after ``open``. They are registered as long as the object exists.
_LIBRARY: list[torch.library.Library] = []


@dataclass(eq=False)
class Lazy(StaticDevice):
    """Records graphs of operations, ends them at ``mark_step``, and runs them on the CPU.

    Each distinct graph is compiled once. So this device shows on any machine whether a recipe suits a lazy
    device: the count ``graphs`` stays constant after the warm-up, and ``fallbacks`` stays 0. The count
    ``fallbacks`` is the number of operations that ended a graph. Only one process is supported.
    ``oversubscribe`` has the same meaning as in ``CPU``.
    """

    name = "lazy"
    on_host = True
    facts = DeviceFacts(
        collectives={"cpu": "gloo", "lazy": "gloo"},
        sum_dtype=torch.float32,
        optimizer_flags={"fused": False, "foreach": False},
        fsdp=False,
        packages=(r"torch\._lazy",),
    )

    oversubscribe: bool = False

    def check(self, processes: int) -> None:
        if processes > 1:  # Without an error, a collective would return each rank its own tensor.
            raise MachineError(
                "device=lazy: torch's collectives do not sum lazy tensors. Set world_size=1, or device=cpu"
            )

    def open(self, local_rank: int = 0) -> None:
        if _LIBRARY:  # torch refuses to start its lazy tensors twice in a process.
            return
        try:
            torch_private.start_lazy()
        except (MachineError, RuntimeError) as error:
            reason = f"this torch has no lazy tensors ({first_line(error)})"
            raise MachineError(f"device=lazy: {reason}. Use device=cpu") from None
        library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        for name, decomposition in DECOMPOSITIONS.items():
            library.impl(name, decomposition, "Lazy")  # type: ignore[no-untyped-call]
        _LIBRARY.append(library)

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype == torch.float32

    def tensor(self, value: Tensor) -> Tensor:
        return value.contiguous().to("lazy")

    def mark_step(self) -> None:
        torch_private.mark_lazy_step()

    def synchronize(self) -> None:
        torch_private.mark_lazy_step()
        torch_private.wait_lazy()

    def graphs(self) -> int:
        return self._counters().get("UncachedCompile", 0)

    def counts(self) -> dict[str, int]:
        cache_hits = self._counters().get("CachedCompile", 0)
        fallback_count = sum(self.fallbacks().values())
        return {"graphs": self.graphs(), "cache_hits": cache_hits, "fallbacks": fallback_count}

    def fallbacks(self) -> dict[str, int]:
        """Return how often each operation ran on the CPU and ended a graph, by its name (``aten::…``).

        The operations in ``ALLOWED`` are left out. ``aten::_local_scalar_dense`` means that the host has read
        a number.
        """
        counts = {}
        for name, count in self._counters().items():
            if name.startswith("aten::") and name not in ALLOWED:
                counts[name] = count
        return counts

    @staticmethod
    def _counters() -> dict[str, int]:
        """Return the counters of torch's lazy backend since the process started."""
        names: list[str] = torch_private.lazy_counter_names()
        return {name: int(torch_private.lazy_counter_value(name) or 0) for name in names}
