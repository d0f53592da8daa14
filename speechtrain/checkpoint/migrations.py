"""Tensor names of earlier formats and their present names.

Optimizer state is stored by the number of a parameter. The order of parameters has not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import TypeVar

_Value = TypeVar("_Value")

_STEPS: tuple[Callable[[str], str], ...] = ()
"""Each function renames tensors of one format of ``config.yaml`` for the next format."""


def current_name(name: str) -> str:
    """Return the present name of a tensor, or of a path that ends in it."""
    for step in _STEPS:
        name = step(name)
    return name


def migrate_names(saved: Mapping[str, _Value], model_names: Container[str]) -> dict[str, _Value]:
    """Rename each tensor that the model does not have, if the model has its present name."""
    renamed = {}
    for name, value in saved.items():
        present_name = current_name(name)
        if name not in model_names and present_name in model_names:
            renamed[present_name] = value
        else:
            renamed[name] = value
    return renamed
