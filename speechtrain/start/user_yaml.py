"""The YAML files in the user's config folder (``--config-dir``). A run stores the texts of chosen files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from speechtrain.errors import first_line
from speechtrain.run_directory import flat
from speechtrain.start.choices import is_shipped


def user_yaml_files(choices: Mapping[str, Any], folder: str | None) -> dict[str, str]:
    """Return the text of each chosen YAML file in ``folder``, by ``group/choice``.

    ``choices`` has the choice of each group.
    """
    texts = {}
    for name in _names(choices):
        text = text_of(folder, name)
        if text and not is_shipped(name):
            texts[name] = text
    return texts


def unused_files(choices: Mapping[str, Any], folder: str | None) -> list[str]:
    """Return a line for each chosen YAML file in ``folder`` that has the name of a file of the package.

    Hydra uses the file of the package.
    """
    lines = []
    for name in _names(choices):
        if text_of(folder, name) and is_shipped(name):
            rule = f"{name.replace('/', '=')} is the choice of speechtrain"
            lines.append(f"{folder}/{name}.yaml is not used, because {rule}. Rename the file")
    return lines


def _names(choices: Mapping[str, Any]) -> list[str]:
    """Return ``group/choice`` of each choice, sorted, without Hydra's package ``@NAME`` of the group."""
    return sorted({f"{group.partition('@')[0]}/{choice}" for group, choice in choices.items()})


def text_of(folder: str | None, name: str) -> str:
    """Return the text of NAME.yaml in ``folder``, or an empty text if the file cannot be read."""
    if not folder:
        return ""
    try:
        return Path(folder, f"{name}.yaml").read_text()
    except (OSError, ValueError):  # ValueError: a name from run.json may have a null character.
        return ""


def values_of(name: str, text: str) -> dict[str, Any]:
    """Return the values in ``text`` by their full keys in the config, such as ``optimizer.lr``.

    ``name`` is the ``group/choice`` of the file. Interpolations stay unresolved. Raises ValueError if the
    text is not a mapping.
    """
    try:
        values = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (OmegaConfBaseException, RecursionError, YAMLError) as error:
        raise ValueError(first_line(error)) from None
    if not isinstance(values, dict):
        raise ValueError("it is not a mapping of keys")
    # The keys are below the group, unless the file says that they are at the top of the config.
    prefix = "" if "@package _global_" in text else f"{name.partition('/')[0]}."
    return flat({str(key): value for key, value in values.items()}, prefix)
