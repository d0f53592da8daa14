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
from speechtrain.files import FilePath, whole_path
from speechtrain.run_directory import damaged_config, is_storable, read_stored_config, with_digest


def load(path: Path) -> DictConfig:
    """Load a config file in the current format.

    Raises ConfigError if it is missing or its format is not read, RunError if it is damaged.
    """
    text = read_stored_config(path).text
    try:
        plain = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
        assert isinstance(plain, dict)
        migrated = migrate(typing.cast("dict[str, Any]", plain), str(path))
        merged = OmegaConf.merge(OmegaConf.structured(Config), migrated)
        if missing := OmegaConf.missing_keys(merged):
            raise ValueError(f"{min(missing)} is missing")
    except (OmegaConfBaseException, YAMLError, *MALFORMED) as error:
        raise damaged_config(path, error) from None
    assert isinstance(merged, DictConfig)
    return merged


def dump(config: DictConfig) -> str:
    """The config as YAML: values, and ``${oc.env:NAME,default}`` for those from the environment.

    The environment's values may be secrets, so they are not stored. Raises ConfigError for a value that is
    derived from them in another way, or that does not resolve.
    """
    plain = OmegaConf.to_container(config, resolve=False)
    untyped = OmegaConf.create(typing.cast("dict[str, Any]", plain))  # A reference fits no typed key.
    values = resolved(untyped)
    # OmegaConf itself finds the values that read the environment, also by another key and however spelt.
    OmegaConf.register_new_resolver("oc.env", _reference, replace=True)
    try:
        texts = resolved(untyped)
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)
    stored = _stored(values, texts, "")
    return with_digest(OmegaConf.to_yaml(OmegaConf.create({"format": FORMAT, **stored})))


def _reference(name: Any, *default: Any) -> str:
    """The text of a reference to the environment, in the form that is stored."""
    values = ["null" if value is None else f"'{value}'" for value in default]
    return f"${{{','.join([f'oc.env:{name}', *values])}}}"


def _stored(value: Any, text: Any, key: str) -> Any:
    """``value`` of ``key``, or its ``text`` if that has references to the environment."""
    if isinstance(value, dict) and isinstance(text, dict) and value.keys() == text.keys():
        return {name: _stored(value[name], text[name], f"{key}.{name}") for name in value}
    if isinstance(value, list) and isinstance(text, list) and len(value) == len(text):
        return [_stored(*pair, key) for pair in zip(value, text, strict=True)]
    is_reference = value != text and isinstance(text, str) and isinstance(value, str | None)
    if not is_storable(str(text)) or (value != text and not is_reference):
        raise ConfigError(
            f"{key[1:]}: a run stores values and ${{oc.env:NAME,default}} only, so write one of them"
        )
    return text


def resolved(config: DictConfig) -> dict[str, Any]:
    """The config as plain containers. Raises ConfigError for a key that is missing or does not resolve."""
    try:
        missing = sorted(OmegaConf.missing_keys(config))
        if missing:
            raise ConfigError(f"{missing[0]} is not set; add {missing[0]}=VALUE to the command line")
        plain = OmegaConf.to_container(config, resolve=True, enum_to_str=True)
    except (OmegaConfBaseException, RecursionError) as error:
        key = getattr(error, "full_key", "") or "config"
        raise ConfigError(f"{key}: {first_line(error)}") from None
    assert isinstance(plain, dict)
    return typing.cast("dict[str, Any]", plain)


def with_whole_paths(config: DictConfig, path: str = "") -> DictConfig:
    """``config`` with absolute paths, in place: those of parameters that are annotated as ``FilePath``."""
    found = target_class(str(config._target_), path) if "_target_" in config else None
    hints = {"init_from": FilePath} if found is None else parameter_types(found, include_extras=True)
    raw: Any = OmegaConf.to_container(config)
    for key in [key for key in raw if not OmegaConf.is_missing(config, key)]:
        if str(FilePath) in str(hints.get(key)):
            config[key] = whole_value(raw[key])
        if not OmegaConf.is_interpolation(config, key) and isinstance(config[key], DictConfig):
            with_whole_paths(config[key], f"{path}.{key}".lstrip("."))
    return config


def whole_value(value: Any) -> Any:
    """A path, or several, absolute; of one from the environment, the default (no null) is."""
    if isinstance(value, dict):
        paths = () if "_target_" in value else ("path",) if "path" in value else value
        return {**value, **{key: whole_value(value[key]) for key in paths}}
    if isinstance(value, list):
        return [whole_value(one) for one in value]
    if found := re.fullmatch(r"(\$\{oc\.env:\w+,)(?!null)([^'\"{}]+)\}", str(value)):
        return f"{found[1]}'{whole_path(found[2])}'}}"
    if not isinstance(value, str) or not value or "${" in value or "://" in value or value.startswith("hf:"):
        return value
    parts = value.split(",") if not os.path.exists(os.path.expanduser(value)) else [value]
    return ",".join(str(whole_path(part.strip())) for part in parts)
