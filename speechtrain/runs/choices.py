"""The choices of each group: the YAML files of the package, and of the user's own config folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from speechtrain.config.resume_fields import key_of
from speechtrain.errors import ConfigError


def config_dir(argv: Sequence[str]) -> str | None:
    """The folder of ``--config-dir``, the last one if there are several."""
    line = "\0".join(["", *argv])  # no argument holds a null character
    found = re.findall(r"(?<=\0)(?:--config-dir|-cd)[=\0]([^\0]*)", line)
    return found[-1] if found else None


def choices(folder: str | None) -> dict[str, list[str]]:
    """The sorted names of each group's choices, with those in ``folder``; a base YAML is not a choice."""
    roots = [Path(str(resources.files("speechtrain.conf"))), *([Path(folder)] if folder else [])]
    found = sorted({(path.parent.name, path.stem) for root in roots for path in root.glob("*/[!_]*.yaml")})
    return {group: [name for other, name in found if other == group] for group, _ in found if group != CORPUS}


CORPUS = "corpus"
"""The folder of choices that are speechtrain prepare's, and no group of a run."""


def corpora(folder: str | None) -> dict[str, Path]:
    """The file of each corpus, of the package and of ``folder``; the package's names are its own."""
    roots = [*([Path(folder)] if folder else []), Path(str(resources.files("speechtrain.conf")))]
    return {path.stem: path for root in roots for path in sorted(root.glob(f"{CORPUS}/[!_]*.yaml"))}


def refuse_bases(overrides: Sequence[str], folder: str | None) -> None:
    """Raise ConfigError for an override that chooses a base YAML, also as one choice of a sweep."""
    for text in overrides:
        group, base = key_of(text), re.search(r"(?<![\w.*?-])_\w+", text.partition("=")[2])
        if base and (names := choices(folder).get(group)):
            raise ConfigError(f"{group}={base[0]}: a base YAML is not a choice; choose {', '.join(names)}")
