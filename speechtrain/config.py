"""The config: its typed root, how its parts are checked against their constructors, and built.

``check`` runs once, in the parent, before any process starts: every key of every part against the
constructor it is meant for, every value against that parameter's annotation. ``build`` calls the
constructors. Loading a config never runs strangers' code: a ``_target_`` must resolve to a class
that is *defined* in an allowed module and implements its group's interface.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import math
import os
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from speechtrain.errors import ConfigError, nearest
from speechtrain.limits import Limits

ALLOW_TARGETS = "SPEECHTRAIN_ALLOW_TARGETS"
"""Environment variable: module prefixes, separated by commas, that ``_target_`` may name as well."""


@dataclass
class Config:
    """The root: typed here, and open nodes whose keys are their classes' constructor parameters."""

    world_size: int = 1
    seed: int = 1
    run_dir: str | None = None
    resume: str = "auto"  # auto | never | must
    dry_run: bool = False
    init_from: str | None = None
    trainer: Limits = field(default_factory=Limits)
    model: Any = MISSING
    encoder: Any = MISSING
    tokenizer: Any = MISSING
    data: Any = MISSING
    augment: Any = MISSING
    device: Any = MISSING
    precision: Any = MISSING
    launcher: Any = MISSING
    optimizer: Any = MISSING
    schedule: Any = MISSING
    tracking: Any = MISSING


INTERFACES = {
    "model": "speechtrain.task.Task",
    "encoder": "speechtrain.nn.encoder.Encoder",
    "tokenizer": "speechtrain.text.vocabulary.Tokenizer",
    "data": "speechtrain.data.base.DataModule",
    "augment": "speechtrain.nn.augment.Augment",
    "device": "speechtrain.devices.base.Device",
    "precision": "speechtrain.precision.Precision",
    "launcher": "speechtrain.launch.Launcher",
    "optimizer": "torch.optim.Optimizer",
    "schedule": "speechtrain.optim.schedules.Schedule",
    "tracking": "speechtrain.tracking.base.Tracker",
}
"""What a group's class must implement. A string: naming an interface imports nothing."""

OFFERED = {
    "model": {"tokenizer", "encoder"},
    "encoder": {"augment"},
    "data": {"tokenizer", "footprint", "normalise"},
    "optimizer": {"params"},
    "schedule": {"steps_per_epoch", "planned_steps"},
}
"""Constructor parameters that the worker fills in; a YAML does not list them."""

_VOLATILE = (
    *("world_size", "run_dir", "resume", "dry_run", "launcher", "tracking", "device"),
    *("data.workers", "data.cache", "data.timeout_seconds", "data.max_bad", "data.max_bad_share"),
)
_VOLATILE_LIMITS = (
    *("max_steps", "max_epochs", "max_hours", "target", "log_every", "validate_every", "save_every"),
    *("keep", "on_save_error", "on_collapse", "max_bad_updates", "timeout_seconds", "profile", "shard"),
)

ConfigStore.instance().store(name="schema", node=Config)


def load(path: Path) -> DictConfig:
    """A resolved config file as the typed root. Raises ConfigError naming the file."""
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(path))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; is {path.parent} a run directory?") from None
    except (OmegaConfBaseException, OSError, ValueError, YAMLError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())[:300]}") from None
    if not isinstance(merged, DictConfig):
        raise ConfigError(f"{path} holds no mapping of keys; it is no config")
    return merged


def dump(config: DictConfig) -> str:
    """The config as YAML, resolved, but for values that come from the environment (secrets among them)."""
    raw = OmegaConf.to_container(config, resolve=False)
    # resolved a second time with a mark for such values: what refers to one has the mark as well
    marked = OmegaConf.to_container(OmegaConf.create(_mark(raw)), resolve=True)
    return OmegaConf.to_yaml(OmegaConf.create(_keep_environment(raw, marked, resolved(config))))


def resolved(config: DictConfig) -> dict[str, Any]:
    """The config as plain containers. Raises ConfigError naming a key that is missing or does not resolve."""
    try:
        missing = sorted(OmegaConf.missing_keys(config))
        if missing:
            raise ConfigError(f"{missing[0]} is not set; give it on the command line as {missing[0]}=VALUE")
        plain = OmegaConf.to_container(config, resolve=True, enum_to_str=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key or 'config'}: {first_line(error)}") from None
    assert isinstance(plain, dict)
    return typing.cast("dict[str, Any]", plain)


_FROM_ENVIRONMENT = "<from the environment>"


def _mark(raw: Any) -> Any:
    if isinstance(raw, str) and "${oc.env:" in raw:
        return _FROM_ENVIRONMENT
    if isinstance(raw, dict):
        return {key: _mark(value) for key, value in raw.items()}
    return [_mark(value) for value in raw] if isinstance(raw, list) else raw


def _keep_environment(raw: Any, marked: Any, plain: Any) -> Any:
    if isinstance(raw, str):
        return raw if _FROM_ENVIRONMENT in repr(marked) else plain
    if isinstance(raw, dict) and isinstance(plain, dict):
        return {key: _keep_environment(raw[key], marked[key], plain[key]) for key in plain}
    if isinstance(raw, list) and isinstance(plain, list):
        return [_keep_environment(*three) for three in zip(raw, marked, plain, strict=True)]
    return plain


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return str(error).strip().partition("\n")[0]


# --- identity -----------------------------------------------------------------------------------


def identity(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The flat keys and values that make a run what it is: all that a resume may not change."""
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping) and value:
            for key in value:
                walk(f"{prefix}.{key}" if prefix else str(key), value[key])
        else:
            flat[prefix] = value

    walk("", {key: value for key, value in plain.items() if key in Config.__dataclass_fields__})
    volatile = (*_VOLATILE, *(f"trainer.{key}" for key in _VOLATILE_LIMITS))
    # the run directory is repeated where a part writes files of its own
    return {
        key: value
        for key, value in flat.items()
        if not key.endswith(".run_dir") and not any(key == v or key.startswith(v + ".") for v in volatile)
    }


def fingerprint(plain: Mapping[str, Any]) -> str:
    """Eight hexadecimal digits of the identity."""
    text = json.dumps(identity(plain), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


# --- checking -----------------------------------------------------------------------------------


def check(config: DictConfig) -> dict[str, Any]:
    """Check every part against its constructor; return the resolved config as plain containers.

    Raises ConfigError, one line that names the key and the nearest valid name.
    """
    plain = resolved(config)
    _check_root(plain)
    if plain["resume"] not in ("auto", "never", "must"):
        raise ConfigError(f"resume={plain['resume']}: it is auto, never or must")
    _check_limits(plain)
    for group, interface in INTERFACES.items():
        node = plain[group]
        if not isinstance(node, dict) or "_target_" not in node:
            raise ConfigError(f"{group} names no class; choose one with {group}=NAME")
        found, wanted = target_class(str(node["_target_"]), group), _import(interface, group)
        if not issubclass(found, wanted) or inspect.isabstract(found):
            fault = "is abstract" if inspect.isabstract(found) else f"is no {wanted.__name__}"
            raise ConfigError(f"{group}._target_: {node['_target_']} {fault}; choose one with {group}=NAME")
        _check_node(group, node, OFFERED.get(group, set()))
    return plain


def _check_root(plain: Mapping[str, Any]) -> None:
    """Keys that a + or a file added to the typed root, or a ~ took from it."""
    for prefix, typed in (("", fields(Config)), ("trainer.", fields(Limits))):
        node = plain["trainer"] if prefix else plain
        if not isinstance(node, dict):
            raise ConfigError(f"{prefix[:-1]} is {node!r}; set its keys, as in trainer.max_steps=100")
        known = [entry.name for entry in typed]
        for key in known:
            if key not in node:
                raise ConfigError(f"{prefix}{key} is missing; leave ~{prefix}{key} out")
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
    steps = re.fullmatch(r"(\d+):(\d+)", limits["profile"])
    if limits["profile"] and not (steps and 0 < int(steps[1]) <= int(steps[2])):
        raise ConfigError(
            f"trainer.profile={limits['profile']}: it is A:B, the first and the last step to profile"
        )
    if limits["on_save_error"] not in ("continue", "stop"):
        raise ConfigError(f"trainer.on_save_error={limits['on_save_error']}: it is continue or stop")
    if limits["on_collapse"] not in ("stop", "rollback", "warn"):
        raise ConfigError(f"trainer.on_collapse={limits['on_collapse']}: it is stop, rollback or warn")
    if limits["shard"] not in ("none", "parameters"):
        raise ConfigError(f"trainer.shard={limits['shard']}: it is none or parameters")
    if plain["world_size"] < 1:
        raise ConfigError(f"world_size={plain['world_size']}: it must be at least 1")
    if all(limits[key] is None for key in ("max_steps", "max_epochs", "max_hours", "target")):
        raise ConfigError("nothing ends this run; set trainer.max_steps, max_epochs, max_hours or target")
    world = plain["world_size"] * limits["accumulate"]
    simulated = limits["simulate_world"]
    if simulated is not None and simulated % plain["world_size"]:
        raise ConfigError(
            f"trainer.simulate_world={simulated}: world_size={plain['world_size']} does not divide it"
        )
    if simulated is not None and limits["accumulate"] != 1 and world != simulated:
        raise ConfigError(
            f"trainer.simulate_world={simulated} and trainer.accumulate={limits['accumulate']} disagree"
        )


def _check_node(path: str, node: Mapping[str, Any], offered: set[str]) -> type:
    """Check one ``_target_`` node and those nested in it; return its class."""
    found = target_class(str(node["_target_"]), path)
    signature = inspect.signature(found)
    parameters = {
        n: p for n, p in signature.parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    known = [name for name in parameters if name not in offered]
    try:
        hints = typing.get_type_hints(found.__init__)  # type: ignore[misc]
    except (NameError, TypeError):  # names imported for type checkers only: keys are still checked
        hints = {}
    for key, value in node.items():
        if key == "_target_":
            continue
        if key not in known:
            takes = nearest(str(key), known) or f"; it takes {', '.join(known) or 'nothing'}"
            raise ConfigError(f"{path}.{key}: {found.__name__} takes no {str(key)!r}{takes}")
        problem = mismatch(value, hints.get(str(key), Any))
        if problem:
            raise ConfigError(f"{path}.{key}: {problem}")
        for inner, child in _nested(f"{path}.{key}", value):
            _check_node(inner, child, set())
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in node and name not in offered:
            raise ConfigError(f"{path}: {found.__name__} needs {name!r}; set {path}.{name}")
    return found


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
    """Why a config value does not fit a parameter's annotation; empty where it does.

    Understands int, float, bool, str, None, unions, list[…] and dict[str, …]; a class accepts a
    nested node, and anything else passes.
    """
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        problems = [mismatch(value, option) for option in typing.get_args(annotation)]
        return "" if "" in problems else f"{value!r} is not {_describe(annotation)}"
    fits = True
    if annotation is bool:
        fits = isinstance(value, bool)
    elif annotation is int:
        fits = isinstance(value, int) and not isinstance(value, bool)
    elif annotation is float:
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    elif annotation is str:
        fits = isinstance(value, str)
    elif annotation in (None, types.NoneType):
        fits = value is None
    elif origin in (list, tuple) or annotation in (list, tuple):
        fits = isinstance(value, list)
        items = [a for a in typing.get_args(annotation) if a is not Ellipsis]
        for index, inner in enumerate(value if fits and items else []):
            problem = mismatch(inner, items[min(index, len(items) - 1)])
            if problem:
                return f"item {index + 1}: {problem}"
    elif dict in (origin, annotation):
        fits = isinstance(value, dict)
    elif inspect.isclass(annotation) and annotation not in (object, Any):
        fits = isinstance(value, dict) and "_target_" in value
    return "" if fits else f"{value!r} is not {_describe(annotation)}"


def _describe(annotation: Any) -> str:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " or ".join(_describe(a) for a in typing.get_args(annotation))
    names = {
        bool: "true or false",
        int: "an integer",
        float: "a finite number",
        str: "a text",
        types.NoneType: "null",
    }
    if annotation in names:
        return names[annotation]
    if (typing.get_origin(annotation) or annotation) in (list, tuple):
        return "a list"
    if (typing.get_origin(annotation) or annotation) is dict:
        return "a mapping"
    return f"a {getattr(annotation, '__name__', annotation)}"


def target_class(target: str, path: str) -> type:
    """The class that ``target`` names, if it is defined where classes may come from.

    Judged by the class's own ``__module__``, not by the spelling of the path: a dotted path walks
    through any module that another one has imported. Raises ConfigError.
    """
    found = _import(target, path)
    module = found.__module__
    allowed = ("speechtrain", *filter(None, os.environ.get(ALLOW_TARGETS, "").split(",")))
    if any(module == prefix or module.startswith(prefix + ".") for prefix in allowed):
        return found
    if module.startswith("torch.optim.") and issubclass(found, _import("torch.optim.Optimizer", path)):
        return found
    raise ConfigError(
        f"{path}._target_: {target} is defined in {module}, which is not allowed; "
        f"allow_targets={module} on the command line allows it"
    )


def _import(target: str, path: str) -> type:
    """Import a class by its dotted path without running anything but module imports."""
    parts = target.split(".")
    if not all(part.isidentifier() for part in parts) or len(parts) < 2:
        raise ConfigError(f"{path}._target_: {target!r} is not the dotted path of a class")
    allowed = ("speechtrain", "torch", *filter(None, os.environ.get(ALLOW_TARGETS, "").split(",")))
    if not any(target.startswith(prefix + ".") for prefix in allowed):
        # refused before anything is imported: importing a module runs it
        raise ConfigError(
            f"{path}._target_: {target} is outside speechtrain and torch.optim; "
            f"allow_targets={parts[0]} on the command line allows it"
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
            if not hasattr(found, part):
                where = getattr(found, "__name__", name)
                raise ConfigError(f"{path}._target_: {where} has no {part!r}{nearest(part, vars(found))}")
            found = getattr(found, part)
        if not inspect.isclass(found):
            raise ConfigError(f"{path}._target_: {target} is not a class")
        return found
    raise ConfigError(f"{path}._target_: there is no module {'.'.join(parts[:-1])}")


# --- building -----------------------------------------------------------------------------------


def build(config: DictConfig, group: str, **offers: Any) -> Any:
    """Construct the part of ``group``; of ``offers``, those that its constructor takes are passed, and win.

    Not ``hydra.utils.instantiate``: every level goes through ``target_class``, in the ranks too,
    and what is offered (modules, parameters) is passed on as it is, never walked as configuration.
    Raises the part's own SpeechtrainError, or ConfigError where its constructor refuses a value.
    """
    node = OmegaConf.to_container(config[group], resolve=True)
    assert isinstance(node, dict)
    return _construct(group, typing.cast("dict[str, Any]", node), offers)


def _construct(path: str, node: Mapping[str, Any], offers: Mapping[str, Any]) -> Any:
    found = target_class(str(node["_target_"]), path)
    arguments = {key: _construct_nested(f"{path}.{key}", v) for key, v in node.items() if key != "_target_"}
    taken = {name: offer for name, offer in offers.items() if name in inspect.signature(found).parameters}
    try:
        return found(**{**arguments, **taken})
    except (ValueError, TypeError, OverflowError) as error:
        message = first_line(error)
        raise ConfigError(message if message.startswith(path) else f"{path}: {message}") from error


def _construct_nested(path: str, value: Any) -> Any:
    if isinstance(value, dict):
        if "_target_" in value:
            return _construct(path, value, {})
        return {key: _construct_nested(f"{path}.{key}", inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_construct_nested(f"{path}[{index}]", inner) for index, inner in enumerate(value)]
    return value


def rehearse(config: DictConfig) -> None:
    """Build every part that costs nothing: what a constructor refuses is known before a process starts.

    Networks are built on torch's meta device, which holds no numbers; one that cannot be built there
    is left to the ranks. Trackers open files and are left to them too. Raises what ``build`` raises.
    """
    import torch  # only here: --cfg job and dry checks of the root need none

    tokenizer = build(config, "tokenizer")
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    build(config, "optimizer", params=[{"params": [weight]}])
    build(config, "schedule", steps_per_epoch=1, planned_steps=1)
    build(config, "data", tokenizer=tokenizer)
    try:
        with torch.device("meta"):
            encoder = build(config, "encoder", augment=build(config, "augment"))
            build(config, "model", tokenizer=tokenizer, encoder=encoder)
    except NotImplementedError:
        return
    except RuntimeError as error:
        if "meta" not in str(error):
            raise ConfigError(f"model or encoder: {first_line(error)}") from error
