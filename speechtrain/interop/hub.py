"""Finds models of Hugging Face: ``hf:FOLDER``, or ``hf:NAME`` of the hub. ``hf:NAME@COMMIT`` is pinned."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from speechtrain.errors import DataError, MachineError, one_line
from speechtrain.files import absolute_path

PREFIX = "hf:"
_SETTINGS = ("config.json", "preprocessor_config.json", "processor_config.json", "tokenizer.json")
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
# A pickle is used only if the model has no other weights. It is read without running its code.
_OLD_WEIGHTS = ("pytorch_model.bin",)


def folder_of(name: str, weights: bool = True) -> Path:
    """Return the local folder of the model ``name``: that folder itself, or a snapshot in the hub's cache.

    Without ``weights``, only the model's settings are downloaded.

    Raises DataError if the hub does not have the name, and if neither the cache has the model nor the hub
    can be reached. Raises MachineError without ``huggingface_hub``.
    """
    name = name.removeprefix(PREFIX)
    local_folder = absolute_path(name)
    if local_folder.is_dir():
        return local_folder
    model, _, commit = name.partition("@")
    settings = _snapshot(model, commit or "main", _SETTINGS)
    if not weights:
        return settings
    folder = _snapshot(model, settings.name, (*_SETTINGS, *_WEIGHTS))
    if not any(folder.glob("*.safetensors")):
        folder = _snapshot(model, settings.name, (*_SETTINGS, *_OLD_WEIGHTS))
    return folder


def pinned(name: str) -> str:
    """Return ``name`` with the absolute path of its folder, or with the hub's present commit of the model."""
    name = name.removeprefix(PREFIX)
    local_folder = absolute_path(name)
    if local_folder.is_dir():
        return f"{PREFIX}{local_folder}"
    model = name.partition("@")[0]
    commit = folder_of(name, weights=False).name
    return f"{PREFIX}{model}@{commit}"


@functools.cache
def _snapshot(model: str, commit: str, patterns: tuple[str, ...]) -> Path:
    """Download the files that match ``patterns``. The name of the returned folder is the commit."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise MachineError(
            f"{PREFIX}{model} needs huggingface_hub: pip install -e '.[interop]', or give a folder"
        ) from None
    try:
        return Path(snapshot_download(model, revision=commit, allow_patterns=list(patterns)))
    except (OSError, ValueError) as error:  # The errors of the network libraries and of the hub.
        reason = one_line(str(error).partition("\n")[0], 160)
        raise DataError(
            f"{PREFIX}{model}: neither a folder nor a model that the hub gives "
            f"({type(error).__name__}: {reason}). Correct the name, or copy the model to a folder and name it"
        ) from None
