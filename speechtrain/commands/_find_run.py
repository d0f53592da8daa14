"""Finds the run that a command continues, started with the same keys, or names a new run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speechtrain.config.resume_fields import fingerprint, typed_fields
from speechtrain.errors import RunError
from speechtrain.run_directory import ABOUT, CONFIG, read_about


def base_folder() -> Path:
    """The folder of runs without ``run_dir``."""
    return Path(os.environ.get("OUTPUT_DIR", "runs"))


def find_run(overrides: Sequence[str], folder: str | None) -> Path | None:
    """The run below OUTPUT_DIR that started with these overrides and the same YAML files of ``folder``.

    Keys that may change do not count. Raises RunError if there are several.
    """
    wanted, found = typed_fields(overrides), []
    for path in sorted(base_folder().glob(f"*/{ABOUT}")):
        about = read_about(path.parent)
        # a damaged run.json says nothing of what was typed, and so matches no command
        is_same = "argv" in about and typed_fields(about["overrides"]) == wanted
        is_same = is_same and all(text_of(folder, name) == text for name, text in about["written"].items())
        if is_same and (path.parent / CONFIG).is_file():
            found.append(path.parent)
    if len(found) > 1:
        raise RunError(f"{found[0]} and {found[1]} started with the same keys; choose one with run_dir=DIR")
    return found[0] if found else None


def run_name(choices: Mapping[str, Any], overrides: Sequence[str], folder: str | None) -> str:
    """A run's folder name: the existing run's, else one that follows from overrides and the user's files."""
    found = find_run(overrides, folder)
    digest = fingerprint(overrides, written_files(choices, folder))
    # check() refuses a group deleted by ~GROUP later
    return found.name if found else f"{choices.get('model')}-{choices.get('data')}-{digest}"


def written_files(choices: Mapping[str, Any], folder: str | None) -> dict[str, str]:
    """The text of each chosen YAML file in the user's own config folder, by ``group/choice``."""
    names = sorted(f"{group}/{choice}" for group, choice in choices.items())
    return {name: text for name in names if (text := text_of(folder, name))}


def text_of(folder: str | None, name: str) -> str:
    """The text of a YAML file in the user's own config folder; empty if there is none."""
    try:
        return Path(folder, f"{name}.yaml").read_text() if folder else ""
    except OSError:
        return ""
