"""A stand-in for the vendor's package. It records calls, and refuses unknown names and wrong arguments.

The tables list each module, function and environment variable that ``device=hpu`` may use, with the URL of
the vendor's page or public code that documents it. A function that is not listed raises AttributeError, and a
wrong argument raises TypeError.
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
    """One function of the vendor's package."""

    url: str  # the page or the code that documents the function
    argument_types: tuple[type, ...] = ()
    returns: Callable[..., Any] = lambda *_: None  # the function's stand-in


class Metric:
    """The result of ``metric_global``. ``stats`` returns pairs of a counter's name and its value."""

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
    """The vendor's autograd function of the CTC loss, with the arguments of ``F.ctc_loss`` (_CTC)."""

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
"""The URL of the page with the operations that may be in autocast's lists, for bf16 and for fp32."""

# The vendor's message of an allocation that fails, and the URL of the code that writes it.
OUT_OF_MEMORY = (
    "[Rank:0] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::268435456 (256)MB",
    _MEMORY,
)

TORCH_VERSION_FILE = ("torch/required_version.txt", _TORCH)
"""The file of the package with the version of torch that the bridge was built for, and its URL."""

_LIST_VARIABLES = ("PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST", "PT_HPU_AUTOCAST_FP32_OPS_LIST")
"""Variables with the paths of autocast's lists of operations. The library reads the files when it is
imported, and not again (_LISTS)."""

BACKENDS = {"hpu_backend": _MODES, "hccl": _HCCL}
"""The names of the backends of ``torch.compile`` and of ``torch.distributed``, each with its URL."""


class Strict(ModuleType):
    """A module with the functions of the tables. Other attributes raise AttributeError."""

    def __init__(self, name: str, calls: list[str]) -> None:
        super().__init__(name)
        self.__dict__.update(_calls=calls, __path__=[])
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if (self.__name__, name) == ("habana_frameworks.torch.hpex.kernels", "CTCLoss"):
            return CTCLoss
        full_name = f"{self.__name__}.{name}"
        if full_name not in NAMES:
            raise AttributeError(f"habana_fake has no documented function {full_name}")
        function = NAMES[full_name]

        def call(*arguments: Any, **keywords: Any) -> Any:
            argument_types = tuple(type(argument) for argument in arguments)
            if keywords or argument_types != function.argument_types:
                raise TypeError(f"{full_name} takes {function.argument_types}, not {arguments} {keywords}")
            self.__dict__["_calls"].append(name)
            return function.returns(*arguments)

        return call


class StandInImporter(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and loads the stand-in's modules. An import has the same effects as in the vendor's package.

    It replaces ``torch.save`` (_SAVE) and reads the lists of autocast's operations (_LISTS).
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
        self.monkeypatch = monkeypatch
        self.calls = calls  # the names of the called functions, in order
        self.lists: dict[str, list[str]] = {}  # the lines of each list of operations, by its variable
        self.folder: Path | None = None  # the folder of the package's files

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in MODULES:
            return None
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
        if self.folder is not None:
            spec.submodule_search_locations = [str(self.folder)]
        return spec

    def create_module(self, spec: Any) -> ModuleType:
        if spec.name == "habana_frameworks":
            self._apply_effects()
        return Strict(spec.name, self.calls)

    def exec_module(self, module: ModuleType) -> None:
        pass

    def _apply_effects(self) -> None:
        for variable in _LIST_VARIABLES:
            if variable in os.environ:
                self.lists[variable] = Path(os.environ[variable]).read_text().splitlines()
        save = torch.save

        def patched(
            content: Any, file: Any, *arguments: Any, pickle_protocol: int = 4, **keywords: Any
        ) -> None:
            save(content, file, *arguments, pickle_protocol=pickle_protocol, **keywords)

        self.monkeypatch.setattr(torch, "save", patched)


def install(monkeypatch: pytest.MonkeyPatch) -> StandInImporter:
    """Make the stand-in importable as the vendor's package. ``calls`` of the result lists the calls."""
    importer = StandInImporter(monkeypatch, [])
    for name in MODULES:
        # ``setitem`` notes that the module was missing, so that it is removed after the test.
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        del sys.modules[name]
    monkeypatch.setattr(sys, "meta_path", [importer, *sys.meta_path])
    return importer
