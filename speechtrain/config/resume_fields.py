"""Volatile keys: the keys of a config that may change when a run continues.

A change of any other key makes another run. A run is identified by its overrides of these other keys.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from speechtrain.files import absolute_path

PER_START = ("resume", "accept_code", "dry_run")
"""Keys that apply to one start of a run only."""

_VOLATILE = (
    *("world_size", "run_dir", "launcher", "tracking", "device", "decoder", "final_decoder", *PER_START),
    *("data.workers", "data.cache", "data.timeout_seconds", "data.max_bad", "data.max_bad_share"),
    *("data.max_decoded_seconds", "data.decoded_gib"),
)
_VOLATILE_LIMITS = (
    *("max_steps", "max_epochs", "max_hours", "target", "log_every", "validate_every", "save_every"),
    *("keep", "on_save_error", "on_collapse", "max_bad_updates", "timeout_seconds", "profile", "shard"),
    "checkpoint_layers",  # It does not change the losses.
)
_PATH = re.compile(r"""[^][{},:'"\s][^][{},:'"]*""")
"""A text in the value of an override that may be a path: without brackets, commas, colons and quotes."""
PLAIN = re.compile(r"(?!(?:null|true|false|nan|inf)\Z)\.{0,2}[a-z/][\w./-]*", re.ASCII | re.IGNORECASE)
"""A text that Hydra reads as it is written."""
_ALL_VOLATILE = (*_VOLATILE, *(f"trainer.{key}" for key in _VOLATILE_LIMITS))


def is_volatile(key: str) -> bool:
    """Return whether the dotted ``key`` may change when a run continues."""
    if key.endswith(".run_dir"):  # A part that writes files, such as a tracker, repeats the run directory.
        return True
    return any(f"{key}.".startswith(f"{prefix}.") for prefix in _ALL_VOLATILE)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one mapping of dotted keys. An empty mapping is returned as a value."""
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


def quoted(text: str) -> str:
    """Return a text in the quotes of Hydra's syntax.

    A backslash is doubled only before a quotation mark and at the end, because Hydra keeps the others.
    """
    escaped = re.sub(r"(\\*)('|\Z)", lambda match: match[1] * 2 + match[2].replace("'", r"\'"), text)
    return f"'{escaped}'"


def unquoted(text: str) -> str:
    """Return a value without the quotes of Hydra's syntax around it."""
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        pattern = rf"(\\+)({text[0]}|\Z)"
        text = re.sub(pattern, lambda match: match[1][: len(match[1]) // 2] + match[2], text[1:-1])
    return text


def shell_word(key: str, value: str) -> str:
    """Return ``KEY=VALUE`` as a user types it in a shell, so that Hydra reads ``value`` as a text."""
    return shlex.quote(f"{key}={value if PLAIN.fullmatch(value) else quoted(value)}")


def override_with_absolute_paths(override: str, folder: str) -> str:
    """Return an override in which each path of an existing file is absolute.

    Relative paths are relative to ``folder``. Overrides from different working folders can then be compared
    as texts. The choice of a group is never a path. If ``folder`` is empty, the override stays as it is.
    """
    key, equals, value = override.partition("=")
    if not folder or ("." not in key and key != "init_from"):
        return override
    name = Path(folder, os.path.expanduser(unquoted(value)))
    if value and os.path.exists(name):  # The name of a file may contain any sign.
        return f"{key}={absolute_path(name)}"

    def absolute(match: re.Match[str]) -> str:
        path = Path(folder, os.path.expanduser(match[0].rstrip()))
        return str(absolute_path(path)) if path.exists() else match[0]

    return key + equals + _PATH.sub(absolute, value)


def identifying_overrides(
    overrides: Sequence[str], swept: Collection[str] = (), folder: str = ""
) -> list[str]:
    """Return the overrides that identify a run, sorted by key. Overrides of the same key stay in their order.

    A volatile key identifies a run only if it is in ``swept``, the keys that a sweep varies. Paths are made
    absolute as in ``override_with_absolute_paths``.
    """
    identifying = []
    for override in overrides:
        key = key_of_override(override)
        if key in swept or not is_volatile(key):
            identifying.append(override_with_absolute_paths(override, folder))
    return sorted(identifying, key=key_of_override)


def fingerprint(overrides: Sequence[str], user_yaml: Mapping[str, str], swept: Collection[str] = ()) -> str:
    """Return eight hexadecimal digits: a hash of the identifying overrides and of the user's YAML files.

    ``user_yaml`` has the text of each file by ``group/choice``.
    """
    text = json.dumps([identifying_overrides(overrides, swept, os.getcwd()), user_yaml], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
