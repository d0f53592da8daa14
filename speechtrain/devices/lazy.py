"""The rehearsal device: PyTorch's lazy tensors on the CPU, which record graphs as Gaudi's lazy mode does."""

from __future__ import annotations

import resource
from typing import ClassVar

import torch
from torch import Tensor

from speechtrain.batch import Batch
from speechtrain.compute_policy import ComputePolicy
from speechtrain.devices.base import Device
from speechtrain.errors import MachineError, first_line

ALLOWED = {
    "aten::copy": "a tensor copied to another (an average swapped in for an evaluation): not within a step",
}
"""Operations that this backend runs on the CPU although a lazy device can run them; with the reason."""


class Lazy(Device):
    """Records graphs, cuts them at ``mark_step``, compiles each distinct graph once, runs it on the CPU.

    It shows on any machine that a recipe is fit for a lazy device: ``graphs`` stays constant after the
    first steps, and ``fallbacks`` names the operations that left the graph.
    """

    name = "lazy"
    collectives = "gloo"
    static_shapes = True
    optimizer_flags: ClassVar = {"fused": False, "foreach": False}

    def environment(self, processes: int) -> dict[str, str]:
        return {}

    def open(self, local_rank: int) -> None:
        try:
            import torch._lazy
            import torch._lazy.ts_backend

            torch._lazy.ts_backend.init()  # type: ignore[no-untyped-call]
        except (ImportError, RuntimeError) as error:
            reason = f"this torch has no lazy tensors ({first_line(error)})"
            raise MachineError(f"device=lazy: {reason}; use device=cpu") from None

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype == torch.float32

    def policy(self, dtype: torch.dtype) -> ComputePolicy:
        return ComputePolicy(static=True, lstm="loop")

    def tensor(self, value: Tensor) -> Tensor:
        return value.contiguous().to("lazy")

    def move(self, batch: Batch) -> Batch:
        return batch.to(self.tensor)

    def mark_step(self) -> None:
        import torch._lazy

        torch._lazy.mark_step()

    def synchronize(self) -> None:
        import torch._lazy

        torch._lazy.mark_step()
        torch._lazy.wait_device_ops()  # type: ignore[no-untyped-call]

    def memory(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def graphs(self) -> int:
        return self._counters().get("UncachedCompile", 0)

    def counts(self) -> dict[str, int]:
        cached = self._counters().get("CachedCompile", 0)
        return {"graphs": self.graphs(), "cache_hits": cached, "fallbacks": sum(self.fallbacks().values())}

    def fallbacks(self) -> dict[str, int]:
        """Operations so far, except those in ``ALLOWED``, that ran on the CPU and ended the graph.

        A number that the host reads is ``aten::_local_scalar_dense``.
        """
        counters = self._counters().items()
        return {name: n for name, n in counters if name.startswith("aten::") and name not in ALLOWED}

    @staticmethod
    def _counters() -> dict[str, int]:
        from torch._lazy import metrics

        names: list[str] = metrics.counter_names()  # type: ignore[no-untyped-call]
        return {name: int(metrics.counter_value(name) or 0) for name in names}
