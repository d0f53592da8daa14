"""Hydra in the parent process: composes one config per job, and reports its errors in one line."""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.config_repository import ConfigRepository
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from speechtrain.commands._choices import config_dir, refuse_bases
from speechtrain.commands._find_run import base_folder, run_name, written_files
from speechtrain.config import schema  # noqa: F401 - registers the typed root with Hydra
from speechtrain.errors import (
    ConfigError,
    MachineError,
    Preempted,
    SpeechtrainError,
    first_line,
    nearest,
    one_line,
)

CONFIG_PATH = "pkg://speechtrain.conf"
_group_files = ConfigRepository.get_group_options
# without a hook, Hydra would offer base YAMLs to shell completion, to glob(*) and in its errors
ConfigRepository.get_group_options = lambda *group, **kind: [  # type: ignore[method-assign]
    name for name in _group_files(*group, **kind) if not name.startswith("_")
]
RunJob = Callable[[DictConfig, Path, list[str], dict[str, str]], float | None]

# Hydra's options, with whether a value follows
_FLAGS = {
    **dict.fromkeys(("--multirun", "-m", "--resolve", "--run", "-r", "--shell-completion", "-sc"), False),
    **dict.fromkeys(("--cfg", "-c", "--config-dir", "-cd", "--package", "-p", "--info", "-i"), True),
}
_CFG = ("job", "hydra", "all")
_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
_FLAG_VALUES = {"--cfg": _CFG, "-c": _CFG, "--info": _INFO, "-i": _INFO}


def _run_name(*, _root_: DictConfig) -> str:
    settings = _root_.hydra
    return run_name(settings.runtime.choices, _typed(settings), config_dir(sys.argv))


def _typed(settings: Any) -> list[str]:
    """The overrides as typed: Hydra would resolve an interpolation in its own node."""
    return [str(o) for o in OmegaConf.to_container(settings.overrides.task, resolve=False) or ()]


class _Folders:
    """The folders that Hydra makes: those that stay empty are removed when the command ends."""

    def __init__(self) -> None:
        self.missing: set[Path] = set()

    def expect(self, folder: str) -> str:
        path = Path(folder).absolute()
        self.missing |= {p for p in (path, *path.parents) if not p.exists()}
        return folder

    def remove_empty(self) -> None:
        for path in sorted(self.missing, key=lambda p: len(p.parts), reverse=True):
            with contextlib.suppress(OSError):  # not empty, or never made
                path.rmdir()


class _Stop(BaseException):
    """Exits Hydra silently: Hydra prints lines of its own for any Exception of a job."""


class _Jobs:
    """The jobs of one command, and their errors."""

    def __init__(self, job: RunJob) -> None:
        self.job = job
        self.process = os.getpid()
        self.count = 0
        self.errors: list[Exception] = []

    def __call__(self, config: DictConfig) -> float | None:
        settings = HydraConfig.get()
        overrides = _typed(settings)
        written = written_files(settings.runtime.choices, config_dir(sys.argv))
        self.count += 1
        try:
            # absolute: ranks on other hosts and a resumed command must use the same folder
            return self.job(config, Path(settings.runtime.output_dir), overrides, written)
        except Exception as error:
            if os.getpid() != self.process:  # a sweep's launcher runs it: Hydra reports to the parent
                raise
            self.errors.append(error)
            is_sweep = settings.mode == RunMode.MULTIRUN
            if not is_sweep or isinstance(error, Preempted) or not isinstance(error, SpeechtrainError):
                raise _Stop from error
            named = " ".join(overrides)
            print(f"speechtrain: error: job {self.count} ({named}): {one_line(str(error))}", file=sys.stderr)
            return math.nan  # an optimizing sweeper continues with its next job
        finally:
            with contextlib.suppress(OSError):  # a job of a sweep that wrote nothing keeps no folder
                Path(settings.runtime.output_dir).rmdir()

    def conclude(self) -> None:
        """Raise the jobs' error; if several failed, the first one with the number of failures."""
        if not self.errors:
            return
        last, first = self.errors[-1], self.errors[0]
        if self.count == 1 or not isinstance(last, SpeechtrainError) or isinstance(last, Preempted):
            raise last
        raise type(first)(f"{len(self.errors)} of {self.count} jobs failed; the first: {first}")


def run_composed(argv: list[str], job: RunJob) -> None:
    """Compose each job's config; call ``job`` with it, its run directory, overrides and the user's own YAML.

    Runs one job, or with ``-m`` all jobs of a sweep through Hydra's sweeper and launcher; a failed job
    of a sweep is reported and the others run. Folders that stay empty are removed. Raises ConfigError
    for what Hydra refuses, MachineError where a folder cannot be made, and whatever ``job`` raises.
    """
    check_flags(argv)
    folders, jobs = _Folders(), _Jobs(job)
    resolvers: dict[str, Callable[..., str]] = {
        "run_dir": lambda *, _root_: folders.expect(
            str(_root_.run_dir or base_folder() / _run_name(_root_=_root_))
        ),
        "run_name": _run_name,
        "sweep_dir": lambda *, _root_: folders.expect(str(_root_.run_dir or base_folder())),
    }
    for name, resolver in resolvers.items():
        OmegaConf.register_new_resolver(f"speechtrain.{name}", resolver, replace=True)

    previous = sys.argv
    flags, overrides = options(argv)
    sys.argv = [previous[0], *flags, *overrides]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing several lines
    try:
        refuse_bases(overrides, config_dir(argv))
        _refuse_callbacks(argv)
        start = hydra.main(version_base="1.3", config_path=CONFIG_PATH, config_name="config")
        start(lambda config: jobs(config))()
    except _Stop:
        pass
    except SpeechtrainError:
        raise
    except HydraException as error:  # before OSError: a missing choice is both
        raise explain(error, argv) from error
    except OSError as error:
        where = error.filename or "the run directory"
        raise MachineError(
            f"{where}: {error.strerror}; set run_dir or OUTPUT_DIR to a writable folder"
        ) from error
    except Exception as error:  # any other error comes from composing: jobs keep theirs
        raise explain(error, argv) from error
    finally:
        sys.argv = previous
        os.environ.pop("HYDRA_FULL_ERROR", None)
        folders.remove_empty()
    jobs.conclude()


def _refuse_callbacks(argv: list[str]) -> None:
    """Refuse ``hydra.callbacks`` in a config folder: Hydra builds a callback from any class."""
    folder = config_dir(argv)
    if folder is None or not Path(folder).is_dir():  # Hydra itself reports that it is missing
        return
    overrides = [a for a in argv if "=" in a and not a.startswith("-")]
    if "-m" in argv or "--multirun" in argv:
        overrides = [a for a in overrides if "," not in a]
    composed = compose(overrides, folder, return_hydra_config=True)
    if OmegaConf.select(composed, "hydra.callbacks"):
        raise ConfigError(f"hydra.callbacks: {folder} sets it, but a callback can run any code; remove it")


def check_flags(argv: list[str]) -> None:
    """Refuse options for which Hydra would print its usage, or which replace the config."""
    waiting = ""
    for argument in argv:
        if waiting:
            _check_flag_value(waiting, argument)
            waiting = ""
            continue
        if not argument.startswith("-"):
            continue
        name, equals, value = argument.partition("=")
        if name not in _FLAGS:
            raise ConfigError(
                f"unknown option {name}{nearest(name, _FLAGS)}; speechtrain-train --help lists them"
            )
        if _FLAGS[name] and not equals:
            waiting = name
        elif _FLAGS[name]:
            _check_flag_value(name, value)
        elif equals:
            raise ConfigError(f"{argument}: {name} takes no value; write {name}")
    if waiting:
        raise ConfigError(f"{waiting} needs a value{_listed(waiting)}")


def options(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into Hydra's options with values, and overrides: its parser refuses a mixture."""
    found: tuple[list[str], list[str]] = ([], [])
    takes_next = False
    for argument in argv:
        is_option = takes_next or argument.startswith("-")
        found[not is_option].append(argument)
        takes_next = not takes_next and _FLAGS.get(argument, False)
    return found


def _check_flag_value(name: str, value: str) -> None:
    if name in _FLAG_VALUES and value not in _FLAG_VALUES[name]:
        raise ConfigError(f"{name} {value}: there is no such choice{_listed(name)}")
    if not value:
        raise ConfigError(f"{name} needs a value")


def _listed(name: str) -> str:
    return f"; it takes {', '.join(_FLAG_VALUES[name])}" if name in _FLAG_VALUES else ""


def explain(error: Exception, argv: list[str]) -> ConfigError:
    """An error of Hydra or OmegaConf as one line that names the key and the nearest valid key."""
    message = str(error).strip()
    if isinstance(error, OverrideParseException):
        return _explain_syntax(error)
    if found := re.search(r"Could not find '([^']*)/([^'/]*)'", message):
        group, choice = found.groups()
        options = re.findall(r"^\t(\S+)$", message, flags=re.MULTILINE)
        listed = f" ({group} is one of {', '.join(options)})" if options else ""
        return ConfigError(f"{group}={choice}: there is no such choice{nearest(choice, options)}{listed}")
    for pattern in (r"Could not override '([^']+)'", r"Could not delete.* '([^']+)'"):
        if found := re.search(pattern, message):
            return _explain_key(found.group(1), message, argv)
    if found := re.search(r"Ambiguous value for argument '([^']+)'", message):
        key, _, value = found.group(1).partition("=")
        return ConfigError(f"{found.group(1)}: several values are a sweep: add -m; a list is {key}=[{value}]")
    if found := re.search(r"Could not append to config. An item is already at '([^']+)'", message):
        return ConfigError(f"+{found.group(1)}: the key exists already; write it without the +")
    if found := re.search(r"Multiple values for ([^\s.]+)", message):
        return ConfigError(f"{found.group(1)}: chosen twice; write {found.group(1)}=NAME, without a +")
    if "Config group override must be a string or a list" in message:
        wrong = [a for a in argv if re.fullmatch(r"[\w/@]*=(null|[\d.]+|true|false)", a, flags=re.IGNORECASE)]
        return ConfigError(f"{(wrong or ['the command line'])[0]}: a group takes a name, as in model=rnnt")
    cause = error.__cause__ or error
    if isinstance(cause, OmegaConfBaseException):
        found = re.search(r"(?:merging|override) '?([\w.+@/~]+)=", message)
        key = cause.full_key or (found.group(1) if found else "")
        return ConfigError(f"{key + ': ' if key else ''}{first_line(cause)}")
    line = one_line(message)[:300] or type(error).__name__  # for unreadable YAML, its position
    where = "" if isinstance(error, HydraException) else "the command line or a config file: "
    return ConfigError(where + line)


def _explain_syntax(error: OverrideParseException) -> ConfigError:
    text = error.override
    if re.fullmatch(r"[\w./@]+", text):
        return ConfigError(f"{text!r} is not KEY=VALUE; write {text}=VALUE")
    if not text or text.startswith("="):
        return ConfigError(f"{text!r} has no key; write KEY=VALUE")
    line = first_line(error)
    cause = "" if line.startswith("Lexer") else f" ({line})"
    return ConfigError(
        f"{text!r} cannot be read{cause}; close brackets and quotes, or quote the value for Hydra: "
        "KEY='\"VALUE\"' in a shell"
    )


def _explain_key(key: str, message: str, argv: list[str]) -> ConfigError:
    known = _known_keys(argv)
    groups = sorted({k.split(".")[0] for k in known})
    if key in known and key in groups:
        return ConfigError(f"{key} is a group; choose with {key}=NAME, and set its values as {key}.KEY=VALUE")
    if "No match in the defaults list" in message:
        return ConfigError(f"{key}: there is no such group{nearest(key, groups)}")
    return ConfigError(f"{key}: there is no such key{_near_key(key, known)}")


def _near_key(key: str, known: set[str]) -> str:
    """The nearest full key; else the nearest among the keys of the same parent."""
    if full := nearest(key, known):
        return full
    parent, _, leaf = key.rpartition(".")
    siblings = {k[len(parent) + 1 :].split(".")[0] for k in known if parent and k.startswith(parent + ".")}
    if siblings:
        return nearest(leaf, siblings) or f"; {parent} has {', '.join(sorted(siblings))}"
    homes = sorted(k for k in known if k.rpartition(".")[2] == leaf)
    return f"; did you mean {homes[0]!r}?" if homes else "; --cfg job lists every key"


@lru_cache(maxsize=64)
def _composed_keys(choices: tuple[str, ...], folder: str | None) -> set[str]:
    return _flat_keys(compose(list(choices), folder))


def _known_keys(argv: list[str]) -> set[str]:
    """Every key of the config that the command line's group choices compose."""
    choices, folder = [], config_dir(argv)
    for argument in argv:
        key, equals, value = argument.partition("=")
        if equals and "." not in key and value and not key.startswith(("-", "+", "~")) and "," not in value:
            choices.append(argument)
    for attempt in (tuple(choices), ()):
        try:
            return _composed_keys(attempt, folder)
        except Exception:  # this explains another error and must not add one
            continue
    return set()


def compose(overrides: list[str], folder: str | None = None, return_hydra_config: bool = False) -> DictConfig:
    """Compose one job's config from the package's groups and ``folder``. Raises Hydra's or a ConfigError."""
    refuse_bases(overrides, folder)
    GlobalHydra.instance().clear()
    search = [f"hydra.searchpath=['file://{Path(folder).resolve()}']"] if folder else []
    with hydra.initialize_config_module("speechtrain.conf", version_base="1.3"):
        return hydra.compose("config", [*search, *overrides], return_hydra_config)


def _flat_keys(node: object, prefix: str = "") -> set[str]:
    if not isinstance(node, DictConfig) or node._is_none() or node._is_missing() or node._is_interpolation():
        return {prefix} if prefix else set()
    keys = {prefix} if prefix else set()
    for key in map(str, node):
        if key != "_target_":
            keys |= _flat_keys(node._get_node(key), f"{prefix}.{key}" if prefix else str(key))
    return keys
