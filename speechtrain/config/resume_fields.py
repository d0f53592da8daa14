"""The keys of a config that may change when a run continues. A change of any other key makes another run."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from speechtrain.files import absolute_path

PER_START = ("resume", "dry_run")
"""Keys that apply to one start of a run only."""

_VOLATILE = (
    *("world_size", "run_dir", "launcher", "tracking", "device", "decoder", "final_decoder", *PER_START),
    *("data.workers", "data.cache", "data.timeout_seconds", "data.max_bad", "data.max_bad_share"),
    *("data.max_decoded_seconds", "data.stage"),
)
_VOLATILE_LIMITS = (
    *("max_steps", "max_epochs", "max_hours", "target", "log_every", "validate_every", "save_every"),
    *("keep", "on_save_error", "on_collapse", "max_bad_updates", "timeout_seconds", "profile", "shard"),
    "checkpoint_layers",  # It does not change the losses.
)
_PATH = re.compile(r"""[^][{},:'"\s][^][{},:'"]*""")  # in the value of an override
_ALL_VOLATILE = (*_VOLATILE, *(f"trainer.{key}" for key in _VOLATILE_LIMITS))


def is_volatile(key: str) -> bool:
    """Return whether the dotted ``key`` may change when a run continues."""
    if key.endswith(".run_dir"):  # A part that writes files of its own repeats the run directory.
        return True
    return any(f"{key}.".startswith(f"{prefix}.") for prefix in _ALL_VOLATILE)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one mapping of dotted keys. An empty mapping counts as a value."""
    flat_values: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat_values |= flat(value, f"{prefix}{key}.")
        else:
            flat_values[f"{prefix}{key}"] = value
    return flat_values


def key_of_override(override: str) -> str:
    """Return the key of an override KEY=VALUE, without Hydra's +, ++, ~ and package."""
    key = override.partition("=")[0].lstrip("+~")
    return key.partition("@")[0]


def swept_volatile(swept: Collection[str]) -> list[str]:
    """Return the volatile keys among those that a sweep varies, sorted. ``run.json`` stores them."""
    return sorted(key for key in swept if is_volatile(key))


def with_absolute_paths(override: str, folder: str) -> str:
    """Return an override in which each path of a file below ``folder`` is absolute, so that texts compare.

    The choice of a group is never a path. Without a ``folder`` the text stays.
    """
    key, equals, value = override.partition("=")
    if not folder or ("." not in key and key != "init_from"):
        return override

    def absolute(match: re.Match[str]) -> str:
        path = Path(folder, os.path.expanduser(match[0].rstrip()))
        return str(absolute_path(path)) if path.exists() else match[0]

    return key + equals + _PATH.sub(absolute, value)


def identifying_overrides(
    overrides: Sequence[str], swept: Collection[str] = (), folder: str = ""
) -> list[str]:
    """Return the overrides that identify a run, sorted by key. Overrides of one key keep their order.

    A volatile key identifies a run only if a sweep varies it, that is if ``swept`` holds it. Paths of files
    below ``folder`` are absolute.
    """
    fields = []
    for override in overrides:
        key = key_of_override(override)
        if key in swept or not is_volatile(key):
            fields.append(with_absolute_paths(override, folder))
    return sorted(fields, key=key_of_override)


def fingerprint(overrides: Sequence[str], user_yaml: Mapping[str, str], swept: Collection[str] = ()) -> str:
    """Return eight hexadecimal digits: a hash of the overrides and of the user's own YAML files.

    ``user_yaml`` has the content of each file by the choice that it defines.
    """
    text = json.dumps([identifying_overrides(overrides, swept, os.getcwd()), user_yaml], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
