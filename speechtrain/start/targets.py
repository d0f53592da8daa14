"""The classes that a config may name as a ``_target_``."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import traceback
import typing
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from speechtrain.errors import ConfigError, nearest, shown_path

ALLOW_TARGETS = "SPEECHTRAIN_ALLOW_TARGETS"
"""Environment variable with further packages that ``_target_`` may name, separated by commas."""


def _advice_to_allow(module: str) -> str:
    override = f"allow_targets={module}"
    return f"Add {override} to the command line, or to load(RUN, '{override}') in Python"


def _is_within(module: str, packages: Iterable[str]) -> bool:
    """Return whether ``module`` is one of ``packages`` or in one of them."""
    return any(f"{module}.".startswith(f"{package}.") for package in packages)


def _user_packages() -> list[str]:
    packages = os.environ.get(ALLOW_TARGETS, "").split(",")
    return list(filter(None, packages))


def _allowed_packages() -> list[str]:
    return ["speechtrain", *_user_packages()]


def place_of_error(error: BaseException) -> str:
    """Return ``FILE:LINE in CLASS.METHOD: `` for the innermost line of the user's own parts, or "".

    The user's own parts are the packages in ALLOW_TARGETS.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{shown_path(error.filename)}:{error.lineno}: "
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if _is_within(str(frame.f_globals.get("__name__")), _user_packages()):
            code = frame.f_code
            return f"{shown_path(code.co_filename)}:{line} in {code.co_qualname}: "
    return ""


def described_error(error: BaseException) -> str:
    """Return place, class and message of an error that is not a SpeechtrainError."""
    return f"{place_of_error(error)}{type(error).__name__}: {error}"


def target_class(target: str, path: str) -> type:
    """Return the class that ``target`` names. Raises ConfigError unless it is defined in an allowed module.

    Optimizers of torch are also allowed. The ``__module__`` of the class is checked and not the text of
    ``target``, because a dotted path can lead to a class that an allowed module has imported. ``path`` is the
    config key of the node, for messages.
    """
    named_class = import_class(target, path)
    module = named_class.__module__
    if _is_within(module, _allowed_packages()):
        return named_class
    if _is_within(module, ["torch.optim"]):  # Adafactor and Muon are in torch.optim itself.
        optimizer_class = import_class("torch.optim.Optimizer", path)
        if issubclass(named_class, optimizer_class):
            return named_class
    raise ConfigError(
        f"{path}._target_: {target} is defined in {module}, which is not allowed. {_advice_to_allow(module)}"
    )


def _constructor_classes(node_class: type) -> list[type]:
    """Return the parents whose constructors get ``**options`` of the class, and the class as the last one."""
    classes = []
    for ancestor in node_class.__mro__:
        classes.append(ancestor)
        kinds = [parameter.kind for parameter in inspect.signature(ancestor).parameters.values()]
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            break
    return classes[::-1]


def parameters_of(node_class: type) -> dict[str, inspect.Parameter]:
    """Return the parameters of a constructor by name. The parameters of a parent replace ``**options``."""
    parameters = {}
    for ancestor in _constructor_classes(node_class):
        for name, parameter in inspect.signature(ancestor).parameters.items():
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                parameters[name] = parameter
    return parameters


def parameter_types(node_class: type, include_extras: bool = False) -> dict[str, Any]:
    """Return the annotations of a constructor's parameters by name.

    Those of a class are omitted if one of them cannot be evaluated, such as a class that is imported for type
    checkers only.
    """
    types: dict[str, Any] = {}
    for ancestor in _constructor_classes(node_class):
        constructor = inspect.unwrap(ancestor.__init__)  # type: ignore[misc]
        with contextlib.suppress(NameError, TypeError):
            types |= typing.get_type_hints(constructor, None, None, include_extras)
    return types


def import_class(target: str, path: str) -> type:
    """Import and return the class with the dotted path ``target``, without calling it. Raises ConfigError."""
    key = f"{path}._target_"
    parts = target.split(".")
    if not all(part.isidentifier() for part in parts) or len(parts) < 2:
        raise ConfigError(f"{key}: {target!r} is not the dotted path of a class")
    # An import runs the code of the module, so the path is checked first.
    parent = ".".join(parts[:-1])
    if not _is_within(parent, [*_allowed_packages(), "torch.optim"]):
        raise ConfigError(
            f"{key}: {target} is outside speechtrain and torch.optim. {_advice_to_allow(parts[0])}"
        )
    # The path is MODULE.CLASS, or MODULE.CLASS.INNER_CLASS, so the longest module that exists is used.
    for length in range(len(parts) - 1, 0, -1):
        module = _import_if_exists(".".join(parts[:length]), key, target)
        if module is not None:
            return _class_in(module, parts[length:], key, target)
    fix = "Install it, or name its folder in PYTHONPATH"
    raise ConfigError(f"{key}: the module {parent} does not exist. {fix}")


def _import_if_exists(name: str, key: str, target: str) -> ModuleType | None:
    """Return the module ``name``, or None if it does not exist.

    Raises ConfigError if the module imports a package that is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # If a.b.c itself does not exist, the error names a, a.b or a.b.c: one of the packages that contain
        # it.
        is_itself_missing = bool(error.name) and _is_within(name, packages=[str(error.name)])
        if is_itself_missing:
            return None
        raise ConfigError(f"{key}: {target} needs the package {error.name!r}. Install it") from None


def _class_in(module: ModuleType, parts: list[str], key: str, target: str) -> type:
    """Return the class ``module.PART1.PART2…``. Raises ConfigError if it does not exist or is not a class."""
    attribute: Any = module
    for part in parts:
        try:
            attribute = getattr(attribute, part)
        except Exception:  # ``__getattr__`` of a module or class may raise any error.
            owner = getattr(attribute, "__name__", module.__name__)
            hint = nearest(part, dir(attribute))
            raise ConfigError(f"{key}: {owner} has no {part!r}{hint}") from None
    if not inspect.isclass(attribute):
        raise ConfigError(f"{key}: {target} is not a class")
    return attribute
