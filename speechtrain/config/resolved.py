"""Reads a config file, writes one, and resolves a config to plain containers."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import Container, DictConfig, Node, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc
from yaml import YAMLError

from speechtrain.config.migrations import FORMAT, migrate
from speechtrain.config.schema import Config
from speechtrain.config.targets import parameter_types, target_class
from speechtrain.errors import ConfigError, RunError, first_line, one_line
from speechtrain.files import FilePath, whole_path, yaml_text


def load(path: Path) -> DictConfig:
    """Load a config file of this or an earlier release.

    Raises ConfigError if it is missing or of a newer release, RunError if it is damaged.
    """
    try:
        _verify(text := yaml_text(path, follow=False))
        plain = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
        if not isinstance(plain, dict):
            raise ValueError("it is not a mapping of keys")
        migrated = migrate(typing.cast("dict[str, Any]", plain), str(path))
        merged = OmegaConf.merge(OmegaConf.structured(Config), migrated)
        with bounded():  # it resolves every value
            missing = OmegaConf.missing_keys(merged)
        if missing:
            raise ValueError(f"{min(missing)} is missing")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; is {path.parent} a run directory?") from None
    except (OmegaConfBaseException, OSError, OverflowError, RecursionError, ValueError, YAMLError) as error:
        cause = f"{path} is damaged ({one_line(str(error), 300)})"
        raise RunError(f"{cause}; delete it, and the command that started the run continues it") from None
    assert isinstance(merged, DictConfig)
    return merged


def dump(config: DictConfig) -> str:
    """The config as YAML, resolved except for values from the environment, which may be secrets.

    The first line is a comment with the sha256 of the others, by which ``load`` knows a damaged file.
    """
    plain, read = resolved(config), []

    def noted(*arguments: Any) -> Any:
        read.append(arguments[0])
        return oc.env(*arguments)

    # OmegaConf itself says which values read the environment: directly, nested, by another key, however spelt
    with _environment(noted):
        kept = _kept({"": config}, "", OmegaConf.to_container(config, resolve=False), plain, read)
    text = OmegaConf.to_yaml(OmegaConf.create({"format": FORMAT, **kept}))
    return f"{_DIGEST}{hashlib.sha256(text.encode()).hexdigest()}\n{text}"


_DIGEST = "# sha256 of what follows: "


def _verify(text: str) -> None:
    """Raise ValueError if a file does not match its own digest; those of 0.2 and before have none."""
    first, _, rest = text.partition("\n")
    if first.startswith(_DIGEST) and not first.endswith(hashlib.sha256(rest.encode()).hexdigest()):
        raise ValueError("it does not match the sha256 in its first line, which who edits it must remove")


def of_a_stranger(node: Any, source: object) -> dict[str, Any]:
    """A group's node of a file that may be a stranger's, as plain containers, for Hydra to compose.

    Raises ConfigError that names ``source`` for one that reads the environment or chooses other groups.
    """

    def refused(name: str, *default: Any) -> Any:
        raise ValueError(f"it reads {name} of the environment")

    try:
        with _environment(refused):
            plain = resolved(node if isinstance(node, DictConfig) else OmegaConf.create(dict(node)))
    except (ConfigError, OmegaConfBaseException, TypeError, ValueError) as error:
        raise ConfigError(f"{source}: {one_line(str(error), 300)}; write values there") from None
    if "defaults" in plain:
        raise ConfigError(f"{source}: it has a key 'defaults', which would choose other parts; remove it")
    return plain


@contextlib.contextmanager
def _environment(resolver: Any) -> Iterator[None]:
    """A context in which ``resolver`` reads the environment for configs."""
    OmegaConf.register_new_resolver("oc.env", resolver, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def _kept(node: Any, at: Any, raw: Any, plain: Any, read: list[str]) -> Any:
    """``plain``, a value of ``node``; ``raw`` of one that reads the environment, which ``read`` notes."""
    if isinstance(raw, dict):
        return {key: _kept(node[at], key, raw[key], plain[key], read) for key in plain}
    if isinstance(raw, list):
        return [_kept(node[at], number, raw[number], plain[number], read) for number in range(len(raw))]
    read.clear()
    if OmegaConf.is_config(found := node[at]):
        OmegaConf.to_container(found, resolve=True)
    return raw if read else plain


def resolved(config: DictConfig) -> dict[str, Any]:
    """The config as plain containers. Raises ConfigError for a key that is missing or does not resolve."""
    try:
        with bounded():
            missing = sorted(OmegaConf.missing_keys(config))
            if missing:
                raise ConfigError(f"{missing[0]} is not set; add {missing[0]}=VALUE to the command line")
            plain = OmegaConf.to_container(config, resolve=True, enum_to_str=True)
    except (OmegaConfBaseException, RecursionError) as error:
        key = getattr(error, "full_key", "") or "config"
        raise ConfigError(f"{key}: {first_line(error)}") from None
    assert isinstance(plain, dict)
    return typing.cast("dict[str, Any]", plain)


_MOST_RESOLVED = 100_000  # characters of interpolations, which OmegaConf parses in 40 µs each
_MOST_CHARACTERS = 10**6  # of a value
_TOO_OFTEN = "its values repeat one another too often"


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """A context in which values that refer to one another raise RecursionError instead of filling memory."""
    resolve: Any = Container._resolve_interpolation_from_parse_tree
    left = [_MOST_RESOLVED]

    def resolved_one(*args: Any, **kwargs: Any) -> Any:
        left[0] -= len(str(kwargs["value"]._value()))
        found = resolve(*args, **kwargs) if left[0] > 0 else None
        if isinstance(found, Node) and not OmegaConf.is_config(found):
            left[0] *= len(str(found._value())) <= _MOST_CHARACTERS
        if left[0] <= 0:
            raise RecursionError(_TOO_OFTEN)
        return found

    Container._resolve_interpolation_from_parse_tree = resolved_one  # type: ignore[method-assign]
    try:
        yield
    finally:
        Container._resolve_interpolation_from_parse_tree = resolve  # type: ignore[method-assign]
    if left[0] <= 0:  # OmegaConf may have taken the error for its own
        raise RecursionError(_TOO_OFTEN)


def with_whole_paths(config: DictConfig, path: str = "") -> DictConfig:
    """``config`` with absolute paths, in place: those of parameters that are annotated as ``FilePath``."""
    found = target_class(str(config._target_), path) if "_target_" in config else None
    hints = {"init_from": FilePath} if found is None else parameter_types(found, include_extras=True)
    for key in [key for key in map(str, config) if not OmegaConf.is_missing(config, key)]:
        if str(FilePath) in str(hints.get(key)):
            raw: Any = config._get_node(key)
            config[key] = _whole(OmegaConf.to_container(raw) if OmegaConf.is_config(raw) else raw._value())
        if not OmegaConf.is_interpolation(config, key) and isinstance(config[key], DictConfig):
            with_whole_paths(config[key], f"{path}.{key}".lstrip("."))
    return config


def _whole(value: Any) -> Any:
    """A path, or several, absolute; of one from the environment, the default (no null) is."""
    if isinstance(value, dict):
        paths = () if "_target_" in value else ("path",) if "path" in value else value
        return {**value, **{key: _whole(value[key]) for key in paths}}
    if isinstance(value, list):
        return [_whole(one) for one in value]
    if found := re.fullmatch(r"(\$\{oc\.env:\w+,)(?!null)([^'\"{}]+)\}", str(value)):
        return f"{found[1]}'{whole_path(found[2])}'}}"
    if not isinstance(value, str) or not value or "${" in value or "://" in value or value.startswith("hf:"):
        return value
    parts = value.split(",") if not os.path.exists(os.path.expanduser(value)) else [value]
    return ",".join(str(whole_path(part.strip())) for part in parts)
