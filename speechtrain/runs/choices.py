"""The choices of each group: the YAML files of the package, and of the user's own config folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from speechtrain.config.resume_fields import key_of_override
from speechtrain.errors import ConfigError

CORPUS = "corpus"
"""The folder with the choices of speechtrain prepare. It is not a group of a run."""


def config_dir(argv: Sequence[str]) -> str | None:
    """Return the folder of ``--config-dir``, the last one if there are several."""
    line = "\0".join(["", *argv])  # No argument has a null character.
    folders = re.findall(r"(?<=\0)(?:--config-dir|-cd)[=\0]([^\0]*)", line)
    return folders[-1] if folders else None


def choices(folder: str | None) -> dict[str, list[str]]:
    """Return the sorted names of each group's choices, with those in ``folder``, without base YAMLs."""
    names: dict[str, set[str]] = {}
    for config_folder in _config_folders(folder):
        for path in config_folder.glob("*/[!_]*.yaml"):
            names.setdefault(path.parent.name, set()).add(path.stem)
    return {group: sorted(names[group]) for group in sorted(names) if group != CORPUS}


def corpora(folder: str | None) -> dict[str, Path]:
    """Return the file of each corpus by name. A file of the package wins over one in ``folder``."""
    paths = {}
    for config_folder in reversed(_config_folders(folder)):
        for path in sorted(config_folder.glob(f"{CORPUS}/[!_]*.yaml")):
            paths[path.stem] = path
    return paths


def _config_folders(folder: str | None) -> list[Path]:
    """Return the config folder of the package, and ``folder`` if it is set."""
    folders = [Path(str(resources.files("speechtrain.conf")))]
    if folder:
        folders.append(Path(folder))
    return folders


def refuse_bases(overrides: Sequence[str], folder: str | None) -> None:
    """Raise ConfigError for an override that chooses a base YAML, also as one choice of a sweep."""
    for text in overrides:
        base = re.search(r"(?<![\w.*?-])_\w+", text.partition("=")[2])
        if base is None:
            continue
        group = key_of_override(text)
        names = choices(folder).get(group)
        if names:
            raise ConfigError(f"{group}={base[0]}: a base YAML is not a choice, choose {', '.join(names)}")
