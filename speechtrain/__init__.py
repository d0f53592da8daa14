"""speechtrain: train speech models on whatever hardware a team owns, from one command.

From Python, ``load`` opens a trained run, ``compose`` returns the config of a new run, and
``transducer_loss`` is a loss for any transducer model. They are imported at their first use, so ``import
speechtrain`` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from speechtrain.inference.loaded_run import load
    from speechtrain.losses.transducer import transducer_loss
    from speechtrain.start.job_config import compose

__version__ = "0.1.0"
__all__ = ("__version__", "compose", "load", "transducer_loss")

_MODULES = {
    "compose": "speechtrain.start.job_config",
    "load": "speechtrain.inference.loaded_run",
    "transducer_loss": "speechtrain.losses.transducer",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
