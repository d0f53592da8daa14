"""Intel Gaudi through the vendor's bridge: graphs in lazy mode, or eager, or torch.compile."""

from __future__ import annotations

import importlib
import importlib.util
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from speechtrain.devices.base import Device, DeviceFacts, Prepared
from speechtrain.errors import MachineError, one_line

_PACKAGE = "habana_frameworks"
_REHEARSAL = "device=lazy rehearses its lazy mode here, speechtrain-doctor device=hpu checks the recipe"
_ADVICE = (
    "it comes with the vendor's container (vault.habana.ai/gaudi-docker) or as habana-torch-plugin; "
    f"{_REHEARSAL}"
)
_LOWER, _FP32 = "PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST", "PT_HPU_AUTOCAST_FP32_OPS_LIST"
_MODES = {"lazy": "1", "eager": "0", "compile": "0"}
# the lists of the wav2vec 2.0 port to Gaudi, without `iadd` (can only be promoted now); softmax in fp32
_BF16_OPS = ("addmm", "linear", "matmul", "mm", "mv", "conv1d", "conv2d", "instance_norm")
_FP32_OPS = ("embedding", "nll_loss", "log_softmax", "softmax")


@dataclass(eq=False)
class HPU(Device):
    """One Gaudi card for each process.

    ``mode``: ``lazy`` records graphs, which ``mark_step`` cuts and runs, and compiles each distinct graph
    once; ``compile``, which the vendor now prefers, uses ``torch.compile``; ``eager`` runs single operations.

    ``recipe_cache`` is a local folder that keeps compiled graphs after the process, up to
    ``recipe_cache_mib``; null keeps none. ``graphs_kept``: compiled graphs in host memory.

    ``bf16_ops`` and ``fp32_ops``: operations that autocast computes in bf16 and in fp32, in place of the
    vendor's lists; null keeps the vendor's.
    """

    name = "hpu"
    static_shapes = True
    facts = DeviceFacts(
        collectives={"cpu": "gloo", "hpu": "hccl"},
        sum_dtype=torch.float32,
        network_variables=("GLOO_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME"),
        forwarded_variables=("HCCL_*", "HABANA_*", "PT_HPU_*"),
        peer_lost="gloo|hccl|distbackend",
        optimizer_flags={"fused": False, "foreach": False},
        fsdp=False,
        packages=(_PACKAGE,),
    )

    mode: str = "lazy"
    recipe_cache: str | None = None
    recipe_cache_mib: int = 1024
    graphs_kept: int = 100_000
    bf16_ops: list[str] | None = field(default_factory=lambda: list(_BF16_OPS))
    fp32_ops: list[str] | None = field(default_factory=lambda: list(_FP32_OPS))

    def __post_init__(self) -> None:
        if self.mode not in _MODES:
            raise ValueError(f"mode is {self.mode!r}; it is one of {', '.join(_MODES)}")
        for key in ("recipe_cache_mib", "graphs_kept"):
            if (value := getattr(self, key)) < 1:
                raise ValueError(f"{key} is {value}; it is at least 1")
        if self.recipe_cache is not None and "," in self.recipe_cache:
            raise ValueError(f"recipe_cache is {self.recipe_cache!r}; choose a path without a comma")
        both = sorted(set(self.bf16_ops or ()) & set(self.fp32_ops or ()))
        if both:
            raise ValueError(f"bf16_ops and fp32_ops both name {both[0]}; keep it in one")
        self._core: Any = None
        self._hpu: Any = None

    # --- before Python starts -------------------------------------------------------------------

    def environment(self, processes: int) -> dict[str, str]:
        variables = {"PT_HPU_LAZY_MODE": _MODES[self.mode], "HABANA_PGM_LRU_MAX": str(self.graphs_kept)}
        if self.mode == "lazy":  # weights keep torch's order, as in the port to Gaudi
            variables["PT_HPU_ENABLE_SYNAPSE_OUTPUT_PERMUTE"] = "0"
            variables["PT_HPU_ENABLE_WEIGHT_CPU_PERMUTE"] = "0"
        if self.recipe_cache is not None:  # path, cleared at the start, MiB, on NFS
            cache = f"{self.recipe_cache},false,{self.recipe_cache_mib},false"
            variables["PT_HPU_RECIPE_CACHE_CONFIG"] = cache
        return variables

    def check(self, processes: int) -> None:
        if importlib.util.find_spec(_PACKAGE) is None:
            raise MachineError(f"device=hpu: {_PACKAGE} is not installed here; {_ADVICE}")

    def validate_shapes(self, shapes: Sequence[tuple[int, int, int]]) -> None:
        if self.mode != "eager":
            super().validate_shapes(shapes)

    # --- at the start -----------------------------------------------------------------------------

    def open(self, local_rank: int) -> None:
        self.check(1)
        modules = [f"{_PACKAGE}.torch.core", f"{_PACKAGE}.torch.hpu"]
        if "LOCAL_RANK" in os.environ:  # several ranks: alone, its import would set a world in environ
            os.environ.setdefault("ID", str(local_rank))  # older bridges choose the card by ID
            modules.append(f"{_PACKAGE}.torch.distributed.hccl")
        # the vendor's library reads these files when it is loaded
        for variable, operations in ((_LOWER, self.bf16_ops), (_FP32, self.fp32_ops)):
            if operations is not None and variable not in os.environ:
                os.environ[variable] = _listed(variable, operations)
        try:
            self._core, self._hpu = [importlib.import_module(name) for name in modules][:2]
        except Exception as error:  # another torch, a missing driver, or any other cause
            problem = one_line(str(error), 200)
            raise MachineError(f"device=hpu: {_PACKAGE} does not load ({problem}); {_ADVICE}") from None
        cards = int(self._hpu.device_count()) if self._hpu.is_available() else 0
        if local_rank >= cards:
            raise MachineError(
                f"device=hpu: local rank {local_rank} finds {cards} Gaudi cards on this host (hl-smi lists "
                f"them); lower world_size to that number; {_REHEARSAL}"
            )

    def prepare(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> Prepared:
        if self.mode == "compile":
            module.compile(backend="hpu_backend")
        return module, optimizer

    # --- while training ---------------------------------------------------------------------------

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.float32, torch.bfloat16)

    def mark_step(self) -> None:
        if self.mode == "lazy":
            self._core.mark_step()

    def synchronize(self) -> None:
        self.mark_step()
        self._hpu.synchronize()

    def memory(self) -> int:
        return int(self._hpu.max_memory_allocated())

    def graphs(self) -> int:
        if self._hpu is None:  # not opened yet
            return 0
        metrics = importlib.import_module(f"{_PACKAGE}.torch.hpu.metrics")
        counters: dict[str, int] = dict(metrics.metric_global("graph_compilation").stats())
        return int(counters["TotalNumber"])


def _listed(variable: str, operations: Sequence[str]) -> str:
    """A new file of one operation per line, which the vendor's library reads."""
    handle, name = tempfile.mkstemp(prefix=f"speechtrain-{variable.lower()}-", suffix=".txt")
    with os.fdopen(handle, "w") as file:
        file.writelines(f"{operation}\n" for operation in operations)
    return name
