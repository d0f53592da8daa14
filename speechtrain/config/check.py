"""Checks a config against the constructors of its parts.

``check`` runs once, in the parent, before any process starts. It checks every key of every part
against the part's constructor, and every value against the parameter's annotation. Loading a config
never runs foreign code: a ``_target_`` must resolve to a class that is *defined* in an allowed module
and implements its group's interface.
"""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields
from typing import Any

from omegaconf import DictConfig

from speechtrain.config.resolved import resolved
from speechtrain.config.schema import INTERFACES, OFFERED, Config
from speechtrain.config.targets import import_class, parameter_types, target_class
from speechtrain.errors import ConfigError, nearest
from speechtrain.trainer_config import TrainerConfig, profile_steps


def check(config: DictConfig) -> dict[str, Any]:
    """Check every part against its constructor; return the resolved config as plain containers.

    Raises ConfigError, which names the key and the nearest valid name.
    """
    plain = resolved(config)
    _check_root(plain)
    if plain["resume"] not in ("auto", "never", "must"):
        raise ConfigError(f"resume={plain['resume']}: choose auto, never or must")
    _check_limits(plain)
    for group in INTERFACES:
        check_part(group, plain[group])
    return plain


def check_part(group: str, node: Any) -> None:
    """Check the resolved node of one part against its group's interface and its class's constructor."""
    part_class(group, node)
    check_node(group, node, OFFERED.get(group, set()))


def part_class(group: str, node: Any) -> type[Any]:
    """The class of a part. Raises ConfigError if it has none, or one that is not of its group."""
    if not isinstance(node, Mapping | DictConfig) or "_target_" not in node:
        raise ConfigError(f"{group} has no class; choose one with {group}=NAME")
    found, wanted = target_class(str(node["_target_"]), group), import_class(INTERFACES[group], group)
    if not issubclass(found, wanted) or inspect.isabstract(found):
        fault = "is abstract" if inspect.isabstract(found) else f"does not implement {wanted.__name__}"
        raise ConfigError(f"{group}._target_: {node['_target_']} {fault}; choose one with {group}=NAME")
    return found


def _check_root(plain: Mapping[str, Any]) -> None:
    """Refuse keys that a + or a file added to the typed root, or that a ~ removed from it."""
    for prefix, typed in (("", fields(Config)), ("trainer.", fields(TrainerConfig))):
        node = plain["trainer"] if prefix else plain
        if not isinstance(node, dict):
            raise ConfigError(f"{prefix[:-1]} is {node!r}; set its keys, as in trainer.max_steps=100")
        known = [entry.name for entry in typed]
        for key in known:
            if key not in node:
                raise ConfigError(f"{prefix}{key} is missing; remove ~{prefix}{key}")
        for key in node:
            if key not in known:
                names = [prefix + name for name in known]
                near = nearest(f"{prefix}{key}", names) or "; --cfg job lists every key"
                raise ConfigError(f"{prefix}{key}: there is no such key{near}")


def _check_limits(plain: Mapping[str, Any]) -> None:
    limits = plain["trainer"]
    positive = ("max_steps", "max_epochs", "max_hours", "accumulate", "simulate_world", "log_every")
    for key in (*positive, "validate_every", "save_every", "keep", "max_bad_updates", "timeout_seconds"):
        if limits[key] is not None and not limits[key] > 0:
            raise ConfigError(f"trainer.{key}={limits[key]}: it must be above 0")
    if not 0 <= limits["ema"] < 1:
        raise ConfigError(f"trainer.ema={limits['ema']}: it must be at least 0 (off) and below 1")
    for key in ("clip", "target"):
        if limits[key] is not None and not limits[key] >= 0:
            raise ConfigError(f"trainer.{key}={limits[key]}: it must be at least 0")
    if not 0 <= plain["seed"] < 2**63:
        raise ConfigError(f"seed={plain['seed']}: it must be at least 0 and below 2**63")
    profile_steps(limits["profile"])
    choices = {"on_save_error": ("continue", "stop"), "on_collapse": ("stop", "warn")}
    for key, known in (choices | {"shard": ("none", "parameters")}).items():
        if limits[key] not in known:
            raise ConfigError(f"trainer.{key}={limits[key]}: choose {' or '.join(known)}")
    ranks, simulated = plain["world_size"], limits["simulate_world"]
    if ranks < 1:
        raise ConfigError(f"world_size={ranks}: it must be at least 1")
    if all(limits[key] is None for key in ("max_steps", "max_epochs", "max_hours", "target")):
        raise ConfigError("nothing ends this run; set trainer.max_steps, max_epochs, max_hours or target")
    if simulated is not None and simulated % ranks:
        raise ConfigError(f"trainer.simulate_world={simulated} is not a multiple of world_size={ranks}")
    if simulated is not None and limits["accumulate"] != 1 and ranks * limits["accumulate"] != simulated:
        raise ConfigError(
            f"trainer.simulate_world={simulated} and trainer.accumulate={limits['accumulate']} disagree; "
            "remove trainer.accumulate"
        )


def check_node(path: str, node: Mapping[str, Any], offered: Collection[str] = ()) -> type:
    """Check one ``_target_`` node and the nodes nested in it; return its class. Raises ConfigError."""
    found = target_class(str(node["_target_"]), path)
    every = inspect.signature(found).parameters.items()
    parameters = {n: p for n, p in every if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    known = [name for name in parameters if name not in offered]
    hints = parameter_types(found)
    for key, value in node.items():
        if key == "_target_":
            continue
        if key not in known:
            takes = nearest(str(key), known) or f"; it takes {', '.join(known) or 'nothing'}"
            raise ConfigError(f"{path}.{key}: {found.__name__} takes no {str(key)!r}{takes}")
        for inner, child in _nested(f"{path}.{key}", value):
            check_node(inner, child)
        if problem := mismatch(value, hints.get(str(key), Any)) or _beyond(str(key), value):
            raise ConfigError(f"{path}.{key}: {problem}")
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in node and name not in offered:
            raise ConfigError(f"{path}: {found.__name__} needs {name!r}; set {path}.{name}")
    return found


_MOST = dict.fromkeys(("layers", "pre_layers", "post_layers", "conv_layers", "context", "splice"), 1000)
_MOST |= {"n_fft": 2**14, "mels": 4096, "sample_rate": 10**6, "length_multiple": 10**6, "threads": 4096}
_MOST |= {"utterances": 10**6, "max_words": 50}
"""Bounds of counts, and of lengths of lists, that cost time or memory before weights do; above them is a
mistake or an attack. What weights cost is predicted from the network."""


def _beyond(key: str, value: Any) -> str:
    """Why a count is too large; empty if it is not."""
    most, count = _MOST.get(key, 2**63 - 1), len(value) if isinstance(value, list) else value
    return f"it must be at most {most}" if isinstance(count, int) and abs(count) > most else ""


def _nested(path: str, value: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The outermost ``_target_`` nodes at or below ``value``."""
    if isinstance(value, dict):
        if "_target_" in value:
            yield path, value
            return
        for key, inner in value.items():
            yield from _nested(f"{path}.{key}", inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _nested(f"{path}[{index}]", inner)


def mismatch(value: Any, annotation: Any) -> str:
    """Why a config value does not match a parameter's annotation; empty if it does.

    Understands int, float, bool, str, None, unions, list[…] and dict[str, …]; a class accepts a
    nested node of that class, ``object`` accepts what has no class, and anything else passes.
    """
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return _union_mismatch(value, annotation)
    fits = True
    if annotation in _SIMPLE:
        _, is_one = _SIMPLE[annotation]
        fits = is_one(value)
    elif origin in (list, tuple) or annotation in (list, tuple):
        fits = isinstance(value, list)
        items = [a for a in typing.get_args(annotation) if a is not Ellipsis]
        for index, inner in enumerate(value if fits else []):
            if problem := mismatch(inner, _plain(items[min(index, len(items) - 1)] if items else Any)):
                return f"item {index + 1}: {problem}"
    elif dict in (origin, annotation):
        fits, inner = isinstance(value, dict) and "_target_" not in value, typing.get_args(annotation)[1:]
        for key, one in value.items() if fits else ():
            if problem := mismatch(one, _plain(inner[0] if inner else Any)):
                return f"{key}: {problem}"
    elif annotation is object:
        fits = not any(_nested("", value))
    elif inspect.isclass(annotation) and annotation is not Any:
        fits = isinstance(value, dict) and "_target_" in value
        fits = fits and issubclass(target_class(str(value["_target_"]), "value"), annotation)
    return "" if fits else _unfit(value, annotation)


def _union_mismatch(value: Any, annotation: Any) -> str:
    """Why a value matches no part of a union: the message about an item, if there is one."""
    message = _unfit(value, annotation)
    for option in typing.get_args(annotation):
        problem = mismatch(value, option)
        if not problem:
            return ""
        if problem != _unfit(value, option):
            message = problem
    return message


def _unfit(value: Any, annotation: Any) -> str:
    """The message that ``value`` as a whole does not match ``annotation``."""
    kind = _describe(annotation)
    quote = ", quote it" if "a string" in kind and isinstance(value, int | float) else ""
    return f"{repr(value)[:100]} is not {kind}{quote}"


_MOST_FLOAT = sys.float_info.max
# a type in words, and whether a value is of it: true and false are no numbers, and 10**400 is no float
_SIMPLE: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: ("an integer", lambda value: type(value) is int),
    float: ("a finite number", lambda value: type(value) in (int, float) and abs(value) <= _MOST_FLOAT),
    str: ("a string", lambda value: isinstance(value, str)),
    types.NoneType: ("null", lambda value: value is None),
}


def _plain(annotation: Any) -> Any:
    """The annotation of an item: values of any kind in a list or a mapping have no class."""
    return object if annotation is Any else annotation


def _describe(annotation: Any) -> str:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " or ".join(_describe(a) for a in typing.get_args(annotation))
    if annotation in _SIMPLE:
        return _SIMPLE[annotation][0]
    if (typing.get_origin(annotation) or annotation) in (list, tuple):
        return "a list"
    if (typing.get_origin(annotation) or annotation) is dict:
        return "a mapping"
    return f"a {getattr(annotation, '__name__', annotation)}"
