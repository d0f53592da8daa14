"""Find models in Hugging Face's format, and upload a folder to the hub.

A model is named ``hf:FOLDER`` (a local folder), ``hf:NAME`` (the newest version on Hugging Face's hub) or
``hf:NAME@COMMIT`` (a fixed version on the hub).
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Sequence
from pathlib import Path

from speechtrain.errors import ConfigError, DataError, MachineError, MissingPackage, one_line
from speechtrain.files import absolute_path

PREFIX = "hf:"
# Patterns of the files to download.
_SETTINGS = ("config.json", "preprocessor_config.json", "processor_config.json", "tokenizer.json")
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
# A pickle is used only if the model has no other weights. It is read without running its code.
_PICKLED_WEIGHTS = ("pytorch_model.bin",)


def settings_folder_of(name: str) -> Path:
    """Return a folder with the settings of the model ``name``, which may lack its weights.

    It is a local folder, or a snapshot in the cache of the hub's files. Files that are missing in the cache
    are downloaded.

    Raises DataError if the hub does not have the model, or if the hub cannot be reached and the cache does
    not have it. Raises MissingPackage without ``huggingface_hub``.
    """
    name = name.removeprefix(PREFIX)
    local_folder = absolute_path(name)
    if local_folder.is_dir():
        return local_folder
    model, _, commit = name.partition("@")
    return _snapshot(model, commit or "main", _SETTINGS)


def folder_of(name: str) -> Path:
    """Return the folder of the model ``name`` with its weights. Raises as ``settings_folder_of``."""
    settings_folder = settings_folder_of(name)
    name = name.removeprefix(PREFIX)
    if absolute_path(name).is_dir():
        return settings_folder
    model, _, _ = name.partition("@")
    # The name of a branch may refer to a newer commit by now. The weights must be of the settings' commit.
    commit = settings_folder.name
    folder = _snapshot(model, commit, (*_SETTINGS, *_WEIGHTS))
    if not any(folder.glob("*.safetensors")):
        folder = _snapshot(model, commit, (*_SETTINGS, *_PICKLED_WEIGHTS))
    return folder


def pinned(name: str) -> str:
    """Return a name that always refers to the same model as ``name`` does now.

    It contains the absolute path of a local folder, or the commit of the version on the hub.
    """
    folder = settings_folder_of(name)
    name = name.removeprefix(PREFIX)
    if absolute_path(name).is_dir():
        return f"{PREFIX}{folder}"
    model, _, _ = name.partition("@")
    return f"{PREFIX}{model}@{folder.name}"


@functools.cache
def _snapshot(model: str, revision: str, patterns: tuple[str, ...]) -> Path:
    """Download the files that match ``patterns``, and return their folder.

    ``revision`` is a commit or a branch of the model. The name of the folder is the commit.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise MissingPackage(
            f"{PREFIX}{model} needs huggingface_hub: pip install -e '.[interop]', or give a folder"
        ) from None
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=list(patterns)))
    except (OSError, ValueError) as error:  # The network libraries and the hub raise many subclasses.
        first_line, _, _ = str(error).partition("\n")
        reason = one_line(first_line, 160)
        raise DataError(
            f"{PREFIX}{model}: neither a folder nor a model that the hub gives "
            f"({type(error).__name__}: {reason}). Correct the name, or copy the model to a folder and name it"
        ) from None


def check_upload(name: str, needs_token: bool) -> None:
    """Check that a folder can be uploaded as the model ``name`` of the hub. Opens no connection.

    Raises ConfigError if the name does not have the form OWNER/MODEL. Raises MachineError without
    ``huggingface_hub``, and, if the upload ``needs_token``, without a token.
    """
    try:
        from huggingface_hub import get_token

        hub_utils = importlib.import_module("huggingface_hub.utils")
    except ImportError:
        raise MachineError(f"--push {name} needs huggingface_hub: pip install -e '.[interop]'") from None
    try:
        hub_utils.validate_repo_id(name)
    except ValueError as error:
        raise ConfigError(f"--push {name}: {one_line(str(error), 200)}") from None
    if "/" not in name:
        raise ConfigError(f"--push {name}: name the owner too, as in --push OWNER/{name}")
    if needs_token and get_token() is None:
        page = "https://huggingface.co/settings/tokens"
        raise MachineError(
            f"--push {name} needs a token of the hub. Create one that may write at {page}, and set HF_TOKEN "
            "or run hf auth login. --dry-run needs none"
        )


def upload(folder: Path, names: Sequence[str], model: str) -> str:
    """Upload the files ``names`` of a folder to ``model`` of the hub, and return the address of the commit.

    The hub checks the card README.md first. A model that the hub does not have yet becomes private. Raises
    MachineError if the hub refuses or cannot be reached.
    """
    from huggingface_hub import HfApi, ModelCard

    errors = importlib.import_module("huggingface_hub.errors")
    api = HfApi()
    try:
        ModelCard.load(folder / "README.md").validate()
        api.create_repo(model, private=True, exist_ok=True)
        commit = api.upload_folder(
            repo_id=model,
            folder_path=folder,
            allow_patterns=list(names),
            commit_message="Export of speechtrain",
        )
    except (OSError, ValueError, errors.HTTPError) as error:
        reason = one_line(f"{type(error).__name__}: {error}", 300)
        fix = f"The files are in {folder}. Repeat the command with --force"
        raise MachineError(f"--push {model}: the hub did not store the model ({reason}). {fix}") from None
    return commit.commit_url
