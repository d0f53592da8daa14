"""Renames tensors in checkpoints of earlier formats.

Optimizer state is stored by the number of a parameter, so it needs no renaming as long as the order of
parameters stays.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import TypeVar

_Value = TypeVar("_Value")

_STEPS: tuple[Callable[[str], str], ...] = ()
"""One function per format of ``config.yaml``. It returns a tensor's name in the next format."""


def current_name(name: str) -> str:
    """Return the name of a tensor in the current format. ``name`` may be a path that ends in the name."""
    for step in _STEPS:
        name = step(name)
    return name


def migrate_names(saved: Mapping[str, _Value], model_names: Container[str]) -> dict[str, _Value]:
    """Return ``saved`` with the model's names of tensors.

    A tensor is renamed only if the model does not have its saved name and has its current name.
    """
    renamed = {}
    for name, value in saved.items():
        new_name = current_name(name)
        if name not in model_names and new_name in model_names:
            renamed[new_name] = value
        else:
            renamed[name] = value
    return renamed
