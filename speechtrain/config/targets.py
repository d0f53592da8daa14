"""``_target_``: which classes a config may name."""

from __future__ import annotations

import importlib
import inspect
import os
import typing
from typing import Any

from speechtrain.errors import ConfigError, nearest

ALLOW_TARGETS = "SPEECHTRAIN_ALLOW_TARGETS"
"""Environment variable: module prefixes, separated by commas, that ``_target_`` may name as well."""


def _allowing(module: str) -> str:
    return (
        f"add allow_targets={module} to the command line, or to load(RUN, 'allow_targets={module}') in Python"
    )


def target_class(target: str, path: str) -> type:
    """The class that ``target`` names, if it is defined in an allowed module.

    Decided by the class's own ``__module__``, not by the spelling of the path: a dotted path walks
    through any module that another one has imported. Raises ConfigError.
    """
    found = import_class(target, path)
    module = found.__module__
    allowed = ("speechtrain", *filter(None, os.environ.get(ALLOW_TARGETS, "").split(",")))
    if any(module == prefix or module.startswith(prefix + ".") for prefix in allowed):
        return found
    if module.startswith("torch.optim.") and issubclass(found, import_class("torch.optim.Optimizer", path)):
        return found
    raise ConfigError(
        f"{path}._target_: {target} is defined in {module}, which is not allowed; {_allowing(module)}"
    )


def parameter_types(found: type, include_extras: bool = False) -> dict[str, Any]:
    """The annotations of a constructor's parameters; none if some are imported for type checkers only."""
    try:
        return typing.get_type_hints(inspect.unwrap(found.__init__), None, None, include_extras)  # type: ignore[misc]
    except (NameError, TypeError):
        return {}


def import_class(target: str, path: str) -> type:
    """Import a class by its dotted path; runs module imports only. Raises ConfigError."""
    parts = target.split(".")
    if not all(part.isidentifier() for part in parts) or len(parts) < 2:
        raise ConfigError(f"{path}._target_: {target!r} is not the dotted path of a class")
    allowed = ("speechtrain", "torch.optim", *filter(None, os.environ.get(ALLOW_TARGETS, "").split(",")))
    if not any(target.startswith(prefix + ".") for prefix in allowed):
        # refused before anything is imported: importing a module runs it
        raise ConfigError(
            f"{path}._target_: {target} is outside speechtrain and torch.optim; {_allowing(parts[0])}"
        )
    for cut in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:cut])
        try:
            found: Any = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name and (name == error.name or name.startswith(error.name + ".")):
                continue
            raise ConfigError(
                f"{path}._target_: {target} needs the package {error.name!r}; install it"
            ) from None
        for part in parts[cut:]:
            try:
                found = getattr(found, part)
            except Exception:  # some objects raise what they like
                told = f"{getattr(found, '__name__', name)} has no {part!r}{nearest(part, dir(found))}"
                raise ConfigError(f"{path}._target_: {told}") from None
        if not inspect.isclass(found):
            raise ConfigError(f"{path}._target_: {target} is not a class")
        return found
    missing = f"there is no module {'.'.join(parts[:-1])}"
    raise ConfigError(f"{path}._target_: {missing}; install it, or name its folder in PYTHONPATH")
