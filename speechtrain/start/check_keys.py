"""Checks a config against the constructors of its parts.

``check`` runs once, in the user's command, before any rank starts. It checks every key of every part against
the part's constructor, and every value against the parameter's annotation. A part is a group of the config
with a class, which ``_target_`` names. The class must be defined in an allowed module and implement the
interface of its group, so that loading a config never runs foreign code.
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

from speechtrain.errors import ConfigError, nearest
from speechtrain.start.resolved import resolve
from speechtrain.start.schema import INJECTED, INTERFACES, Config
from speechtrain.start.targets import import_class, parameter_types, parameters_of, target_class
from speechtrain.trainer_config import TrainerConfig, profile_steps


def check(config: DictConfig) -> dict[str, Any]:
    """Check every part against its constructor. Return the resolved config as plain containers.

    Raises ConfigError with the wrong key, and with the most similar valid key if there is one.
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
    """Raise ConfigError if the resolved node of ``group`` does not fit the group or the constructor."""
    part_class(group, node)
    check_node(group, node, INJECTED.get(group, set()))


def part_class(group: str, node: Any) -> type[Any]:
    """Return the class of the part ``node``.

    Raises ConfigError if ``node`` names no class, or if the class does not implement the interface of
    ``group``.
    """
    fix = f"Choose one with {group}=NAME"
    if not isinstance(node, Mapping | DictConfig) or "_target_" not in node:
        raise ConfigError(f"{group} has no class. {fix}")
    target = str(node["_target_"])
    node_class = target_class(target, group)
    interface = import_class(INTERFACES[group], group)
    if inspect.isabstract(node_class):
        methods = ", ".join(sorted(getattr(node_class, "__abstractmethods__", ())))
        raise ConfigError(f"{group}._target_: {target} is abstract. It lacks {methods}. {fix}")
    if not issubclass(node_class, interface):
        methods = ", ".join(sorted(getattr(interface, "__abstractmethods__", ())))
        fix = f"Inherit from {INTERFACES[group]} and write {methods}. {fix}"
        raise ConfigError(f"{group}._target_: {target} does not implement {interface.__name__}. {fix}")
    return node_class


def _check_root(values: Mapping[str, Any]) -> None:
    """Check the keys of the nodes that have a dataclass instead of a ``_target_``: root and ``trainer``."""
    _check_keys("", values, Config)
    trainer = values["trainer"]
    if not isinstance(trainer, dict):
        raise ConfigError(f"trainer is {trainer!r}. Set its keys, as in trainer.max_steps=100")
    _check_keys("trainer.", trainer, TrainerConfig)


def _check_keys(prefix: str, node: Mapping[str, Any], schema: type[Config | TrainerConfig]) -> None:
    """Raise ConfigError unless ``node`` has exactly the keys of ``schema``.

    ``+KEY`` or a file may have added a key, and ``~KEY`` may have removed one.
    """
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
    if not 0 <= values["seed"] < 2**63:
        raise ConfigError(f"seed={values['seed']}: it must be at least 0 and below 2**63")
    try:
        settings = TrainerConfig(**values["trainer"])
    except ConfigError as error:
        raise ConfigError(f"trainer.{error}") from None
    settings.require_end()
    profile_steps(settings.profile)
    world_size, accumulate = values["world_size"], settings.accumulate
    if world_size < 1:
        raise ConfigError(f"world_size={world_size}: it must be at least 1")
    settings.divide_micro_batches(world_size)
    if accumulate not in (1, settings.accumulate):
        raise ConfigError(
            f"trainer.simulate_world={settings.simulate_world} and trainer.accumulate={accumulate} disagree. "
            "Remove trainer.accumulate"
        )


def check_node(path: str, node: Mapping[str, Any], injected: Collection[str] = ()) -> type:
    """Check one ``_target_`` node and the nodes nested in it. Return its class.

    ``injected`` are the parameters that the ranks fill in. Raises ConfigError.
    """
    node_class = target_class(str(node["_target_"]), path)
    parameters = parameters_of(node_class)
    for name in injected:
        parameters.pop(name, None)
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


_MAX_COUNTS = dict.fromkeys(("layers", "pre_layers", "post_layers", "conv_layers", "context", "splice"), 1000)
_MAX_COUNTS |= {"n_fft": 2**14, "mels": 4096, "sample_rate": 10**6, "length_multiple": 10**6, "threads": 4096}
_MAX_COUNTS |= {"utterances": 10**6, "max_words": 50}
"""Limits of counts and of the lengths of lists, by key. A larger count is a mistake or an attack.

The listed counts cost time or memory even when a network is built without weights, to predict its memory.
"""


def _excess(key: str, value: Any) -> str:
    """Return the reason if a count, or the length of a list, is too large. Otherwise return an empty text."""
    largest = _MAX_COUNTS.get(key, 2**63 - 1)
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
    """Return the reason if a config value does not match a parameter's annotation, else an empty text.

    These annotations are checked:

    - int, float, bool, str, None, unions, list[…], tuple[…] and dict[str, …],
    - another class: the value must be a ``_target_`` node of this class,
    - ``object``: the value must not contain ``_target_`` nodes.

    Any other annotation accepts every value.
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
        position = min(index, len(annotations) - 1)  # The last annotation is for all later items.
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
    """Return the reason if a value matches no member of a union.

    A message about an item of the value is preferred to a message about the whole value.
    """
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
    expected = _describe(annotation)
    fix = ", quote it" if "a string" in expected and isinstance(value, int | float) else ""
    return f"{repr(value)[:100]} is not {expected}{fix}"


@dataclass(frozen=True)
class _SimpleType:
    """A type of values without a structure."""

    name: str  # for messages
    accepts: Callable[[Any], bool]  # returns whether a value has the type


def _is_finite(value: Any) -> bool:
    """Return whether a value is a number in the range of a float, which 10**400 is not."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


# In Python, True and False are also integers. In a config they are not.
_SIMPLE_TYPES: dict[Any, _SimpleType] = {
    bool: _SimpleType("true or false", lambda value: isinstance(value, bool)),
    int: _SimpleType("an integer", lambda value: type(value) is int),
    float: _SimpleType("a finite number", _is_finite),
    str: _SimpleType("a string", lambda value: isinstance(value, str)),
    types.NoneType: _SimpleType("null", lambda value: value is None),
}


def _without_nodes(annotation: Any) -> Any:
    """Return the annotation with which an item of a list or mapping is checked.

    An item of the type Any must not contain ``_target_`` nodes, so it is checked as ``object``.
    """
    return object if annotation is Any else annotation


def _describe(annotation: Any) -> str:
    """Return an annotation in words, with an article."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " or ".join(_describe(option) for option in typing.get_args(annotation))
    if annotation in _SIMPLE_TYPES:
        return _SIMPLE_TYPES[annotation].name
    if (typing.get_origin(annotation) or annotation) in (list, tuple):
        return "a list"
    if (typing.get_origin(annotation) or annotation) is dict:
        return "a mapping"
    return f"a {getattr(annotation, '__name__', annotation)}"
