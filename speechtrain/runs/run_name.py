"""The name of a run's folder: the same command has the same name, so it continues its run."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from speechtrain.config.resume_fields import fingerprint
from speechtrain.run_directory import About
from speechtrain.runs.user_yaml import user_yaml_files


def run_name(
    choices: Mapping[str, Any], overrides: Sequence[str], config_dir: str | None, swept: Collection[str] = ()
) -> str:
    """Return ``<model>-<data>-<hash>``. The hash is of the overrides and of the user's YAML files.

    ``choices`` has the choice of each group of Hydra, ``config_dir`` is the user's config folder, and
    ``swept`` are the keys that the command's sweep varies. A volatile key, which may change during a run,
    identifies a run only if it is among these.
    """
    digest = fingerprint(overrides, user_yaml_files(choices, config_dir), swept)
    # A group may be absent here, because check() refuses ~GROUP only later.
    return f"{choices.get('model')}-{choices.get('data')}-{digest}"


def folders_of(about: About) -> tuple[str, str]:
    """Return the working folder of a run's first start, and the one of this command.

    Relative paths in overrides are relative to these folders. If the first folder is unknown or was removed,
    both are empty, and paths are compared as they are written.
    """
    if about.folder and Path(about.folder).is_dir():
        return about.folder, os.getcwd()
    return "", ""


def base_folder() -> Path:
    """Return the folder of runs without ``run_dir``."""
    return Path(os.environ.get("OUTPUT_DIR", "runs"))
