"""Checks a config against the constructors of its parts.

``check`` runs once, in the parent, before any process starts. It checks every key of every part
against the part's constructor, and every value against the parameter's annotation. Loading a config
never runs foreign code: a ``_target_`` must resolve to a class that is *defined* in an allowed module
and implements the interface of its group.
"""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from omegaconf import DictConfig

from speechtrain.config.resolved import resolve
from speechtrain.config.schema import INJECTED, INTERFACES, Config
from speechtrain.config.targets import import_class, parameter_types, target_class
from speechtrain.errors import ConfigError, nearest
from speechtrain.trainer_config import TrainerConfig, profile_steps

# Keys of ``trainer`` whose value is null or positive.
_POSITIVE_LIMITS = (
    *("max_steps", "max_epochs", "max_hours", "accumulate", "simulate_world", "log_every", "validate_every"),
    *("save_every", "keep", "max_bad_updates", "timeout_seconds"),
)
# Keys of ``trainer`` with their possible values.
_CHOICES = {
    "on_save_error": ("continue", "stop"),
    "on_collapse": ("stop", "warn"),
    "shard": ("none", "parameters"),
}


def check(config: DictConfig) -> dict[str, Any]:
    """Check every part against its constructor. Return the resolved config as plain containers.

    Raises ConfigError, which names the key and the nearest valid name.
    """
    values = resolve(config)
    _check_root(values)
    if values["resume"] not in ("auto", "never", "must"):
        raise ConfigError(f"resume={values['resume']}: choose auto, never or must")
    _check_limits(values)
    for group in INTERFACES:
        check_part(group, values[group])
    return values


def check_part(group: str, node: Any) -> None:
    """Check the resolved node of one part against its group's interface and its class's constructor."""
    part_class(group, node)
    check_node(group, node, INJECTED.get(group, set()))


def part_class(group: str, node: Any) -> type[Any]:
    """Return the class of a part. Raises ConfigError if there is none, or if it is not of the group."""
    fix = f"Choose one with {group}=NAME"
    if not isinstance(node, Mapping | DictConfig) or "_target_" not in node:
        raise ConfigError(f"{group} has no class. {fix}")
    target = str(node["_target_"])
    node_class = target_class(target, group)
    interface = import_class(INTERFACES[group], group)
    if inspect.isabstract(node_class):
        raise ConfigError(f"{group}._target_: {target} is abstract. {fix}")
    if not issubclass(node_class, interface):
        raise ConfigError(f"{group}._target_: {target} does not implement {interface.__name__}. {fix}")
    return node_class


def _check_root(values: Mapping[str, Any]) -> None:
    """Check the keys of the two typed nodes: the root and ``trainer``."""
    _check_keys("", values, Config)
    trainer = values["trainer"]
    if not isinstance(trainer, dict):
        raise ConfigError(f"trainer is {trainer!r}. Set its keys, as in trainer.max_steps=100")
    _check_keys("trainer.", trainer, TrainerConfig)


def _check_keys(prefix: str, node: Mapping[str, Any], schema: type[Config | TrainerConfig]) -> None:
    """Refuse keys that a + or a file added to a typed node, and keys that a ~ removed from it."""
    keys = [prefix + field.name for field in fields(schema)]
    for key in keys:
        if key.removeprefix(prefix) not in node:
            raise ConfigError(f"{key} is missing. Remove ~{key}")
    for name in node:
        key = f"{prefix}{name}"
        if key not in keys:
            hint = nearest(key, keys) or ". The option --cfg job lists every key"
            raise ConfigError(f"{key}: the config has no such key{hint}")


def _check_limits(values: Mapping[str, Any]) -> None:
    """Check the values of ``trainer``, the seed and the number of processes."""
    limits = values["trainer"]
    for key in _POSITIVE_LIMITS:
        if limits[key] is not None and not limits[key] > 0:
            raise ConfigError(f"trainer.{key}={limits[key]}: it must be above 0")
    if not 0 <= limits["ema"] < 1:
        raise ConfigError(f"trainer.ema={limits['ema']}: it must be at least 0 (off) and below 1")
    for key in ("clip", "target"):
        if limits[key] is not None and not limits[key] >= 0:
            raise ConfigError(f"trainer.{key}={limits[key]}: it must be at least 0")
    if not 0 <= values["seed"] < 2**63:
        raise ConfigError(f"seed={values['seed']}: it must be at least 0 and below 2**63")
    profile_steps(limits["profile"])
    for key, choices in _CHOICES.items():
        if limits[key] not in choices:
            raise ConfigError(f"trainer.{key}={limits[key]}: choose {' or '.join(choices)}")
    if all(limits[key] is None for key in ("max_steps", "max_epochs", "max_hours", "target")):
        raise ConfigError("nothing ends this run. Set trainer.max_steps, max_epochs, max_hours or target")
    _check_world(values["world_size"], limits["simulate_world"], limits["accumulate"])


def _check_world(world_size: int, simulated: int | None, accumulate: int) -> None:
    """Check the number of processes, and that ``simulated`` micro-batches can be divided among them."""
    if world_size < 1:
        raise ConfigError(f"world_size={world_size}: it must be at least 1")
    if simulated is None:
        return
    if simulated % world_size:
        raise ConfigError(f"trainer.simulate_world={simulated} is not a multiple of world_size={world_size}")
    if accumulate not in (1, simulated // world_size):
        raise ConfigError(
            f"trainer.simulate_world={simulated} and trainer.accumulate={accumulate} disagree. "
            "Remove trainer.accumulate"
        )


def check_node(path: str, node: Mapping[str, Any], injected: Collection[str] = ()) -> type:
    """Check one ``_target_`` node and the nodes nested in it. Return its class.

    ``injected`` are the parameters that the ranks fill in. Raises ConfigError.
    """
    node_class = target_class(str(node["_target_"]), path)
    parameters = {}
    for name, parameter in inspect.signature(node_class).parameters.items():
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) and name not in injected:
            parameters[name] = parameter
    annotations = parameter_types(node_class)
    for key, value in node.items():
        if key == "_target_":
            continue
        name = str(key)
        if name not in parameters:
            hint = nearest(name, parameters) or f". It takes {', '.join(parameters) or 'nothing'}"
            raise ConfigError(f"{path}.{name}: {node_class.__name__} takes no {name!r}{hint}")
        for inner_path, inner_node in _nested_nodes(f"{path}.{name}", value):
            check_node(inner_path, inner_node)
        problem = mismatch(value, annotations.get(name, Any)) or _excess(name, value)
        if problem:
            raise ConfigError(f"{path}.{name}: {problem}")
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in node:
            raise ConfigError(f"{path}: {node_class.__name__} needs {name!r}. Set {path}.{name}")
    return node_class


_LARGEST = dict.fromkeys(("layers", "pre_layers", "post_layers", "conv_layers", "context", "splice"), 1000)
_LARGEST |= {"n_fft": 2**14, "mels": 4096, "sample_rate": 10**6, "length_multiple": 10**6, "threads": 4096}
_LARGEST |= {"utterances": 10**6, "max_words": 50}
"""Bounds of counts and of the lengths of lists. A larger one is a mistake or an attack.

These counts cost time or memory before the weights do, and the cost of weights is predicted from the network.
"""


def _excess(key: str, value: Any) -> str:
    """Return why a count is too large, or an empty text."""
    largest = _LARGEST.get(key, 2**63 - 1)
    count = len(value) if isinstance(value, list) else value
    if isinstance(count, int) and abs(count) > largest:
        return f"it must be at most {largest}"
    return ""


def _nested_nodes(path: str, value: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the outermost ``_target_`` nodes at or below ``value``, each with its path."""
    if isinstance(value, dict):
        if "_target_" in value:
            yield path, value
            return
        for key, inner in value.items():
            yield from _nested_nodes(f"{path}.{key}", inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _nested_nodes(f"{path}[{index}]", inner)


def mismatch(value: Any, annotation: Any) -> str:
    """Return why a config value does not match a parameter's annotation, or an empty text.

    The check covers int, float, bool, str, None, unions, list[…] and dict[str, …]. A class accepts a
    nested node of that class, and ``object`` accepts a value without such nodes. Any other annotation accepts
    every value.
    """
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return _union_mismatch(value, annotation)
    if list in (origin, annotation) or tuple in (origin, annotation):
        return _list_mismatch(value, annotation)
    if dict in (origin, annotation):
        return _mapping_mismatch(value, annotation)
    fits = True
    if annotation in _SIMPLE_TYPES:
        fits = _SIMPLE_TYPES[annotation].accepts(value)
    elif annotation is object:
        fits = not any(_nested_nodes("", value))
    elif inspect.isclass(annotation) and annotation is not Any:
        fits = False
        if isinstance(value, dict) and "_target_" in value:
            node_class = target_class(str(value["_target_"]), "value")
            fits = issubclass(node_class, annotation)
    return "" if fits else _misfit(value, annotation)


def _list_mismatch(value: Any, annotation: Any) -> str:
    if not isinstance(value, list):
        return _misfit(value, annotation)
    annotations = [part for part in typing.get_args(annotation) if part is not Ellipsis] or [Any]
    for index, item in enumerate(value):
        position = min(index, len(annotations) - 1)
        item_annotation = annotations[position]
        problem = mismatch(item, _without_nodes(item_annotation))
        if problem:
            return f"item {index + 1}: {problem}"
    return ""


def _mapping_mismatch(value: Any, annotation: Any) -> str:
    if not isinstance(value, dict) or "_target_" in value:
        return _misfit(value, annotation)
    _, value_annotation = typing.get_args(annotation) or (str, Any)
    for key, inner in value.items():
        problem = mismatch(inner, _without_nodes(value_annotation))
        if problem:
            return f"{key}: {problem}"
    return ""


def _union_mismatch(value: Any, annotation: Any) -> str:
    """Return why a value matches no part of a union. A message about an item is preferred."""
    message = _misfit(value, annotation)
    for option in typing.get_args(annotation):
        problem = mismatch(value, option)
        if not problem:
            return ""
        if problem != _misfit(value, option):
            message = problem
    return message


def _misfit(value: Any, annotation: Any) -> str:
    """Return the message that ``value`` as a whole does not match ``annotation``."""
    kind = _describe(annotation)
    quote = ", quote it" if "a string" in kind and isinstance(value, int | float) else ""
    return f"{repr(value)[:100]} is not {kind}{quote}"


@dataclass(frozen=True)
class _SimpleType:
    """A type in words, and the test of a value."""

    name: str
    accepts: Callable[[Any], bool]


def _is_finite(value: Any) -> bool:
    """Return whether a float can hold a number. It cannot hold 10**400."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


# Python counts true and false as numbers, and a config does not.
_SIMPLE_TYPES: dict[Any, _SimpleType] = {
    bool: _SimpleType("true or false", lambda value: isinstance(value, bool)),
    int: _SimpleType("an integer", lambda value: type(value) is int),
    float: _SimpleType("a finite number", _is_finite),
    str: _SimpleType("a string", lambda value: isinstance(value, str)),
    types.NoneType: _SimpleType("null", lambda value: value is None),
}


def _without_nodes(annotation: Any) -> Any:
    """Return the annotation of an item. If the item has no annotation, it must not contain a ``_target_``."""
    return object if annotation is Any else annotation


def _describe(annotation: Any) -> str:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " or ".join(_describe(option) for option in typing.get_args(annotation))
    if annotation in _SIMPLE_TYPES:
        return _SIMPLE_TYPES[annotation].name
    if (typing.get_origin(annotation) or annotation) in (list, tuple):
        return "a list"
    if (typing.get_origin(annotation) or annotation) is dict:
        return "a mapping"
    return f"a {getattr(annotation, '__name__', annotation)}"
