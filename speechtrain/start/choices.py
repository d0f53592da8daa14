"""The choices of each group: the YAML files of the package, and of the user's own config folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from speechtrain.errors import ConfigError
from speechtrain.overrides import key_of_override

CORPUS = "corpus"
"""The folder with the choices of speechtrain prepare. It is not a group of a run."""


def config_dir(argv: Sequence[str]) -> str | None:
    """Return the folder of the last ``--config-dir`` or ``-cd``, or None without such an option."""
    return option_value(argv, "--config-dir", "-cd")


def option_value(argv: Sequence[str], *names: str) -> str | None:
    """Return the value of the last option with one of ``names``, or None without such an option."""
    # The option and its value are one argument with "=", or two arguments. A null character separates the
    # arguments, because it cannot occur in an argument.
    line = "\0".join(["", *argv])
    values = re.findall(rf"(?<=\0)(?:{'|'.join(names)})[=\0]([^\0]*)", line)
    return values[-1] if values else None


def choices(folder: str | None) -> dict[str, list[str]]:
    """Return the sorted choices of each group, from the package and from ``folder``.

    Base YAMLs, whose names start with ``_``, are not choices.
    """
    names: dict[str, set[str]] = {}
    for config_folder in _config_folders(folder):
        for path in config_folder.glob("*/[!_]*.yaml"):
            names.setdefault(path.parent.name, set()).add(path.stem)
    return {group: sorted(names[group]) for group in sorted(names) if group != CORPUS}


def corpora(folder: str | None) -> dict[str, Path]:
    """Return the YAML file of each corpus by name. A file of the package overrides one in ``folder``."""
    paths = {}
    for config_folder in reversed(_config_folders(folder)):
        for path in sorted(config_folder.glob(f"{CORPUS}/[!_]*.yaml")):
            paths[path.stem] = path
    return paths


def is_shipped(name: str) -> bool:
    """Return whether the package has the YAML file ``group/choice``."""
    return Path(str(resources.files("speechtrain.conf")), f"{name}.yaml").is_file()


def _config_folders(folder: str | None) -> list[Path]:
    """Return the config folder of the package, and ``folder`` if it is set."""
    folders = [Path(str(resources.files("speechtrain.conf")))]
    if folder:
        folders.append(Path(folder))
    return folders


def refuse_bases(overrides: Sequence[str], folder: str | None) -> None:
    """Raise ConfigError for an override that chooses a base YAML, alone or among the choices of a sweep."""
    for text in overrides:
        _, _, value = text.partition("=")
        base = re.search(r"(?<![\w.*?-])_\w+", value)  # a word that starts with _
        if base is None:
            continue
        group = key_of_override(text)
        names = choices(folder).get(group)
        if names:  # Otherwise the key is not a group, and its value may start with _.
            raise ConfigError(f"{group}={base[0]}: a base YAML is not a choice, choose {', '.join(names)}")
