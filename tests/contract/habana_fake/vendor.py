"""A recording stand-in for the vendor's package: strict about names and arguments, each with its address.

Whatever ``device=hpu`` calls, sets or names must stand in ``NAMES`` or ``VARIABLES``, with the page of the
vendor, or the public code, that says so. An unknown name or a wrong argument raises.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

_API = "https://docs.habana.ai/en/latest/PyTorch/Reference/Python_Packages.html"
_FLAGS = "https://docs.habana.ai/en/latest/PyTorch/Runtime_Flags.html"
_OLD_FLAGS = "https://docs.habana.ai/en/v1.10.0/PyTorch/Runtime_Flags.html"
_AUTOCAST = "https://docs.habana.ai/en/latest/PyTorch/PyTorch_Mixed_Precision/Autocast.html"
_HCCL = (
    "https://docs.habana.ai/en/latest/PyTorch/PyTorch_Scaling_Guide/Distributed_Backend_Initialization.html"
)
_MODES = "https://docs.habana.ai/en/latest/PyTorch/PyTorch_Gaudi_Theory_of_Operations.html"
_PORT = (
    "https://github.com/HabanaAI/Model-References/blob/8aa1321186fd0b4843775bb3aea478a65be6296c"
    "/PyTorch/audio/wav2vec2/fairseq/README.md"
)
_BRIDGE = (
    "https://github.com/HabanaAI/gaudi-pytorch-bridge/blob/0f6038ccd19e49f8148d377bf13d76d4f8bec858"
    "/python_packages/habana_frameworks/torch/distributed/hccl/__init__.py"
)
_SOURCE = "https://github.com/HabanaAI/gaudi-pytorch-bridge/blob/1.19.0"
_MEMORY = f"{_SOURCE}/backend/habana_device/device_memory.cpp"
_SAVE = f"{_SOURCE}/python_packages/habana_frameworks/torch/core/torch_overwrites.py"
_LISTS = f"{_SOURCE}/habana_helpers/autocast_helpers.h"
_AUTOLOAD = "https://github.com/pytorch/pytorch/blob/v2.13.0/docs/source/backends.md"
_CTC = f"{_SOURCE}/python_packages/habana_frameworks/torch/hpex/kernels/ctc_loss.py"
_TORCH = (
    "https://github.com/HabanaAI/gaudi-pytorch-bridge/blob/01cb156cfbdbcf405cf95bea811c48bb2fd65e6f"
    "/python_packages/habana_frameworks/torch/__init__.py"
)
_OPTIMUM = "https://github.com/huggingface/optimum-habana/blob/main/examples/language-modeling/README.md"


@dataclass(frozen=True)
class Name:
    """One function: the types of its arguments, what it returns here, and who says that it exists."""

    address: str
    takes: tuple[type, ...] = ()
    returns: Callable[..., Any] = lambda *_: None


class Metric:
    """What ``metric_global`` returns: ``stats`` lists pairs of a counter's name and its value."""

    def stats(self) -> list[tuple[str, Any]]:
        return [("TotalNumber", 7), ("TotalTime", 70_000), ("AvgTime", 10_000.0)]


METRICS = dict.fromkeys(("graph_compilation", "cpu_fallback", "memory_defragmentation"), Metric())

MODULES = {
    "habana_frameworks": _API,
    "habana_frameworks.torch": _API,
    "habana_frameworks.torch.core": _MODES,
    "habana_frameworks.torch.hpu": f"{_API}#hpu-apis",
    "habana_frameworks.torch.hpu.metrics": f"{_API}#metric-apis",
    "habana_frameworks.torch.hpex": _CTC,
    "habana_frameworks.torch.hpex.kernels": _CTC,
    "habana_frameworks.torch.distributed": _HCCL,
    "habana_frameworks.torch.distributed.hccl": _HCCL,
}

NAMES = {
    "habana_frameworks.torch.core.mark_step": Name(_MODES),
    "habana_frameworks.torch.hpu.is_available": Name(f"{_API}#hpu-apis", returns=lambda: True),
    "habana_frameworks.torch.hpu.device_count": Name(f"{_API}#hpu-apis", returns=lambda: 8),
    "habana_frameworks.torch.hpu.synchronize": Name(f"{_API}#hpu-apis"),
    "habana_frameworks.torch.hpu.max_memory_allocated": Name(
        f"{_API}#memory-stats-apis", returns=lambda: 1 << 20
    ),
    "habana_frameworks.torch.hpu.metrics.metric_global": Name(
        f"{_API}#metric-apis", (str,), returns=lambda name: METRICS[name]
    ),
}


class CTCLoss:
    """The vendor's node: torch's arguments in its order (_CTC)."""

    @staticmethod
    def apply(
        log_probs: torch.Tensor,
        targets: torch.Tensor,
        input_lengths: torch.Tensor,
        target_lengths: torch.Tensor,
        blank: int = 0,
        reduction: str = "mean",
        zero_infinity: bool = False,
    ) -> torch.Tensor:
        return F.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)


VARIABLES = {
    "OMP_NUM_THREADS": "https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/run.py",
    "PT_HPU_LAZY_MODE": _FLAGS,
    "PT_HPU_RECIPE_CACHE_CONFIG": _FLAGS,
    "HABANA_PGM_LRU_MAX": _OLD_FLAGS,
    "PT_HPU_ENABLE_SYNAPSE_OUTPUT_PERMUTE": _PORT,
    "PT_HPU_ENABLE_WEIGHT_CPU_PERMUTE": _PORT,
    "ID": _BRIDGE,
    "PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST": _OPTIMUM,
    "PT_HPU_AUTOCAST_FP32_OPS_LIST": _AUTOCAST,
    "PT_HPU_AUTOLOAD": f"{_SOURCE}/python_packages/habana_frameworks/__init__.py",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": _AUTOLOAD,
}
"""Environment variables that the device sets."""

OPERATIONS = _AUTOCAST
"""Lists the operations that autocast may be told of, in bf16 and in fp32."""

OUT_OF_MEMORY = (
    "[Rank:0] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::268435456 (256)MB",
    _MEMORY,
)

TORCH_VERSION_FILE = ("torch/required_version.txt", _TORCH)
"""The file of the package with the version of torch that the bridge was built for."""

LISTS = ("PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST", "PT_HPU_AUTOCAST_FP32_OPS_LIST")
"""Files of autocast's operations, which the library reads once, when it is imported (_LISTS)."""

BACKENDS = {"hpu_backend": _MODES, "hccl": _HCCL}
"""What torch is told by name: of ``torch.compile``, of ``torch.distributed``."""


class Strict(ModuleType):
    """A module that has what the tables say, and complains of anything else."""

    def __init__(self, name: str, calls: list[str]) -> None:
        super().__init__(name)
        self.__dict__.update(_calls=calls, __path__=[])
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if (self.__name__, name) == ("habana_frameworks.torch.hpex.kernels", "CTCLoss"):
            return CTCLoss
        whole = f"{self.__name__}.{name}"
        if whole not in NAMES:
            raise AttributeError(f"the vendor documents no {whole} that habana_fake knows of")

        def call(*arguments: Any, **keywords: Any) -> Any:
            known = NAMES[whole]
            if keywords or [type(a) for a in arguments] != list(known.takes):
                raise TypeError(f"{whole} takes {known.takes}, not {arguments} {keywords}")
            self.__dict__["_calls"].append(name)
            return known.returns(*arguments)

        return call


class Imported(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes the package's modules when they are imported, with the effects that this has (_SAVE, _LISTS)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
        self.monkeypatch, self.calls = monkeypatch, calls
        self.lists: dict[str, list[str]] = {}
        self.folder: Path | None = None  # of the package's files

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in MODULES:
            return None
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
        if self.folder is not None:
            spec.submodule_search_locations = [str(self.folder)]
        return spec

    def create_module(self, spec: Any) -> ModuleType:
        if spec.name == "habana_frameworks":
            self.effects()
        return Strict(spec.name, self.calls)

    def exec_module(self, module: ModuleType) -> None:
        pass

    def effects(self) -> None:
        for variable in LISTS:
            if variable in os.environ:
                self.lists[variable] = Path(os.environ[variable]).read_text().splitlines()
        save = torch.save

        def patched(
            content: Any, file: Any, *arguments: Any, pickle_protocol: int = 4, **keywords: Any
        ) -> None:
            save(content, file, *arguments, pickle_protocol=pickle_protocol, **keywords)

        self.monkeypatch.setattr(torch, "save", patched)


def install(monkeypatch: pytest.MonkeyPatch) -> Imported:
    """Put the stand-in where the vendor's package would be; ``calls`` has the calls as they come."""
    installed = Imported(monkeypatch, [])
    for name in MODULES:  # put back afterwards
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [installed, *sys.meta_path])
    return installed
