"""Loads and stores a run's config, resolves a config to plain containers, and makes its paths absolute."""

from __future__ import annotations

import math
import os
import re
import typing
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc
from yaml import YAMLError

from speechtrain.errors import MALFORMED, ConfigError, first_line
from speechtrain.files import FilePath, absolute_path
from speechtrain.run_directory import damaged_config, is_storable, read_stored_config, with_digest
from speechtrain.start.schema import Config
from speechtrain.start.targets import parameter_types, target_class

_FORMAT = 3
"""The format of ``config.yaml``, which is its first number."""


def load(path: Path) -> DictConfig:
    """Return the config in a file of a run.

    Raises ConfigError if the file is missing or has another format, RunError if it is damaged.
    """
    text = read_stored_config(path).text
    try:
        content = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
        assert isinstance(content, dict)
        number = content.pop("format", None)
        if number != _FORMAT:
            raise ConfigError(
                f"{path} has format {number!r:.40}, which this version does not read. "
                "Use the version that run.json names, or make the run again with run_dir=NEW"
            )
        merged = OmegaConf.merge(OmegaConf.structured(Config), content)
        missing = OmegaConf.missing_keys(merged)
        if missing:
            raise ValueError(f"{min(missing)} is missing")
    except (OmegaConfBaseException, YAMLError, *MALFORMED) as error:
        raise damaged_config(path, error) from None
    assert isinstance(merged, DictConfig)
    return merged


def dump(config: DictConfig) -> str:
    """Return the config as YAML for the file of a run.

    Values are resolved. A value from the environment may be a secret, so ``${oc.env:NAME,default}`` is stored
    instead. Raises ConfigError for a value that is derived from the environment in another way, or that does
    not resolve.
    """
    content = OmegaConf.to_container(config, resolve=False)
    # Without the types of the schema, the text of a reference may replace a value of any type.
    untyped = OmegaConf.create(typing.cast("dict[str, Any]", content))
    values = resolve(untyped)
    # A second resolution returns references for all values that read the environment, directly or through
    # another key.
    OmegaConf.register_new_resolver("oc.env", _reference, replace=True)
    try:
        values_with_references = resolve(untyped)
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)
    checked = _check_storable(values, values_with_references, "")
    return with_digest(OmegaConf.to_yaml(OmegaConf.create({"format": _FORMAT, **checked})))


def _reference(name: Any, *default: Any) -> str:
    """Return the text of a reference to the environment, in the form that is stored.

    This replaces the resolver ``oc.env``. ``default`` has at most one value.
    """
    values = ["null" if value is None else f"'{value}'" for value in default]
    return f"${{{','.join([f'oc.env:{name}', *values])}}}"


def _check_storable(value: Any, stored: Any, key: str) -> Any:
    """Return ``stored``, the value of ``key`` with references to the environment.

    ``value`` is the same value with the references resolved. Raises ConfigError if they differ by more than
    one reference in the place of a text or null.
    """
    if isinstance(value, dict) and isinstance(stored, dict) and value.keys() == stored.keys():
        return {name: _check_storable(value[name], stored[name], f"{key}.{name}") for name in value}
    if isinstance(value, list) and isinstance(stored, list) and len(value) == len(stored):
        return [_check_storable(*pair, key) for pair in zip(value, stored, strict=True)]
    if isinstance(value, float) and math.isnan(value):
        raise ConfigError(f"{key[1:]}: nan is no value that a run stores. As a text, write \"'nan'\"")
    is_reference = value != stored and isinstance(stored, str) and isinstance(value, str | None)
    if not is_storable(str(stored)) or (value != stored and not is_reference):
        raise ConfigError(
            f"{key[1:]}: a run stores values and ${{oc.env:NAME,default}} only. Write one of them"
        )
    return stored


def resolve(config: DictConfig) -> dict[str, Any]:
    """Return the config as plain containers. Raises ConfigError for a missing or unresolvable key."""
    try:
        missing = sorted(OmegaConf.missing_keys(config))
        if missing:
            raise ConfigError(f"{missing[0]} is not set. Add {missing[0]}=VALUE to the command line")
        values = OmegaConf.to_container(config, resolve=True, enum_to_str=True)
    except (OmegaConfBaseException, RecursionError) as error:
        key = getattr(error, "full_key", "") or "config"
        raise ConfigError(f"{key}: {first_line(error)}") from None
    assert isinstance(values, dict)
    return typing.cast("dict[str, Any]", values)


def with_absolute_paths(config: DictConfig, path: str = "") -> DictConfig:
    """Make the paths in ``config`` absolute in place, and return it.

    Paths are the values of constructor parameters of the type ``FilePath``, and ``init_from``. ``path`` is
    the key of ``config`` in the whole config.
    """
    annotations: dict[str, Any] = {"init_from": FilePath}
    if "_target_" in config:
        annotations = parameter_types(target_class(str(config._target_), path), include_extras=True)
    values: Any = OmegaConf.to_container(config)
    for key, value in values.items():
        if OmegaConf.is_missing(config, key):
            continue
        if str(FilePath) in str(annotations.get(key)):
            config[key] = with_absolute_path(value)
        if not OmegaConf.is_interpolation(config, key) and isinstance(config[key], DictConfig):
            with_absolute_paths(config[key], f"{path}.{key}".lstrip("."))
    return config


def with_absolute_path(value: Any) -> Any:
    """Return ``value`` with absolute paths.

    ``value`` is a path, several paths in a list or with commas between them, or a mapping with the path of a
    source or the paths of several sources. In a reference to the environment, the default becomes absolute
    unless it is null. Other values are returned unchanged.
    """
    if isinstance(value, dict):
        if "_target_" in value:
            return value
        # One source has its path as ``path``, and several sources have their paths by name.
        keys = ["path"] if "path" in value else [*value]
        return value | {key: with_absolute_path(value[key]) for key in keys}
    if isinstance(value, list):
        return [with_absolute_path(item) for item in value]
    reference = re.fullmatch(r"(\$\{oc\.env:\w+,)(?!null)([^'\"{}]+)\}", str(value))
    if reference:
        return f"{reference[1]}'{absolute_path(reference[2])}'}}"
    if not isinstance(value, str) or not value or "${" in value or "://" in value or value.startswith("hf:"):
        return value
    # A comma separates paths unless it belongs to the name of an existing file.
    if os.path.exists(os.path.expanduser(value)):
        return str(absolute_path(value))
    return ",".join(str(absolute_path(path.strip())) for path in value.split(","))
