"""The name of a run's folder: the same command has the same name, so it continues its run."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from speechtrain.overrides import key_of_override, override_with_absolute_paths
from speechtrain.run_directory import About
from speechtrain.start.changeable_keys import may_change
from speechtrain.start.user_yaml import user_yaml_files


def run_name(
    choices: Mapping[str, Any], overrides: Sequence[str], config_dir: str | None, swept: Collection[str] = ()
) -> str:
    """Return ``<model>-<data>-<hash>``. The hash is of the overrides and of the user's YAML files.

    ``choices`` has the choice of each group of Hydra, ``config_dir`` is the user's config folder, and
    ``swept`` are the keys that the command's sweep varies. A key that may change during a run identifies a
    run only if it is among these.
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


def identifying_overrides(
    overrides: Sequence[str], swept: Collection[str] = (), folder: str = ""
) -> list[str]:
    """Return the overrides that identify a run, sorted by key. Overrides of the same key stay in their order.

    A key that may change identifies a run only if it is in ``swept``, the keys that a sweep varies. Paths
    are made absolute as in ``override_with_absolute_paths``.
    """
    identifying = []
    for override in overrides:
        key = key_of_override(override)
        if key in swept or not may_change(key):
            identifying.append(override_with_absolute_paths(override, folder))
    return sorted(identifying, key=key_of_override)


def fingerprint(overrides: Sequence[str], user_yaml: Mapping[str, str], swept: Collection[str] = ()) -> str:
    """Return eight hexadecimal digits: a hash of the identifying overrides and of the user's YAML files.

    ``user_yaml`` has the text of each file by ``group/choice``.
    """
    text = json.dumps([identifying_overrides(overrides, swept, os.getcwd()), user_yaml], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
