"""Editing of the config that a run stores: its paths, one key, or the choice of a group."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from speechtrain.config.check import mismatch
from speechtrain.config.resume_fields import flat
from speechtrain.config.schema import BORROWED_GROUPS
from speechtrain.config.stored import read_config
from speechtrain.config.targets import parameter_types, target_class
from speechtrain.errors import ConfigError, first_line, nearest
from speechtrain.runs.command_line import translate_arguments
from speechtrain.runs.compose import compose, override_value

_CHOICES = ("device", "precision", "decoder")
"""Groups whose choice may change when a trained run is opened."""


def config_at(run_dir: Path) -> DictConfig:
    """Load a run's stored config, with the paths of its present folder and of its tokenizer's copy there."""
    config = read_config(run_dir)
    relocate(config, str(config.run_dir), str(run_dir.resolve()))
    return config


def relocate(node: DictConfig, former_dir: str | None, run_dir: str) -> None:
    """Set each ``run_dir`` below ``node`` that equals ``former_dir`` to ``run_dir``. With None, set each."""
    values: Any = OmegaConf.to_container(node)
    for key, value in values.items():
        if isinstance(value, dict):
            relocate(node[key], former_dir, run_dir)
        elif key == "run_dir" and former_dir in (None, str(value)):
            node[key] = run_dir


def apply_overrides(config: DictConfig, overrides: Sequence[str], config_dir: str | None = None) -> None:
    """Set KEY=VALUE pairs in a config, as speechtrain train reads them. Raises ConfigError."""
    for override in overrides:
        key, _, text = override.partition("=")
        if key in _CHOICES and text:
            set_group(config, key, text, config_dir)
            continue
        for rewritten in translate_arguments([override]):  # ``allow_targets=`` moves to the environment
            set_key(config, key, override_value(rewritten))


def set_group(config: DictConfig, group: str, choice: str, config_dir: str | None = None) -> None:
    """Replace a group of a run's config by another choice. Its interpolations refer to the run's config."""
    node = compose([f"{BORROWED_GROUPS.get(group, group)}={choice}"], config_dir)[group]
    config[group] = OmegaConf.create(OmegaConf.to_container(node, resolve=False))


def set_key(config: DictConfig, key: str, value: Any) -> None:
    """Set one key of a run's config. Raises ConfigError for an unknown key or a value of another type."""
    try:
        parent, leaf = _parent(config, key)
        values: Any = OmegaConf.to_container(parent)
        if isinstance(values[leaf], dict) and not isinstance(value, Mapping | DictConfig):
            raise ConfigError(f"{key}: a trained run keeps its {key}. Set keys below it, as {key}.KEY=VALUE")
        OmegaConf.update(config, key, value, merge=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key}: {first_line(error)}") from None
    _check_type(parent, key, leaf)


def stored_value(config: DictConfig, key: str) -> Any:
    """Return a run's value of a key. Raises ConfigError for an unknown key."""
    parent, leaf = _parent(config, key)
    value = parent[leaf]
    if OmegaConf.is_config(value):
        return OmegaConf.to_container(value, resolve=True)
    return value


def _parent(config: DictConfig, key: str) -> tuple[DictConfig, str]:
    """Return the node of ``key`` and the last part of ``key``.

    If the key is newer than the run, this sets it to the default of the constructor.
    """
    parent_key, _, leaf = key.rpartition(".")
    parent: Any = OmegaConf.select(config, parent_key) if parent_key else config
    if isinstance(parent, DictConfig) and "_target_" in parent and not _has_key(parent, leaf):
        constructor = target_class(str(parent._target_), parent_key)
        parameter = inspect.signature(constructor).parameters.get(leaf)
        if parameter is not None and parameter.default is not parameter.empty:
            parent[leaf] = parameter.default
    if not isinstance(parent, DictConfig) or not _has_key(parent, leaf):
        raise ConfigError(f"{key}: the run's config has no such key{_nearest_key(config, key)}")
    return parent, leaf


def _has_key(node: DictConfig, key: str) -> bool:
    """Return whether a node has the key. ``in`` alone would miss a key whose value is ``???``."""
    return OmegaConf.is_missing(node, key) or key in node


def _nearest_key(config: DictConfig, key: str) -> str:
    """Return a hint with the key of ``config`` that resembles ``key``, or an empty text."""
    container = typing.cast("dict[str, Any]", OmegaConf.to_container(config, resolve=False))
    keys = []
    for name, value in flat(container).items():
        if name.rpartition(".")[2] != "_target_" and value != {}:
            keys.append(name)
    return nearest(key, keys)


def _check_type(parent: DictConfig, key: str, leaf: str) -> None:
    """Raise ConfigError if the value of ``leaf`` does not fit its constructor's parameter."""
    if "_target_" not in parent:
        return
    constructor = target_class(str(parent["_target_"]), key.rpartition(".")[0])
    values = typing.cast("dict[str, Any]", OmegaConf.to_container(parent, resolve=True))
    if problem := mismatch(values[leaf], parameter_types(constructor).get(leaf, Any)):
        raise ConfigError(f"{key}: {problem}")
