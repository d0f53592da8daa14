"""The syntax of overrides, KEY=VALUE texts of a command, as Hydra reads them."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from speechtrain.files import absolute_path

_PATH = re.compile(r"""[^][{},:'"\s][^][{},:'"]*""")
"""A text in the value of an override that may be a path: without brackets, commas, colons and quotes."""
PLAIN = re.compile(r"(?!(?:null|true|false|nan|inf)\Z)\.{0,2}[a-z/][\w./-]*", re.ASCII | re.IGNORECASE)
"""A text that Hydra reads as it is written."""


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
