"""Reads a config file, writes one, and resolves a config to plain containers."""

from __future__ import annotations

import os
import re
import typing
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc
from yaml import YAMLError

from speechtrain.config.migrations import FORMAT, migrate
from speechtrain.config.schema import Config
from speechtrain.config.targets import parameter_types, target_class
from speechtrain.errors import MALFORMED, ConfigError, first_line
from speechtrain.files import FilePath, absolute_path
from speechtrain.run_directory import damaged_config, is_storable, read_stored_config, with_digest


def load(path: Path) -> DictConfig:
    """Load a config file in the current format.

    Raises ConfigError if it is missing or its format is not read, RunError if it is damaged.
    """
    text = read_stored_config(path).text
    try:
        content = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
        assert isinstance(content, dict)
        migrated = migrate(typing.cast("dict[str, Any]", content), str(path))
        merged = OmegaConf.merge(OmegaConf.structured(Config), migrated)
        missing = OmegaConf.missing_keys(merged)
        if missing:
            raise ValueError(f"{min(missing)} is missing")
    except (OmegaConfBaseException, YAMLError, *MALFORMED) as error:
        raise damaged_config(path, error) from None
    assert isinstance(merged, DictConfig)
    return merged


def dump(config: DictConfig) -> str:
    """Return the config as YAML. A value from the environment is stored as ``${oc.env:NAME,default}``.

    The values of the environment may be secrets, so they are not stored. Raises ConfigError for a value that
    is derived from the environment in another way, or that does not resolve.
    """
    content = OmegaConf.to_container(config, resolve=False)
    untyped = OmegaConf.create(typing.cast("dict[str, Any]", content))  # A reference fits no typed key.
    values = resolve(untyped)
    # The replaced resolver marks each value that reads the environment, directly or through another key.
    OmegaConf.register_new_resolver("oc.env", _reference, replace=True)
    try:
        texts = resolve(untyped)
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)
    stored = _stored(values, texts, "")
    return with_digest(OmegaConf.to_yaml(OmegaConf.create({"format": FORMAT, **stored})))


def _reference(name: Any, *default: Any) -> str:
    """Return the text of a reference to the environment, in the form that is stored."""
    values = ["null" if value is None else f"'{value}'" for value in default]
    return f"${{{','.join([f'oc.env:{name}', *values])}}}"


def _stored(value: Any, text: Any, key: str) -> Any:
    """Return the stored form of the value of ``key``: its ``text``, with references to the environment.

    Without such a reference the text is equal to the value. Raises ConfigError if the value is not storable.
    """
    if isinstance(value, dict) and isinstance(text, dict) and value.keys() == text.keys():
        return {name: _stored(value[name], text[name], f"{key}.{name}") for name in value}
    if isinstance(value, list) and isinstance(text, list) and len(value) == len(text):
        return [_stored(*pair, key) for pair in zip(value, text, strict=True)]
    is_reference = value != text and isinstance(text, str) and isinstance(value, str | None)
    if not is_storable(str(text)) or (value != text and not is_reference):
        raise ConfigError(
            f"{key[1:]}: a run stores values and ${{oc.env:NAME,default}} only. Write one of them"
        )
    return text


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
    """Make the paths in ``config`` absolute in place: the values of parameters of the type ``FilePath``."""
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
    """Return a value with its path, or its several paths, absolute.

    Of a reference to the environment, the default becomes absolute unless it is null.
    """
    if isinstance(value, dict):
        if "_target_" in value:
            return value
        # the path of one source, or the paths of several sources by name
        keys = ["path"] if "path" in value else [*value]
        return value | {key: with_absolute_path(value[key]) for key in keys}
    if isinstance(value, list):
        return [with_absolute_path(item) for item in value]
    reference = re.fullmatch(r"(\$\{oc\.env:\w+,)(?!null)([^'\"{}]+)\}", str(value))
    if reference:
        return f"{reference[1]}'{absolute_path(reference[2])}'}}"
    if not isinstance(value, str) or not value or "${" in value or "://" in value or value.startswith("hf:"):
        return value
    names = [value] if os.path.exists(os.path.expanduser(value)) else value.split(",")
    return ",".join(str(absolute_path(name.strip())) for name in names)
