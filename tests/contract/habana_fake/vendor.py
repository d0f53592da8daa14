"""A recording stand-in for the vendor's package: strict about names and arguments, each with its address.

Whatever ``device=hpu`` calls, sets or names must stand in ``NAMES`` or ``VARIABLES``, with the page of the
vendor, or the public code, that says so. An unknown name or a wrong argument raises.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

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


MODULES = {
    "habana_frameworks": _API,
    "habana_frameworks.torch": _API,
    "habana_frameworks.torch.core": _MODES,
    "habana_frameworks.torch.hpu": f"{_API}#hpu-apis",
    "habana_frameworks.torch.hpu.metrics": f"{_API}#metric-apis",
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
        f"{_API}#metric-apis", (str,), returns=lambda name: {"graph_compilation": Metric()}[name]
    ),
}

VARIABLES = {
    "PT_HPU_LAZY_MODE": _FLAGS,
    "PT_HPU_RECIPE_CACHE_CONFIG": _FLAGS,
    "HABANA_PGM_LRU_MAX": _OLD_FLAGS,
    "PT_HPU_ENABLE_SYNAPSE_OUTPUT_PERMUTE": _PORT,
    "PT_HPU_ENABLE_WEIGHT_CPU_PERMUTE": _PORT,
    "ID": _BRIDGE,
    "PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST": _OPTIMUM,
    "PT_HPU_AUTOCAST_FP32_OPS_LIST": _AUTOCAST,
}
"""Environment variables that the device sets."""

OPERATIONS = _AUTOCAST
"""Lists the operations that autocast may be told of, in bf16 and in fp32."""

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


def install(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put the stand-in where the vendor's package would be; returns the calls as they come."""
    calls: list[str] = []
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, Strict(name, calls))
    return calls
