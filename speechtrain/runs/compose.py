"""Hydra's composition of one config, and Hydra's errors in one line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from speechtrain.config import schema  # noqa: F401 - registers the typed root with Hydra
from speechtrain.config.resume_fields import flat, key_of
from speechtrain.errors import ConfigError, first_line, nearest, one_line
from speechtrain.runs.auto_device import offer_auto
from speechtrain.runs.choices import choices, refuse_bases
from speechtrain.runs.finetuned import offer_finetuned

_CONVERSION = r"Value (.*) of type '\w+' could not be converted to (Integer|Float)\b"
_KINDS = {"Integer": "an integer", "Float": "a number"}


def compose(overrides: list[str], config_dir: str | None = None) -> DictConfig:
    """Compose one job's config from the package's groups and ``config_dir``. Raises ConfigError."""
    return compose_with_choices(overrides, config_dir)[0]


def compose_with_choices(
    overrides: list[str], config_dir: str | None = None
) -> tuple[DictConfig, dict[str, Any]]:
    """Compose one job's config. Return it with the choice of each group. Raises ConfigError."""
    try:
        return _compose(overrides, config_dir)
    except (HydraException, OmegaConfBaseException) as error:
        raise explain(error, overrides, config_dir) from None


def _compose(overrides: list[str], config_dir: str | None) -> tuple[DictConfig, dict[str, Any]]:
    offer_choices(overrides, config_dir)
    GlobalHydra.instance().clear()
    search = [f"hydra.searchpath=['file://{Path(config_dir).resolve()}']"] if config_dir else []
    with hydra.initialize_config_module("speechtrain.conf", version_base="1.3"):
        config = hydra.compose("config", [*search, *overrides], return_hydra_config=True)
    with open_dict(config):
        settings = config.pop("hydra")
    return config, dict(settings.runtime.choices)


def offer_choices(overrides: Sequence[str], config_dir: str | None) -> None:
    """Set Hydra's choices that no file has. Raises ConfigError for an override that chooses a base YAML."""
    refuse_bases(overrides, config_dir)
    offer_finetuned(overrides)
    offer_auto(overrides, config_dir)


def override_value(text: str) -> Any:
    """Return the value of one KEY=VALUE for a run that exists. Raises ConfigError."""
    try:
        (override,) = OverridesParser.create().parse_overrides([text])
    except HydraException as error:
        raise explain(error, [text]) from None
    if override.is_sweep_override():
        raise ConfigError(f"{text}: a run takes one value, write a list as {key_of(text)}=[…]")
    if override.is_delete():
        raise ConfigError(f"{text}: no key of a run can be removed, omit it or set another run_dir")
    return override.value()


def explain(error: Exception, overrides: Sequence[str], config_dir: str | None = None) -> ConfigError:
    """An error of composing ``overrides`` as one line that names the key and the nearest valid key."""
    message = str(error).strip()
    if isinstance(error, OverrideParseException):
        return _explain_syntax(error)
    if found := re.search(r"Could not find '([^']*)/([^'/]*)'", message):
        group, choice = found.groups()
        options = re.findall(r"^\t([^\s_]\S*)$", message, flags=re.MULTILINE)
        close = nearest(choice, options)
        listed = f" ({group} is one of {', '.join(options)})" if options else ""
        return ConfigError(f"{group}={choice}: there is no such choice{close}{listed}")
    if found := re.search(r"Could not (?:override|delete.*) '([^']+)'", message):
        return _explain_key(found.group(1), message, _known_keys(overrides, config_dir))
    if found := re.search(r"Ambiguous value for argument '([^']+)'", message):
        key, _, value = found.group(1).partition("=")
        return ConfigError(f"{found.group(1)}: several values are a sweep: add -m; a list is {key}=[{value}]")
    if found := re.search(r"Could not append to config. An item is already at '([^']+)'", message):
        return ConfigError(f"+{found.group(1)}: the key exists already; write it without the +")
    if found := re.search(r"Multiple values for ([^\s.]+)", message):
        return ConfigError(f"{found.group(1)}: chosen twice; write {found.group(1)}=NAME, without a +")
    if "Config group override must be a string or a list" in message:
        wrong = [
            o for o in overrides if re.fullmatch(r"[\w/@]*=(null|[\d.]+|true|false)", o, flags=re.IGNORECASE)
        ]
        names = choices(config_dir).get(key_of(wrong[0]) if wrong else "", ["model=rnnt"])
        return ConfigError(f"{(wrong or ['the command line'])[0]}: a group takes a name: {', '.join(names)}")
    cause = error.__cause__ or error
    if isinstance(cause, OmegaConfBaseException):
        found = re.search(r"(?:merging|override) '?([\w.+@/~]+)=", message)
        key = cause.full_key or (found.group(1) if found else "")
        return ConfigError(f"{key + ': ' if key else ''}{_type_message(cause)}")
    line = one_line(message)[:300] or type(error).__name__  # for unreadable YAML, its position
    where = "" if isinstance(error, HydraException) else "the command line or a config file: "
    return ConfigError(where + line)


def _type_message(error: OmegaConfBaseException) -> str:
    """OmegaConf's message, in the words of ``config.check`` if it is about a number."""
    line = first_line(error)
    if line == "Cannot merge DictConfig with ListConfig":
        return "the config has a list here; write one, such as [{path: FILE, weight: 3}, FILE]"
    match = re.match(_CONVERSION, line)
    return f"{match[1]} is not {_KINDS[match[2]]}" if match else line


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


def _explain_key(key: str, message: str, known: set[str]) -> ConfigError:
    groups = sorted({k.split(".")[0] for k in known})
    if key in known and key in groups:
        return ConfigError(f"{key} is a group; choose with {key}=NAME, and set its values as {key}.KEY=VALUE")
    if "No match in the defaults list" in message:
        return ConfigError(f"{key}: there is no such group{nearest(key, {*groups, *choices(None)})}")
    return ConfigError(f"{key}: there is no such key{_near_key(key, known | {*choices(None)})}")


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


def key_for_option(option: str) -> str:
    """Return the key that an option such as ``--max-steps`` names, or an empty text."""
    name = option.lstrip("-").replace("-", "_")
    keys = [key for key in sorted(_known_keys(["device=cpu"], None)) if f".{key}".endswith(f".{name}")]
    return min(keys, key=len, default="")


@lru_cache(maxsize=64)
def _composed_keys(choices: tuple[str, ...], config_dir: str | None) -> set[str]:
    plain = OmegaConf.to_container(_compose(list(choices), config_dir)[0], resolve=False)
    paths = (key.split(".") for key in flat(cast("dict[str, Any]", plain)))
    keys = {".".join(path[:depth]) for path in paths for depth in range(1, len(path) + 1)}
    return {key for key in keys if not key.endswith("_target_")}


def _known_keys(overrides: Sequence[str], config_dir: str | None) -> set[str]:
    """Every key of the config that the group choices among ``overrides`` compose."""
    choices = []
    for override in overrides:
        key, equals, value = override.partition("=")
        if equals and "." not in key and value and not key.startswith(("+", "~")) and "," not in value:
            choices.append(override)
    for attempt in (tuple(choices), ()):
        try:
            return _composed_keys(attempt, config_dir)
        except Exception:  # this explains another error and must not add one
            continue
    return set()
