"""Which run a command means: the one that was started with the same keys, or a new one and its name."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speechtrain.config.resume_fields import fingerprint, typed_fields
from speechtrain.errors import RunError
from speechtrain.run_directory import ABOUT, CONFIG, read_about


def base_folder() -> Path:
    """Where runs without ``run_dir`` are."""
    return Path(os.environ.get("OUTPUT_DIR", "runs"))


def find_run(overrides: Sequence[str], folder: str | None) -> Path | None:
    """The run below OUTPUT_DIR that began with these overrides and the same YAML files of ``folder``.

    Keys that may change do not count. Raises RunError where there are several.
    """
    wanted, found = typed_fields(overrides), []
    for path in sorted(base_folder().glob(f"*/{ABOUT}")):
        about = read_about(path.parent)
        is_same = (path.parent / CONFIG).is_file() and typed_fields(about["overrides"]) == wanted
        if is_same and all(text_of(folder, name) == text for name, text in about["written"].items()):
            found.append(path.parent)
    if len(found) > 1:
        raise RunError(f"{found[0]} and {found[1]} began with the same keys; name one with run_dir=DIR")
    return found[0] if found else None


def run_name(choices: Mapping[str, Any], overrides: Sequence[str], folder: str | None) -> str:
    """A run's folder: the one that is there, else a name that follows from what was typed and written."""
    found = find_run(overrides, folder)
    digest = fingerprint(overrides, written_files(choices, folder))
    # a group deleted by ~GROUP is complained of later, by check()
    return found.name if found else f"{choices.get('model')}-{choices.get('data')}-{digest}"


def written_files(choices: Mapping[str, Any], folder: str | None) -> dict[str, str]:
    """The text of each chosen YAML file of the user's own config folder, by ``group/choice``."""
    names = sorted(f"{group}/{choice}" for group, choice in choices.items())
    return {name: text for name in names if (text := text_of(folder, name))}


def text_of(folder: str | None, name: str) -> str:
    """A YAML file of the user's own config folder; empty where there is none."""
    try:
        return Path(folder, f"{name}.yaml").read_text() if folder else ""
    except OSError:
        return ""
