"""Composing of one config by Hydra. Each error of Hydra becomes one line."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobRuntime
from hydra.errors import HydraException, OverrideParseException
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from speechtrain.errors import ConfigError, SpeechtrainError, first_line, nearest, one_line
from speechtrain.overrides import key_of_override, shell_word
from speechtrain.run_directory import flat
from speechtrain.start.auto_device import offer_auto
from speechtrain.start.choices import choices, refuse_bases
from speechtrain.start.finetuned import offer_finetuned
from speechtrain.start.replaced_values import replace_choices, replace_sets
from speechtrain.start.schema import Config
from speechtrain.start.user_yaml import unused_files

_CONVERSION_ERROR = r"Value (.*) of type '\w+' could not be converted to (Integer|Float)\b"
_HYDRAS_CONFIGS = ("hydra", "_dummy_empty_config_.yaml")
"""Hydra's own entries of its global store of configs."""
_TYPE_TEXTS = {"Integer": "an integer", "Float": "a number"}


class Composed(NamedTuple):
    """A composed config."""

    config: DictConfig
    choices: dict[str, Any]  # the choice of each group by its name
    notices: list[str]  # a line for each replaced group, and for each file of the user that is not used


def compose(overrides: list[str], config_dir: str | None = None) -> DictConfig:
    """Compose one job's config from the package's groups and ``config_dir``. Raises ConfigError."""
    return compose_with_choices(overrides, config_dir).config


def compose_with_choices(overrides: list[str], config_dir: str | None = None) -> Composed:
    """Compose one job's config, and return it with the choices of its groups. Raises ConfigError.

    Values of a recipe that ``overrides`` replace are removed.
    """

    def compose_again(texts: list[str]) -> tuple[DictConfig, dict[str, Any]]:
        return _compose(texts, config_dir, overrides)

    try:
        config, group_choices = _compose(overrides, config_dir)
        notices = replace_choices(config, group_choices, overrides, compose_again)
    except SpeechtrainError:
        raise
    except Exception as error:  # Hydra passes on any error of reading the user's YAML files.
        raise explain(error, overrides, config_dir) from None
    notices += replace_sets(config, overrides) + unused_files(group_choices, config_dir)
    return Composed(config, group_choices, notices)


def _compose(
    overrides: Sequence[str], config_dir: str | None, command_overrides: Sequence[str] = ()
) -> tuple[DictConfig, dict[str, Any]]:
    """Return the config and the choices as Hydra composes them. Raises the errors of Hydra and OmegaConf.

    ``command_overrides`` decide the computed choices ``finetuned`` and ``auto``, by default ``overrides``.
    """
    search_path = [f"hydra.searchpath=['file://{Path(config_dir).resolve()}']"] if config_dir else []
    with _separate_hydra():
        offer_choices(command_overrides or overrides, config_dir)
        with hydra.initialize_config_module("speechtrain.conf", version_base="1.3"):
            config = hydra.compose("config", [*search_path, *overrides], return_hydra_config=True)
    with open_dict(config):
        hydra_settings = config.pop("hydra")
    return config, dict(hydra_settings.runtime.choices)


_LOCKS: dict[int, AbstractContextManager[bool]] = {}


def process_lock() -> AbstractContextManager[bool]:
    """Return the lock of the threads that change a setting of the process.

    A forked process has another lock, because it lacks the thread that may hold the lock of its parent.
    """
    return _LOCKS.setdefault(os.getpid(), threading.RLock())


@contextlib.contextmanager
def _separate_hydra() -> Iterator[None]:
    """Return a context with global objects of Hydra for this package. Its end restores those of the process.

    The process may be a program that uses Hydra itself. Threads take turns.
    """
    with process_lock():
        main = GlobalHydra.instance()
        store, runtime, version = ConfigStore.instance(), JobRuntime.instance(), VersionBase.instance()
        originals = (main.hydra, store.repo, runtime.conf, version.version_base)
        main.clear()  # Hydra refuses a second initialization in one process.
        store.repo = {name: node for name, node in store.repo.items() if name in _HYDRAS_CONFIGS}
        runtime.conf = copy.copy(runtime.conf)
        try:
            yield
        finally:
            GlobalHydra.set_instance(main)
            main.hydra, store.repo, runtime.conf, version.version_base = originals


def offer_choices(overrides: Sequence[str], config_dir: str | None) -> None:
    """Register the typed root with Hydra, and the choices ``finetuned`` and ``auto`` of its groups.

    Raises ConfigError if an override chooses a YAML that is only the base of other choices.
    """
    ConfigStore.instance().store(name="schema", node=Config)
    refuse_bases(overrides, config_dir)
    offer_finetuned(overrides)
    offer_auto(overrides, config_dir)


def override_value(text: str) -> Any:
    """Return the parsed value of one ``KEY=VALUE``. Raises ConfigError for a sweep and for ``~KEY``.

    The override is for a run that exists, which has one value for each key.
    """
    try:
        (override,) = OverridesParser.create().parse_overrides([text])
    except HydraException as error:
        raise explain(error, [text]) from None
    if override.is_sweep_override():
        raise ConfigError(f"{text}: a run takes one value, write a list as {key_of_override(text)}=[…]")
    if override.is_delete():
        raise ConfigError(f"{text}: no key of a run can be removed, omit it or set another run_dir")
    return override.value()


def explain(error: Exception, overrides: Sequence[str], config_dir: str | None = None) -> ConfigError:
    """Return Hydra's error about ``overrides`` as one line that names the key and the nearest valid key."""
    if isinstance(error, OverrideParseException):
        return _explain_syntax(error)
    message = str(error).strip()
    line = _explain_choice(message, overrides, config_dir)
    if not line:
        line = _explain_key(message, overrides, config_dir)
    if line:
        return ConfigError(line)
    cause = error.__cause__ or error
    if isinstance(cause, OmegaConfBaseException):
        key = cause.full_key
        override = re.search(r"(?:merging|override) '?([\w.+@/~]+)=", message)
        if not key and override:
            key = override[1]
        line = _explain_value(cause)
        return ConfigError(f"{key}: {line}" if key else line)
    # Any other message has several lines, such as the position of an error in a YAML file.
    line = one_line(message)[:300] or type(error).__name__
    if not isinstance(error, HydraException):
        line = f"the command line or a config file: {line}"
    return ConfigError(line)


def _explain_value(error: OmegaConfBaseException) -> str:
    """Return the explanation of OmegaConf's error about the type of a value.

    A number is explained in the same words as in ``start.check_keys``.
    """
    line = first_line(error)
    if line == "Cannot merge DictConfig with ListConfig":
        return "the config has a list here. Write one, such as [{path: FILE, weight: 3}, FILE]"
    match = re.match(_CONVERSION_ERROR, line)
    return f"{match[1]} is not {_TYPE_TEXTS[match[2]]}" if match else line


def _explain_syntax(error: OverrideParseException) -> ConfigError:
    """Return the error of an override that Hydra's parser cannot read."""
    text = error.override
    if re.fullmatch(r"[\w./@]+", text):
        return ConfigError(f"{text!r} is not KEY=VALUE. Write {text}=VALUE")
    if not text or text.startswith("="):
        return ConfigError(f"{text!r} has no key. Write KEY=VALUE")
    line = first_line(error)
    cause = "" if line.startswith("Lexer") else f" ({line})"  # A message of the lexer is hard to understand.
    key, _, value = text.partition("=")
    fix = f"Close brackets and quotes, or write the value as a text: {shell_word(key, value)}"
    return ConfigError(f"{text!r} cannot be read{cause}. {fix}")


def _explain_choice(message: str, overrides: Sequence[str], config_dir: str | None) -> str:
    """Return the explanation of Hydra's ``message`` about the choice of a group, else an empty text."""
    match = re.search(r"Could not find '([^']*)/([^'/]*)'", message)
    if match:
        group, choice = match.groups()
        # Hydra lists the choices on lines that start with a tab. Base YAMLs, which start with _, are omitted.
        options = re.findall(r"^\t([^\s_]\S*)$", message, flags=re.MULTILINE)
        hint = nearest(choice, options)
        if options:
            hint += f" ({group} is one of {', '.join(options)})"
        return f"{group}={choice}: there is no such choice{hint}"
    match = re.search(r"Multiple values for ([^\s.]+)", message)
    if match:
        return f"{match[1]}: it has two choices. Write {match[1]}=NAME, without a +"
    if "Config group override must be a string or a list" not in message:
        return ""
    for text in overrides:
        if re.fullmatch(r"[\w/@]*=(null|[\d.]+|true|false)", text, flags=re.IGNORECASE):
            # The choices of an unknown group are not known, so the message has an example instead.
            names = choices(config_dir).get(key_of_override(text), ["model=rnnt"])
            return f"{text}: a group takes a name: {', '.join(names)}"
    return "the command line: a group takes a name: model=rnnt"


def _explain_key(message: str, overrides: Sequence[str], config_dir: str | None) -> str:
    """Return the explanation of Hydra's ``message`` about a key, else an empty text."""
    match = re.search(r"Ambiguous value for argument '([^']+)'", message)
    if match:
        key, _, value = match[1].partition("=")
        return f"{match[1]}: several values are a sweep, add -m. A list is {key}=[{value}]"
    match = re.search(r"Could not append to config. An item is already at '([^']+)'", message)
    if match:
        return f"+{match[1]}: the key exists already. Write it without the +"
    match = re.search(r"Could not (?:override|delete.*) '([^']+)'", message)
    if match is None:
        return ""
    key = match[1]
    keys = _config_keys(overrides, config_dir)
    groups = {name.split(".")[0] for name in keys}
    if key in keys and key in groups:
        return f"{key} is a group. Choose with {key}=NAME, and set its values as {key}.KEY=VALUE"
    if "No match in the defaults list" in message:
        return f"{key}: there is no such group{nearest(key, {*groups, *choices(None)})}"
    return f"{key}: there is no such key{_nearest_key(key, keys | {*choices(None)})}"


def _nearest_key(key: str, keys: set[str]) -> str:
    """Return a hint to a valid key, as the end of a message about an unknown ``key``.

    The hint is the first of these that exists: the key with the most similar text, the most similar key of
    the same parent, all keys of this parent, a key of another parent with the same last part.
    """
    hint = nearest(key, keys)
    if hint:
        return hint
    parent, _, leaf = key.rpartition(".")
    siblings = set()  # keys directly below the parent, without the parent's name
    same_leaf_keys = set()
    for name in keys:
        if parent and name.startswith(f"{parent}."):
            siblings.add(name.removeprefix(f"{parent}.").split(".")[0])
        if name.rpartition(".")[2] == leaf:
            same_leaf_keys.add(name)
    if siblings:
        return nearest(leaf, siblings) or f", {parent} has {', '.join(sorted(siblings))}"
    if same_leaf_keys:
        return f", did you mean {min(same_leaf_keys)!r}?"
    return ", --cfg job lists every key"


def key_for_option(option: str) -> str:
    """Return the key that an option such as ``--max-steps`` names, or an empty text."""
    name = option.lstrip("-").replace("-", "_")
    # The choice of a device avoids the default ``auto``, which would load the drivers of accelerators.
    config_keys = sorted(_config_keys(["device=cpu"], None))
    matches = [key for key in config_keys if f".{key}".endswith(f".{name}")]
    return min(matches, key=len, default="")


@lru_cache(maxsize=64)
def _composed_keys(group_overrides: tuple[str, ...], config_dir: str | None) -> set[str]:
    """Compose a config with ``group_overrides``, and return its keys and the keys of its groups."""
    config, _ = _compose(list(group_overrides), config_dir)
    values = cast("dict[str, Any]", OmegaConf.to_container(config, resolve=False))
    keys = set()
    for leaf_key in flat(values):
        parts = leaf_key.split(".")
        for depth in range(1, len(parts) + 1):
            keys.add(".".join(parts[:depth]))
    return {key for key in keys if not key.endswith("_target_")}


def _config_keys(overrides: Sequence[str], config_dir: str | None) -> set[str]:
    """Return every key and group of a config with the same group choices as ``overrides``.

    If Hydra cannot compose these choices, the keys of the default config are returned.
    """
    group_overrides = []
    for override in overrides:
        key, _, value = override.partition("=")
        is_sweep = "," in value
        is_group = "." not in key and not key.startswith(("+", "~"))
        if value and is_group and not is_sweep:
            group_overrides.append(override)
    for choices_to_try in (tuple(group_overrides), ()):
        try:
            return _composed_keys(choices_to_try, config_dir)
        except (
            Exception
        ):  # The keys are for the message of an earlier error, which this error must not replace.
            continue
    return set()
