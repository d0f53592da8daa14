"""The YAML files of the user's own config folder (``--config-dir``), whose texts a run stores."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from speechtrain.config.resume_fields import flat
from speechtrain.errors import first_line
from speechtrain.files import small_yaml


def user_yaml_files(choices: Mapping[str, Any], folder: str | None) -> dict[str, str]:
    """Return the text of each chosen YAML file in ``folder``, by ``group/choice``."""
    texts = {}
    for name in sorted(f"{group}/{choice}" for group, choice in choices.items()):
        text = text_of(folder, name)
        if text:
            texts[name] = text
    return texts


def text_of(folder: str | None, name: str) -> str:
    """Return the text of NAME.yaml in ``folder``, or an empty text if the file does not exist."""
    if not folder:
        return ""
    try:
        return Path(folder, f"{name}.yaml").read_text()
    except (OSError, ValueError):  # A name of a stored run may hold any character.
        return ""


def values_of(name: str, text: str) -> dict[str, Any]:
    """Return the values of the file ``group/choice`` by their keys in the config, with references unresolved.

    Raises ValueError if the text is not a mapping, or too large.
    """
    try:
        values = OmegaConf.to_container(OmegaConf.create(small_yaml(text)), resolve=False)
    except (OmegaConfBaseException, RecursionError, YAMLError) as error:
        raise ValueError(first_line(error)) from None
    if not isinstance(values, dict):
        raise ValueError("it is not a mapping of keys")
    prefix = "" if "@package _global_" in text else f"{name.partition('/')[0]}."
    return flat({str(key): value for key, value in values.items()}, prefix)
