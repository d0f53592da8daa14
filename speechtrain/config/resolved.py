"""Reads a config file, writes one, and resolves a config to plain containers."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from speechtrain.config.migrations import FORMAT, migrate
from speechtrain.config.schema import Config
from speechtrain.errors import ConfigError, first_line, one_line


def load(path: Path) -> DictConfig:
    """Load a config file of this or an earlier release. Raises ConfigError, which names the file."""
    try:
        plain = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        if not isinstance(plain, dict):
            raise ConfigError(f"{path} is not a mapping of keys")
        migrated = migrate(typing.cast("dict[str, Any]", plain), str(path))
        merged = OmegaConf.merge(OmegaConf.structured(Config), migrated)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; is {path.parent} a run directory?") from None
    except (OmegaConfBaseException, OSError, ValueError, YAMLError) as error:
        raise ConfigError(f"{path}: {one_line(str(error), 300)}") from None
    assert isinstance(merged, DictConfig)
    return merged


def dump(config: DictConfig) -> str:
    """The config as YAML, resolved except for values from the environment, which may be secrets."""
    raw = OmegaConf.to_container(config, resolve=False)
    # resolved again with a marker for such values: a value that refers to one then has the marker too
    marked = OmegaConf.to_container(OmegaConf.create(_mark(raw)), resolve=True)
    kept = _keep_environment(raw, marked, resolved(config))
    return OmegaConf.to_yaml(OmegaConf.create({"format": FORMAT, **kept}))


def resolved(config: DictConfig) -> dict[str, Any]:
    """The config as plain containers. Raises ConfigError for a key that is missing or does not resolve."""
    try:
        missing = sorted(OmegaConf.missing_keys(config))
        if missing:
            raise ConfigError(f"{missing[0]} is not set; add {missing[0]}=VALUE to the command line")
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
