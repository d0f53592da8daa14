"""Editing of the config that a run stores: its paths, one key, or the choice of a group."""

from __future__ import annotations

import copy
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from speechtrain.data.sources import with_former_paths
from speechtrain.errors import ConfigError, first_line, nearest
from speechtrain.run_directory import flat
from speechtrain.start.check_keys import mismatch
from speechtrain.start.command_line import translate_arguments
from speechtrain.start.compose import compose, override_value
from speechtrain.start.resolved import with_absolute_path
from speechtrain.start.schema import BORROWED_GROUPS
from speechtrain.start.stored import read_config
from speechtrain.start.targets import parameter_types, parameters_of, target_class

_REPLACEABLE_GROUPS = ("device", "precision", "decoder")
"""Groups whose choice may change when a trained run is opened."""


def config_at(run_dir: Path) -> DictConfig:
    """Return the stored config of the run in ``run_dir``.

    Paths of the run's former directory, such as the path of its tokenizer, are changed to ``run_dir``.
    """
    config = read_config(run_dir)
    relocate(config, str(config.run_dir), str(run_dir.resolve()))
    return config


def relocate(node: DictConfig, former_dir: str | None, run_dir: str) -> None:
    """Set each key ``run_dir`` in ``node`` to the new ``run_dir`` if its value is ``former_dir``.

    ``former_dir=None`` means any value.
    """
    values: Any = OmegaConf.to_container(node)
    for key, value in values.items():
        if isinstance(value, dict):
            relocate(node[key], former_dir, run_dir)
        elif key == "run_dir" and former_dir in (None, str(value)):
            node[key] = run_dir


def apply_overrides(config: DictConfig, overrides: Sequence[str], config_dir: str | None = None) -> None:
    """Apply ``KEY=VALUE`` overrides to a config, with the syntax of speechtrain train. Raises ConfigError."""
    for override in overrides:
        key, _, text = override.partition("=")
        if key in _REPLACEABLE_GROUPS and text:
            set_group(config, key, text, config_dir)
            continue
        # The list has one element, or none for ``allow_targets=``, which becomes an environment variable.
        for translated in translate_arguments([override]):
            value = override_value(translated)
            # The held-out recordings stay if data.train has moved.
            if key != "data.train" or not move_sources(config, key, {key: value}):
                set_key(config, key, value)


def set_group(config: DictConfig, group: str, choice: str, config_dir: str | None = None) -> None:
    """Replace a group of a run's config by another choice.

    Interpolations in the new group stay unresolved, so they refer to keys of the run's config.
    """
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


def move_sources(config: DictConfig, key: str, changes: Mapping[str, Any]) -> bool:
    """Set the source ``key`` to the places to which its data has moved. Return whether this is possible.

    ``changes`` has new values of ``key`` and of keys below it. If they differ from the stored values in more
    than paths, nothing is set. The stored paths stay as ``moved_from``, so that the ids of recordings stay.
    """
    former = stored_value(config, key)
    changed_config = copy.deepcopy(config)
    for changed_key, value in changes.items():
        OmegaConf.update(changed_config, changed_key, with_absolute_path(value), merge=False)
    moved = with_former_paths(stored_value(changed_config, key), former)
    if moved is not None:
        OmegaConf.update(config, key, moved, merge=False)
    return moved is not None


def stored_value(config: DictConfig, key: str) -> Any:
    """Return the value of a key in a run's config, with resolved interpolations.

    Raises ConfigError for an unknown key.
    """
    parent, leaf = _parent(config, key)
    value = parent[leaf]
    if OmegaConf.is_config(value):
        return OmegaConf.to_container(value, resolve=True)
    return value


def _parent(config: DictConfig, key: str) -> tuple[DictConfig, str]:
    """Return the node that contains ``key``, and the last part of ``key``.

    A key that the constructor got after the run started is first set to its default. Raises ConfigError for
    an unknown key.
    """
    parent_key, _, leaf = key.rpartition(".")
    parent: Any = OmegaConf.select(config, parent_key) if parent_key else config
    if isinstance(parent, DictConfig) and "_target_" in parent and not _has_key(parent, leaf):
        constructor = target_class(str(parent._target_), parent_key)
        parameter = parameters_of(constructor).get(leaf)
        if parameter is not None and parameter.default is not parameter.empty:
            parent[leaf] = parameter.default
    if not isinstance(parent, DictConfig) or not _has_key(parent, leaf):
        raise ConfigError(f"{key}: the run's config has no such key{_nearest_key(config, key)}")
    return parent, leaf


def _has_key(node: DictConfig, key: str) -> bool:
    """Return whether ``node`` has ``key``."""
    return OmegaConf.is_missing(node, key) or key in node  # ``in`` is False for a key whose value is ``???``.


def _nearest_key(config: DictConfig, key: str) -> str:
    """Return a hint with the key of ``config`` that is most similar to ``key``, or an empty text."""
    values = typing.cast("dict[str, Any]", OmegaConf.to_container(config, resolve=False))
    candidates = []
    for name, value in flat(values).items():
        if name.rpartition(".")[2] != "_target_" and value != {}:
            candidates.append(name)
    return nearest(key, candidates)


def _check_type(parent: DictConfig, key: str, leaf: str) -> None:
    """Raise ConfigError if the value of ``key`` does not have the type of the constructor's parameter.

    ``parent`` is the node that contains the key, and ``leaf`` is the last part of the key.
    """
    if "_target_" not in parent:
        return
    constructor = target_class(str(parent["_target_"]), key.rpartition(".")[0])
    values = typing.cast("dict[str, Any]", OmegaConf.to_container(parent, resolve=True))
    parameter_type = parameter_types(constructor).get(leaf, Any)
    problem = mismatch(values[leaf], parameter_type)
    if problem:
        raise ConfigError(f"{key}: {problem}")
