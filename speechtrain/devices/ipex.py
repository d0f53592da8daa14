"""The CPU through Intel's extension for PyTorch. The last release of the extension is 2.8."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import replace
from importlib import metadata
from typing import Any

import torch
from torch import nn

from speechtrain.devices.base import Prepared
from speechtrain.devices.cpu import CPU
from speechtrain.errors import MachineError, one_line

_PACKAGE = "intel_extension_for_pytorch"
_ADVICE = (
    f"Run pip install torch==2.8.0 {_PACKAGE}==2.8.0 into a separate environment (make test-ipex does), "
    "or set device=cpu"
)


class IPEX(CPU):
    """The CPU with Intel's LSTM kernel and autocast. Everything else is the same as in ``CPU``.

    The extension also fuses the step of the optimizer ``sgd``. The repository of the extension is archived
    with known security issues, and Intel recommends plain PyTorch.

    Weights stay fp32 tensors in their usual layout. The extension could also store them in bf16, with the
    exact weights inside its optimizer, and in oneDNN's blocked layout. Weight averages, gradient norms and
    checkpoints would then differ from those on other devices.
    """

    # The extension may copy the parameters to other types and layouts, so they cannot be sharded.
    facts = replace(CPU.facts, fsdp=False, packages=(_PACKAGE,))

    def check(self, processes: int) -> None:
        super().check(processes)
        _version()

    def open(self, local_rank: int = 0) -> None:
        _import()
        super().open(local_rank)

    def prepare(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> Prepared:
        extension = _import()
        with warnings.catch_warnings():  # The extension warns about optimizers whose step it does not fuse.
            warnings.simplefilter("ignore")
            prepared: Prepared = extension.optimize(
                module.train(), optimizer=optimizer, inplace=True, weights_prepack=False
            )
        return prepared


def _version() -> str:
    """Return the extension's version.

    Raises MachineError if the extension is not installed, or is made for another version of torch.
    """
    try:
        version = metadata.version(_PACKAGE)
    except metadata.PackageNotFoundError:
        raise MachineError(f"device=ipex: {_PACKAGE} is not installed here. {_ADVICE}") from None
    if _release(version) != _release(torch.__version__):  # The import would raise an AttributeError.
        raise MachineError(
            f"device=ipex: {_PACKAGE} {version} needs torch {_release(version)}, "
            f"not {torch.__version__}. {_ADVICE}"
        )
    return version


def _import() -> Any:
    """Import the extension and return its module. Raises MachineError if that is not possible."""
    version = _version()
    try:
        with warnings.catch_warnings():  # The extension warns that it replaces torch's kernels.
            warnings.simplefilter("ignore")
            return importlib.import_module(_PACKAGE)
    except Exception as error:  # There are many causes, such as a missing library or an unknown processor.
        problem = f"{_PACKAGE} {version} does not load ({one_line(str(error), 200)})"
        raise MachineError(f"device=ipex: {problem}. {_ADVICE}") from None


def _release(version: str) -> str:
    """Return the first two numbers of a version: ``2.8`` for ``2.8.0+cpu``."""
    major, minor, *_ = version.split(".")
    return f"{major}.{minor}"
