"""Intel Gaudi through the vendor's bridge: graphs in lazy mode, or eager, or torch.compile."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from speechtrain.compute_policy import ComputePolicy
from speechtrain.devices import host
from speechtrain.devices.base import DeviceFacts
from speechtrain.devices.static import StaticDevice
from speechtrain.errors import MachineError, one_line, require_least
from speechtrain.files import read_bytes

_PACKAGE = "habana_frameworks"
_REHEARSAL = "device=lazy rehearses its lazy mode here, and tools/rehearsal/run.py of a clone the recipe"
_KEPT_TORCH = "Use the vendor's image, and install with pip's --no-deps or -c (docs/devices.md)"
_ADVICE = f"It comes with the vendor's container (vault.habana.ai/gaudi-docker). {_REHEARSAL}"
_LOWER, _FP32 = "PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST", "PT_HPU_AUTOCAST_FP32_OPS_LIST"
_MODES = {"lazy": "1", "eager": "0", "compile": "0"}
# The lists of the wav2vec 2.0 port to Gaudi, without `iadd` (which can only be promoted now) and with
# softmax in fp32.
_BF16_OPS = ("addmm", "linear", "matmul", "mm", "mv", "conv1d", "conv2d", "instance_norm")
_FP32_OPS = ("embedding", "nll_loss", "log_softmax", "softmax")

# From the vendor's support matrix, from 1.20 on with the names of its images. docs/devices.md has the same
# table with the images, Python versions and chips.
_TORCH_OF_RELEASE = {
    "1.17": "2.3",
    "1.18": "2.4",
    "1.19": "2.5",
    "1.20": "2.6",
    "1.21": "2.6",
    "1.22": "2.7",
    "1.23": "2.9",
    "1.24.0": "2.10",
    "1.24.1": "2.11",
}


def has_card(folder: Path) -> bool:
    """Return whether the folder of device files has one that the vendor's driver makes for each card."""
    return any([*folder.glob("accel/accel[0-9]*"), *folder.glob("hl[0-9]*")])


@dataclass(eq=False)
class HPU(StaticDevice):
    """One Gaudi card for each process.

    ``mode`` is one of:

    - ``lazy``: graphs are recorded, and ``mark_step`` cuts and runs them. Each distinct graph is compiled
      once.
    - ``compile``: ``torch.compile``, which the vendor now prefers.
    - ``eager``: single operations run.

    ``recipe_cache`` is a local folder that keeps compiled graphs after the process, up to
    ``recipe_cache_mib``. Null keeps no graphs. ``graphs_kept`` compiled graphs stay in host memory.

    ``bf16_ops`` and ``fp32_ops`` are the operations that autocast computes in bf16 and in fp32. They replace
    the vendor's lists. Null keeps the vendor's list.
    """

    name = "hpu"
    facts = DeviceFacts(
        collectives={"hpu": "hccl"},  # without cpu, as in all of the vendor's code
        # In lazy mode each bucket ends a graph. Therefore there are few large buckets, as in optimum-habana.
        ddp_options={"gradient_as_bucket_view": True, "bucket_cap_mb": 230},
        out_of_memory=f"{DeviceFacts.out_of_memory}|PT_DEVMEM|allocation failed for size",
        sum_dtype=torch.float32,
        network_variables=("GLOO_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME"),
        forwarded_variables=("HCCL_*", "HABANA_*", "PT_HPU_*"),
        peer_lost="gloo|hccl|distbackend",
        optimizer_flags={"fused": False, "foreach": False},
        fsdp=False,
        host_gib=64,  # the port of wav2vec 2.0 to Gaudi has 512 GB for 8 cards
        packages=(_PACKAGE,),
        plugin="habana-torch-plugin",
        plugin_torch=_TORCH_OF_RELEASE,
    )

    mode: str = "lazy"
    recipe_cache: str | None = None
    recipe_cache_mib: int = 1024
    graphs_kept: int = 100_000
    bf16_ops: list[str] | None = field(default_factory=lambda: list(_BF16_OPS))
    fp32_ops: list[str] | None = field(default_factory=lambda: list(_FP32_OPS))

    def __post_init__(self) -> None:
        if self.mode not in _MODES:
            raise ValueError(f"mode is {self.mode!r}. It must be one of {', '.join(_MODES)}")
        require_least(1, recipe_cache_mib=self.recipe_cache_mib, graphs_kept=self.graphs_kept)
        if self.recipe_cache is not None and "," in self.recipe_cache:
            raise ValueError(f"recipe_cache is {self.recipe_cache!r}. Choose a path without a comma")
        duplicates = sorted(set(self.bf16_ops or ()) & set(self.fp32_ops or ()))
        if duplicates:
            raise ValueError(f"bf16_ops and fp32_ops both name {duplicates[0]}. Keep it in one of them")
        self._core: Any = None
        self._hpu: Any = None
        self._ctc: Any = None

    # --- before Python starts -------------------------------------------------------------------

    def environment(self, processes: int) -> dict[str, str]:
        variables = {"PT_HPU_LAZY_MODE": _MODES[self.mode], "HABANA_PGM_LRU_MAX": str(self.graphs_kept)}
        # Otherwise the import of torch would load the bridge before `open` has written autocast's lists and
        # before a rank knows its card.
        variables |= {"PT_HPU_AUTOLOAD": "0", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        # torchrun would set one thread, and the host decodes
        variables["OMP_NUM_THREADS"] = str(host.threads(processes))
        if self.mode == "lazy":  # weights keep torch's order, as in the port to Gaudi
            variables["PT_HPU_ENABLE_SYNAPSE_OUTPUT_PERMUTE"] = "0"
            variables["PT_HPU_ENABLE_WEIGHT_CPU_PERMUTE"] = "0"
        # The path, whether it is cleared at the start, and MiB. Bridges up to 1.19 refuse a fourth field.
        if self.recipe_cache is not None:
            variables["PT_HPU_RECIPE_CACHE_CONFIG"] = f"{self.recipe_cache},false,{self.recipe_cache_mib}"
        return variables

    def check(self, processes: int) -> None:
        if importlib.util.find_spec(_PACKAGE) is None:
            raise MachineError(f"device=hpu: {_PACKAGE} is not installed here. {_ADVICE}")
        fault = self.library_fault()
        if fault:
            raise MachineError(f"device=hpu: {fault}")

    def library_fault(self) -> str:
        required, installed = _required_torch(), torch.__version__
        if required and not f"{installed}.".startswith(f"{required}."):
            line = f"the bridge is built for torch {required}, and torch {installed} has replaced it"
            return f"{line}. {_KEPT_TORCH}"
        # The versions of the vendor's builds end in +git… or +hpu…, and the bridge looks at this, too.
        if required and self.mode == "lazy" and not installed.partition("+")[2].startswith(("git", "hpu")):
            line = f"torch {installed} is not the vendor's build, and mode=lazy needs that"
            return f"{line}. {_KEPT_TORCH}, or set device.mode=compile"
        return ""

    def obstacle(self) -> str:
        if importlib.util.find_spec(_PACKAGE) is None:
            return f"{_PACKAGE} is not installed"
        return "" if has_card(Path("/dev")) else "no Gaudi card"

    def validate_shapes(self, shapes: Sequence[tuple[int, int, int]]) -> None:
        if self.mode != "eager":
            super().validate_shapes(shapes)

    # --- at the start -----------------------------------------------------------------------------

    def open(self, local_rank: int = 0) -> None:
        self.check(1)
        modules = [f"{_PACKAGE}.torch.core", f"{_PACKAGE}.torch.hpu"]
        if "LOCAL_RANK" in os.environ:  # for a single rank, the import of hccl would set a world in environ
            os.environ.setdefault("ID", str(local_rank))  # older bridges choose the card by ID
            modules.append(f"{_PACKAGE}.torch.distributed.hccl")
        # The vendor's library reads these files when it is loaded.
        for variable, operations in ((_LOWER, self.bf16_ops), (_FP32, self.fp32_ops)):
            if operations is not None and variable not in os.environ:
                os.environ[variable] = _write_operations(variable, operations)
        try:
            self._core, self._hpu = [importlib.import_module(name) for name in modules][:2]
        except Exception as error:  # another torch, a missing driver, or any other cause
            problem = one_line(str(error), 200)
            raise MachineError(f"device=hpu: {_PACKAGE} does not load ({problem}). {_ADVICE}") from None
        with contextlib.suppress(ImportError, AttributeError):  # one node of a graph, from Synapse 1.15 on
            self._ctc = importlib.import_module(f"{_PACKAGE}.torch.hpex.kernels").CTCLoss.apply
        cards = int(self._hpu.device_count()) if self._hpu.is_available() else 0
        if local_rank >= cards:
            raise MachineError(
                f"device=hpu: local rank {local_rank} finds {cards} Gaudi cards on this host (hl-smi lists "
                f"them). Lower world_size to that number. {_REHEARSAL}"
            )

    # --- while training ---------------------------------------------------------------------------

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.float32, torch.bfloat16)

    def policy(self, dtype: torch.dtype) -> ComputePolicy:
        # 80 frames keep graphs below 3,000 operations. XLA compiled an unrolled LSTM of 136,000 for minutes.
        segment = 80 if self.mode == "lazy" else 0
        compiler = "hpu_backend" if self.mode == "compile" else ""
        policy = replace(super().policy(dtype), lattice_cells=65536, lstm_segment=segment, compiler=compiler)
        return policy if self._ctc is None else replace(policy, ctc="vendor", ctc_kernel=self._ctc)

    def precision_fallback_reason(self, dtype: torch.dtype) -> str:
        if dtype != torch.float32:
            return ""
        return "the published wav2vec 2.0 port runs out of one card's memory in fp32. Use precision=bf16"

    def mark_step(self) -> None:
        if self.mode == "lazy":
            self._core.mark_step()

    def synchronize(self) -> None:
        self.mark_step()
        self._hpu.synchronize()

    def memory(self) -> int:
        return int(self._hpu.max_memory_allocated())

    def counts(self) -> dict[str, int]:
        return {
            "graphs": self.graphs(),
            "fallbacks": self._total("cpu_fallback"),
            "defragmentations": self._total("memory_defragmentation"),
        }

    def graphs(self) -> int:
        return self._total("graph_compilation")

    def _total(self, metric: str) -> int:
        if self._hpu is None:  # not opened yet
            return 0
        metrics = importlib.import_module(f"{_PACKAGE}.torch.hpu.metrics")
        counters: dict[str, Any] = dict(metrics.metric_global(metric).stats())
        return int(counters["TotalNumber"])


def _required_torch() -> str:
    """Return the major and minor version of torch that the installed bridge needs, or an empty text.

    The bridge stores the version in a file. Otherwise the version of the plugin says it. Nothing is imported.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        with contextlib.suppress(OSError, UnicodeDecodeError):
            file = Path(folder) / "torch" / "required_version.txt"
            return ".".join(read_bytes(file, follow=True).decode().strip().split(".")[:2])
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version(HPU.facts.plugin)
        for release, torch_version in _TORCH_OF_RELEASE.items():
            if f"{version}.".startswith(f"{release}."):
                return torch_version
    return ""


def _write_operations(variable: str, operations: Sequence[str]) -> str:
    """Write a new file of one operation per line for the vendor's library. Returns its path."""
    handle, name = tempfile.mkstemp(prefix=f"speechtrain-{variable.lower()}-", suffix=".txt")
    with os.fdopen(handle, "w") as file:
        file.writelines(f"{operation}\n" for operation in operations)
    return name
