"""The existing run that has the same overrides as a command."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from speechtrain.config.resume_fields import flat, key_of, swept_volatile, typed_fields
from speechtrain.errors import RunError, first_line
from speechtrain.files import small_yaml
from speechtrain.run_directory import ABOUT, CONFIG, About, read_about


def find_run(overrides: Sequence[str], folder: str | None, swept: Collection[str] = ()) -> Path | None:
    """Return the run below OUTPUT_DIR with these overrides and the same YAML files of ``folder``.

    A key that may change counts only in ``swept``, the keys that the command's sweep varies. A run of
    another sweep has other such keys and does not match. Raises RunError if several runs match.
    """
    volatile = swept_volatile(swept)
    run_dirs: list[Path] = []
    named_dirs: list[Path] = []
    for path in sorted(base_folder().glob(f"*/{ABOUT}")):
        about = read_about(path.parent)
        if about.argv is None or about.swept != volatile:
            continue  # A damaged run.json has no command line and matches no command.
        first_folder, current_folder = folders_of(about)
        fields = typed_fields(overrides, swept, current_folder)
        if typed_fields(about.overrides, volatile, first_folder) != fields:
            continue
        is_same = all(text_of(folder, name) == text for name, text in about.written.items())
        if is_same and (path.parent / CONFIG).is_file():
            run_dirs.append(path.parent)
            if "run_dir" in map(key_of, about.overrides):
                named_dirs.append(run_dirs.pop())
    run_dirs = run_dirs or named_dirs  # A run that was started without run_dir comes first.
    if len(run_dirs) > 1:
        raise RunError(
            f"{run_dirs[0]} and {run_dirs[1]} started with the same keys. Choose one with run_dir=DIR"
        )
    return run_dirs[0] if run_dirs else None


def folders_of(about: About) -> tuple[str, str]:
    """Return the folders of the relative paths in the overrides of a run, and of this command.

    Both are empty for a run whose folder is unknown or gone. Then texts are compared as they are.
    """
    if about.folder and Path(about.folder).is_dir():
        return about.folder, os.getcwd()
    return "", ""


def base_folder() -> Path:
    """The folder of runs without ``run_dir``."""
    return Path(os.environ.get("OUTPUT_DIR", "runs"))


def text_of(folder: str | None, name: str) -> str:
    """The text of a YAML file in the user's own config folder; empty if there is none."""
    try:
        return Path(folder, f"{name}.yaml").read_text() if folder else ""
    except (OSError, ValueError):  # A name of a stored run may hold any character.
        return ""


def values_of(text: str) -> dict[str, Any]:
    """Return the values of a YAML text by dotted key, with references as they are written.

    Raises ValueError for a text of another kind or size.
    """
    try:
        values = OmegaConf.to_container(OmegaConf.create(small_yaml(text)), resolve=False)
    except (OmegaConfBaseException, RecursionError, YAMLError) as error:
        raise ValueError(first_line(error)) from None
    if not isinstance(values, dict):
        raise ValueError("it is not a mapping of keys")
    return flat({str(key): value for key, value in values.items()})
