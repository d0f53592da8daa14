"""Models of Hugging Face by name: ``hf:FOLDER``, or ``hf:NAME`` of the hub, pinned as ``hf:NAME@COMMIT``."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from speechtrain.errors import DataError, MachineError, one_line
from speechtrain.files import absolute_path

PREFIX = "hf:"
_SETTINGS = ("config.json", "preprocessor_config.json", "processor_config.json", "tokenizer.json")
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_OLD_WEIGHTS = ("pytorch_model.bin",)  # read without running what it holds, and only where there is no other


def folder_of(name: str, weights: bool = True) -> Path:
    """The local folder of the model ``name``, in the hub's cache; without ``weights``, of its settings.

    Raises DataError for a name that the hub does not have, or that is not in the cache without a network,
    MachineError without ``huggingface_hub``.
    """
    name = name.removeprefix(PREFIX)
    place = absolute_path(name)
    if place.is_dir():
        return place
    model, _, commit = name.partition("@")
    settings = _snapshot(model, commit or "main", _SETTINGS)
    if not weights:
        return settings
    folder = _snapshot(model, settings.name, (*_SETTINGS, *_WEIGHTS))
    if not any(folder.glob("*.safetensors")):
        folder = _snapshot(model, settings.name, (*_SETTINGS, *_OLD_WEIGHTS))
    return folder


def pinned(name: str) -> str:
    """``name`` with an absolute folder, or with the commit that the hub has for it now."""
    place = absolute_path(name.removeprefix(PREFIX))
    if place.is_dir():
        return f"{PREFIX}{place}"
    return f"{PREFIX}{name.removeprefix(PREFIX).partition('@')[0]}@{folder_of(name, weights=False).name}"


@functools.cache
def _snapshot(model: str, commit: str, patterns: tuple[str, ...]) -> Path:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise MachineError(
            f"{PREFIX}{model} needs huggingface_hub; pip install -e '.[interop]', or give a folder"
        ) from None
    try:
        return Path(snapshot_download(model, revision=commit, allow_patterns=list(patterns)))
    except (OSError, ValueError) as error:  # both libraries of the network, and what the hub says
        told = one_line(str(error).partition("\n")[0], 160)
        raise DataError(
            f"{PREFIX}{model}: neither a folder nor a model that the hub gives "
            f"({type(error).__name__}: {told}); correct the name, or copy the model to a folder and name that"
        ) from None
