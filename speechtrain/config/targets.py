"""The classes that a config may name as a ``_target_``."""

from __future__ import annotations

import importlib
import inspect
import os
import typing
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from speechtrain.errors import ConfigError, nearest

ALLOW_TARGETS = "SPEECHTRAIN_ALLOW_TARGETS"
"""Environment variable: further module prefixes that ``_target_`` may name, separated by commas."""


def _allow(module: str) -> str:
    """Return the advice on how to allow a module."""
    return (
        f"Add allow_targets={module} to the command line, or to load(RUN, 'allow_targets={module}') in Python"
    )


def _is_within(module: str, packages: Iterable[str]) -> bool:
    return any(f"{module}.".startswith(f"{package}.") for package in packages)


def _allowed_packages() -> list[str]:
    packages = os.environ.get(ALLOW_TARGETS, "").split(",")
    return ["speechtrain", *filter(None, packages)]


def target_class(target: str, path: str) -> type:
    """Return the class that ``target`` names, if it is defined in an allowed module.

    The class's own ``__module__`` decides, not the spelling of ``target``, because a dotted path can lead
    through any module that another one has imported. Raises ConfigError.
    """
    named_class = import_class(target, path)
    module = named_class.__module__
    if _is_within(module, _allowed_packages()):
        return named_class
    if module.startswith("torch.optim."):
        optimizer_class = import_class("torch.optim.Optimizer", path)
        if issubclass(named_class, optimizer_class):
            return named_class
    raise ConfigError(
        f"{path}._target_: {target} is defined in {module}, which is not allowed. {_allow(module)}"
    )


def parameter_types(node_class: type, include_extras: bool = False) -> dict[str, Any]:
    """Return the annotations of a constructor's parameters.

    If some annotations are imported for type checkers only, there are none.
    """
    constructor = inspect.unwrap(node_class.__init__)  # type: ignore[misc]
    try:
        return typing.get_type_hints(constructor, None, None, include_extras)
    except (NameError, TypeError):
        return {}


def import_class(target: str, path: str) -> type:
    """Import the class with the dotted path ``target``. It runs module imports only. Raises ConfigError."""
    key = f"{path}._target_"
    parts = target.split(".")
    if not all(part.isidentifier() for part in parts) or len(parts) < 2:
        raise ConfigError(f"{key}: {target!r} is not the dotted path of a class")
    # An import runs the module, so this check comes first.
    parent = ".".join(parts[:-1])
    if not _is_within(parent, [*_allowed_packages(), "torch.optim"]):
        raise ConfigError(f"{key}: {target} is outside speechtrain and torch.optim. {_allow(parts[0])}")
    for length in range(len(parts) - 1, 0, -1):
        module = _import_if_exists(".".join(parts[:length]), key, target)
        if module is not None:
            return _class_in(module, parts[length:], key, target)
    fix = "Install it, or name its folder in PYTHONPATH"
    raise ConfigError(f"{key}: the module {parent} does not exist. {fix}")


def _import_if_exists(name: str, key: str, target: str) -> ModuleType | None:
    """Import a module. Return None if it does not exist. Raises ConfigError if an import inside it fails."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and _is_within(name, [error.name]):
            return None
        raise ConfigError(f"{key}: {target} needs the package {error.name!r}. Install it") from None


def _class_in(module: ModuleType, parts: list[str], key: str, target: str) -> type:
    """Return the class that the attributes ``parts`` of a module lead to."""
    attribute: Any = module
    for part in parts:
        try:
            attribute = getattr(attribute, part)
        except Exception:  # An object may raise any error.
            owner = getattr(attribute, "__name__", module.__name__)
            hint = nearest(part, dir(attribute))
            raise ConfigError(f"{key}: {owner} has no {part!r}{hint}") from None
    if not inspect.isclass(attribute):
        raise ConfigError(f"{key}: {target} is not a class")
    return attribute
