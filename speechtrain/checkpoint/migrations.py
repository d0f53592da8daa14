"""Tensor names of earlier formats and their present names.

Optimizer state is stored by the parameter's number and needs no renaming: the order has not changed.
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


def migrate_names(saved: Mapping[str, _Value], known: Container[str]) -> dict[str, _Value]:
    """Rename each tensor that the model does not know, if the model knows its present name."""
    names = {name: current_name(name) for name in saved if name not in known}
    return {names[name] if names.get(name) in known else name: value for name, value in saved.items()}
