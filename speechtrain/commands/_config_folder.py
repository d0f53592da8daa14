"""What the YAML files of ``--config-dir`` may set: nothing that Hydra or a launcher runs.

Hydra composes every config in one method and reads every file in another, here with checks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.utils import create_config_search_path
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from speechtrain.commands._init_from import offer_finetuned
from speechtrain.config.resolved import bounded
from speechtrain.config.resume_fields import flat, key_of
from speechtrain.errors import ConfigError, one_line
from speechtrain.files import whole_path, yaml_text

_SETTABLE = ("sweep.", "run.", "sweeper.params")
_COMPUTED = ("overrides.", "runtime.", "searchpath", "job.override_dirname")  # by Hydra, in composing
COMMANDS = {"program", "python", "options", "pod", "image", "hostfile", "env_from_secrets", "service_account"}
"""Keys of launchers that name or change what is run, where, and with which rights."""

_compose, _read = ConfigLoaderImpl.load_configuration, ConfigRepository.load_config


def _composed(
    self: Any, config_name: str | None, overrides: list[str], *rest: Any, **more: Any
) -> DictConfig:
    offer_finetuned(overrides)
    config = _compose(self, config_name, overrides, *rest, **more)
    folders = [one.path for one in config.hydra.runtime.config_sources if one.schema == "file"]
    if folders and config_name:  # without our primary config, another program composes
        _refuse_settings(config, _settings(config, overrides, *rest, **more), folders[0])
        refuse_commands(config, overrides, folders[0])
    return config


def _settings(config: DictConfig, overrides: Sequence[str], *rest: Any, **more: Any) -> dict[str, Any]:
    """Hydra's settings without the folder: those of the command line, the package and Hydra's own choices."""
    chosen = [f"{k}={v}" for k, v in config.hydra.runtime.choices.items() if k[:6] == "hydra/" and v]
    typed = [o for o in overrides if key_of(o)[:6] == "hydra." and key_of(o) != "hydra.searchpath"]
    loader = ConfigLoaderImpl(create_config_search_path("pkg://speechtrain.conf"))
    return _flat(_compose(loader, "config", [*chosen, *typed], *rest, **more).hydra)


def _flat(node: DictConfig) -> dict[str, Any]:
    return flat(dict(OmegaConf.to_container(node, resolve=False)))  # type: ignore[arg-type]


def _refuse_settings(config: DictConfig, ours: dict[str, Any], folder: str) -> None:
    """Refuse a setting of Hydra that differs from ``ours`` in another key than a folder's own."""
    found = _flat(config.hydra)
    for key in {**ours, **found}:
        if not key.startswith((*_SETTABLE, *_COMPUTED)) and found.get(key) != ours.get(key):
            raise ConfigError(f"hydra.{key}: {folder} sets it, but it can run any code; remove it there")
    with bounded(), contextlib.suppress(OmegaConfBaseException):
        OmegaConf.to_container(config.hydra.run, resolve=True)
        OmegaConf.to_container(config.hydra.sweep, resolve=True)


def refuse_commands(config: DictConfig, typed: Iterable[str], source: object) -> None:
    """Refuse what a launcher would run, unless it is typed or the package's: not that of ``source``."""
    try:
        with bounded():
            node = config.get("launcher")  # in its place: its values may refer to others
            launcher = OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else {}
    except OmegaConfBaseException:  # nor can it be used
        return
    hosts = whole_path(os.environ.get("HOSTFILE", "hostfile"))  # the default of launcher=ssh
    for key, value in flat({"launcher": cast("dict[str, Any]", launcher)}).items():
        names = key.split(".")
        node = next((".".join(names[: i + 1]) for i, name in enumerate(names) if name in COMMANDS), key)
        is_typed = any(f"{key_of(one)}.".startswith(f"{node}.") for one in typed)
        is_usual = value in (None, [], {}, "python") or (
            node[-9:] == ".hostfile" and whole_path(str(value)) == hosts
        )
        if COMMANDS & {*names} and not is_usual and not is_typed:
            raise ConfigError(f"{node}: {source} sets it, but it can run code; type {node}=…")


def _read_small(self: ConfigRepository, config_path: str) -> ConfigResult | None:
    folders = [source for source in self.get_sources() if source.scheme() == "file"]
    path = Path()
    try:
        for path in [Path(one.path, one._normalize_file_name(config_path)) for one in folders]:
            if path.exists():
                yaml_text(path)
    except (OSError, ValueError, YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {one_line(str(error), 300)}") from None
    return _read(self, config_path)


ConfigLoaderImpl.load_configuration = _composed  # type: ignore[method-assign]
ConfigRepository.load_config = _read_small  # type: ignore[method-assign]
