"""Hydra, once, in the parent: overrides in, one config a job out, and its complaints in one line."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from speechtrain.config import fingerprint, first_line
from speechtrain.errors import ConfigError, nearest

CONFIG_PATH = "pkg://speechtrain.conf"
RunJob = Callable[[DictConfig, Path, list[str]], float | None]

# each with whether a value follows it
_FLAGS = {
    **dict.fromkeys(("--multirun", "-m", "--resolve", "--run", "-r"), False),
    **dict.fromkeys(("--cfg", "-c", "--config-dir", "-cd", "--package", "-p", "--info", "-i"), True),
    **dict.fromkeys(("--shell-completion", "-sc"), True),
}


def _run_name(*, _root_: DictConfig) -> str:
    choices = _root_.hydra.runtime.choices
    return f"{choices.model}-{choices.data}-{fingerprint(_plain(_root_))}"


def _plain(root: DictConfig) -> dict[str, object]:
    """The job's config while Hydra's node is still in it; what is not set yet stays as it is written."""
    job = {key: value for key, value in root.items_ex(resolve=False) if key != "hydra"}
    copy = OmegaConf.create(job)
    try:
        plain = OmegaConf.to_container(copy, resolve=True)
    except OmegaConfBaseException:  # the command says so in its own words later
        plain = OmegaConf.to_container(copy, resolve=False)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _base() -> str:
    return os.environ.get("OUTPUT_DIR", "runs")


def _run_dir(*, _root_: DictConfig) -> str:
    given = _root_.run_dir
    return str(given) if given else f"{_base()}/{_run_name(_root_=_root_)}"


def _sweep_dir(*, _root_: DictConfig) -> str:
    return str(_root_.run_dir or _base())


def run_composed(argv: list[str], job: RunJob) -> None:
    """Compose and call ``job`` with each job's config, run directory and overrides.

    One job, or with ``-m`` all of a sweep through Hydra's sweeper and launcher. Raises ConfigError
    for what Hydra refuses, and whatever ``job`` raises.
    """
    _check_flags(argv)
    for name, resolver in (("run_dir", _run_dir), ("run_name", _run_name), ("sweep_dir", _sweep_dir)):
        OmegaConf.register_new_resolver(f"speechtrain.{name}", resolver, replace=True)

    def task(config: DictConfig) -> float | None:
        settings = HydraConfig.get()
        # absolute: ranks on other hosts and a resumed command must mean the same folder
        return job(config, Path(settings.runtime.output_dir), list(settings.overrides.task))

    previous = sys.argv
    sys.argv = [previous[0], *argv]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing several lines
    try:
        hydra.main(version_base="1.3", config_path=CONFIG_PATH, config_name="config")(task)()
    except (HydraException, OmegaConfBaseException) as error:
        raise explain(error, argv) from error
    finally:
        sys.argv = previous
        os.environ.pop("HYDRA_FULL_ERROR", None)


def _check_flags(argv: list[str]) -> None:
    expects_value = False
    for argument in argv:
        if expects_value:
            expects_value = False
            continue
        if not argument.startswith("-"):
            continue
        name, equals, _ = argument.partition("=")
        if name not in _FLAGS:
            raise ConfigError(f"unknown option {name}{nearest(name, _FLAGS)}; speechtrain-train --help lists them")
        expects_value = _FLAGS[name] and not equals


def explain(error: Exception, argv: list[str]) -> ConfigError:
    """What Hydra or OmegaConf refused, as one line that names the key and the nearest valid one."""
    message = str(error).strip()
    if found := re.search(r"Could not find '([\w@.]+)/([^']*)'", message):
        group, choice = found.groups()
        options = re.findall(r"^\t(\S+)$", message, flags=re.MULTILINE)
        listed = f"; {group} is one of {', '.join(options)}" if options else ""
        return ConfigError(f"{group}={choice}: there is no such choice{nearest(choice, options)}{listed}")
    if found := re.search(r"Could not override '([^']+)'", message):
        key = found.group(1)
        known = _known_keys(argv)
        if "No match in the defaults list" in message:
            return ConfigError(f"{key}: there is no such group{nearest(key, {k.split('.')[0] for k in known})}")
        return ConfigError(f"{key}: there is no such key{_near_key(key, known)}")
    if found := re.search(r"Could not append to config. An item is already at '([^']+)'", message):
        return ConfigError(f"+{found.group(1)}: the key exists already; write it without the +")
    cause = error.__cause__ or error
    if isinstance(cause, OmegaConfBaseException):
        key = cause.full_key or _key_of(message)
        return ConfigError(f"{key + ': ' if key else ''}{first_line(cause)}")
    return ConfigError(first_line(error))


def _key_of(message: str) -> str:
    found = re.search(r"(?:merging|override) '?([\w.+@/~]+)=", message)
    return found.group(1) if found else ""


def _near_key(key: str, known: set[str]) -> str:
    """The nearest full key; else the nearest among the keys of the same parent."""
    full = nearest(key, known)
    if full:
        return full
    parent, _, leaf = key.rpartition(".")
    siblings = {k[len(parent) + 1 :].split(".")[0] for k in known if parent and k.startswith(parent + ".")}
    if siblings:
        return nearest(leaf, siblings) or f"; {parent} has {', '.join(sorted(siblings))}"
    homes = sorted(k for k in known if k.rpartition(".")[2] == leaf)
    return f"; did you mean {homes[0]!r}?" if homes else "; --cfg job lists every key"


def _known_keys(argv: list[str]) -> set[str]:
    """Every key of the config that the command line's group choices compose."""
    choices = []
    folder = None
    for flag, value in zip([*argv, ""], [*argv[1:], ""], strict=False):
        if flag in ("--config-dir", "-cd"):
            folder = value
    for argument in argv:
        key, equals, value = argument.partition("=")
        if equals and "." not in key and value and not key.startswith(("-", "+", "~")) and "," not in value:
            choices.append(argument)
    for attempt in (choices, []):
        try:
            return _flat_keys(compose(attempt, folder))
        except (HydraException, OmegaConfBaseException):
            continue
    return set()


def compose(overrides: list[str], config_dir: str | None = None) -> DictConfig:
    """One job's config from the package's groups and those of ``config_dir``. Raises what Hydra raises."""
    GlobalHydra.instance().clear()
    search = [f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"] if config_dir else []
    with hydra.initialize_config_module("speechtrain.conf", version_base="1.3"):
        return hydra.compose("config", overrides=[*search, *overrides])


def _flat_keys(node: object, prefix: str = "") -> set[str]:
    if not isinstance(node, DictConfig) or node._is_none() or node._is_missing() or node._is_interpolation():
        return {prefix} if prefix else set()
    keys = {prefix} if prefix else set()
    for key in node:
        if key != "_target_":
            keys |= _flat_keys(node._get_node(key), f"{prefix}.{key}" if prefix else str(key))
    return keys


