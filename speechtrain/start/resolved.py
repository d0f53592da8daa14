"""Loads and stores a run's config, resolves a config to plain containers, and makes its paths absolute."""

from __future__ import annotations

import contextlib
import math
import os
import re
import typing
from collections.abc import Iterator
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
_REFERENCE = re.compile(
    r"""
    \$\{oc\.env:(?P<variable>\w+),[ ]*
    (?:
        '(?P<single_quoted>[^'\\$]*)'
        | "(?P<double_quoted>[^"'\\$]*)"
        | (?P<unquoted>[^'"\\{}[\],]*)  # neither quotes nor brackets, and one argument
    )
    [ ]*\}
    """,
    re.VERBOSE,
)
"""A reference to an environment variable with a default. A default that no run can store does not match."""


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
    # A config without the types of the schema. With them, a reference, which is a text, could not take the
    # place of a number below.
    untyped = OmegaConf.create(typing.cast("dict[str, Any]", content))
    values = resolve(untyped)
    with _references_to_environment():
        stored_values = resolve(untyped)
    _check_storable("", values, stored_values)
    return with_digest(OmegaConf.to_yaml(OmegaConf.create({"format": _FORMAT, **stored_values})))


@contextlib.contextmanager
def _references_to_environment() -> Iterator[None]:
    """Return a context in which ``${oc.env:NAME,default}`` resolves to its own text, in the form to store.

    So all values that read the environment become references, also those that read it through another key.
    OmegaConf has one table of resolvers for the whole process, so no other thread may resolve a config here.
    """

    def own_text(name: Any, *default: Any) -> str:
        if not default:
            return "${oc.env:" + str(name) + "}"
        return _reference(name, default[0])

    OmegaConf.register_new_resolver("oc.env", own_text, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def _reference(variable: str, default: Any) -> str:
    """Return a reference to an environment variable with a default, in the form to store."""
    argument = "null" if default is None else f"'{default}'"
    return "${oc.env:" + variable + "," + argument + "}"


def _check_storable(key: str, value: Any, stored: Any) -> None:
    """Raise ConfigError for a value that a run cannot store.

    ``stored`` is the ``value`` of ``key`` with references to the environment.
    """
    if isinstance(value, dict) and isinstance(stored, dict) and value.keys() == stored.keys():
        for name in value:
            _check_storable(f"{key}.{name}".lstrip("."), value[name], stored[name])
        return
    if isinstance(value, list) and isinstance(stored, list) and len(value) == len(stored):
        for index, item in enumerate(value):
            _check_storable(key, item, stored[index])
        return
    if isinstance(value, float) and math.isnan(value):
        raise ConfigError(f"{key}: nan is no value that a run stores. As a text, write \"'nan'\"")
    # If the two differ, the value comes from the environment. A reference may stand for a text or for null.
    is_text_for_text_or_null = isinstance(stored, str) and isinstance(value, str | None)
    is_allowed = value == stored or is_text_for_text_or_null
    if not is_allowed or not is_storable(str(stored)):
        raise ConfigError(f"{key}: a run stores values and ${{oc.env:NAME,default}} only. Write one of them")


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


def with_absolute_paths(config: DictConfig, group_key: str = "") -> DictConfig:
    """Make the paths in ``config`` absolute in place, and return it.

    Paths are the values of constructor parameters of the type ``FilePath``, and the root key ``init_from``.
    ``group_key`` is the key of ``config`` in the whole config, or empty for the whole config itself.
    """
    annotations: dict[str, Any] = {}
    if not group_key:
        annotations["init_from"] = FilePath
    if "_target_" in config:
        annotations = parameter_types(target_class(str(config._target_), group_key), include_extras=True)
    values: Any = OmegaConf.to_container(config)
    for key, value in values.items():
        if OmegaConf.is_missing(config, key):
            continue
        if _has_paths(annotations.get(key)):
            config[key] = with_absolute_path(value)
        if OmegaConf.is_interpolation(config, key):  # A read of the key would resolve it.
            continue
        node = config[key]
        if isinstance(node, DictConfig):
            with_absolute_paths(node, f"{group_key}.{key}".lstrip("."))
    return config


def _has_paths(annotation: Any) -> bool:
    """Return whether a type is ``FilePath``, or contains it, as in ``list[FilePath] | None``."""
    return annotation == FilePath or any(map(_has_paths, typing.get_args(annotation)))


def with_absolute_path(value: Any) -> Any:
    """Return the value of a key for paths with absolute paths. ``value`` has one of five forms:

    - a text: a path, or several paths with commas between them,
    - a list of values,
    - a source, which is a mapping with the key ``path``,
    - a mapping with ``_target_``, which names a class instead of a path. It is returned unchanged,
    - a mapping of values by name.

    Other values, such as null, are returned unchanged.
    """
    if isinstance(value, str):
        return _absolute_text(value)
    if isinstance(value, list):
        return [with_absolute_path(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "_target_" in value:
        return value
    if "path" in value:
        return value | {"path": with_absolute_path(value["path"])}
    return {name: with_absolute_path(named_value) for name, named_value in value.items()}


def _absolute_text(text: str) -> str:
    """Return a text with absolute paths.

    In a reference to the environment, the default becomes absolute, unless it is null or an address. Other
    references, and addresses such as ``hf:NAME``, are returned unchanged.
    """
    reference = _REFERENCE.fullmatch(text)
    if reference:
        return _with_absolute_default(reference)
    if not text or "${" in text or "://" in text or text.startswith("hf:"):
        return text
    # A comma separates paths unless it belongs to the name of an existing file.
    if os.path.exists(os.path.expanduser(text)):
        return str(absolute_path(text))
    paths = [str(absolute_path(path.strip())) for path in text.split(",")]
    return ",".join(paths)


def _with_absolute_default(reference: re.Match[str]) -> str:
    """Return a reference to the environment, a match of ``_REFERENCE``, whose default has absolute paths."""
    unquoted = reference["unquoted"]
    if unquoted is not None and unquoted.strip().lower() in ("", "null"):  # no default, or null
        return reference[0]
    default = unquoted or reference["single_quoted"] or reference["double_quoted"] or ""
    return _reference(reference["variable"], _absolute_text(default.strip()))
