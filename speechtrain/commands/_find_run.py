"""The existing run that has the same overrides as a command."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from speechtrain.config.resume_fields import typed_fields
from speechtrain.errors import RunError
from speechtrain.run_directory import ABOUT, CONFIG, read_about


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


def base_folder() -> Path:
    """The folder of runs without ``run_dir``."""
    return Path(os.environ.get("OUTPUT_DIR", "runs"))


def text_of(folder: str | None, name: str) -> str:
    """The text of a YAML file in the user's own config folder; empty if there is none."""
    try:
        return Path(folder, f"{name}.yaml").read_text() if folder else ""
    except OSError:
        return ""
