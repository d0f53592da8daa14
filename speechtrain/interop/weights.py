"""Read weights of any known format under our names, and initialise a module with them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor, nn

from speechtrain.checkpoint.checkpointer import WEIGHTS, Checkpointer
from speechtrain.errors import ConfigError, DataError
from speechtrain.files import absolute_path
from speechtrain.interop import hub, parakeet_hf, wav2vec2_fairseq, wav2vec2_hf
from speechtrain.interop.pretrained import Pretrained
from speechtrain.text.huggingface import HuggingFace

_LOG = logging.getLogger(__name__)
_SPAN_MASK = "speechtrain.nn.masking.SpanMask"
_ENCODER = "speechtrain.encoders.wav2vec2.Wav2Vec2Encoder"
_MODEL = "speechtrain.models.wav2vec2.Wav2Vec2"
NAME = "imported"
"""The name of the choices for ``encoder=`` and ``model=`` that ``write_imported`` writes."""


def read_weights(path: str) -> dict[str, Tensor]:
    """Return the tensors at ``path``, in any known format, on the CPU and under our names.

    The format follows from the content, not from the file's name. The known formats are:

    - a run directory (its best checkpoint is read), and a checkpoint's folder
    - a directory or a .safetensors file with our names
    - a fairseq .pt file
    - a Hugging Face directory, or ``hf:`` followed by such a directory or a model's name on Hugging Face's
    hub

    wav2vec 2.0 models of fairseq and Hugging Face are compared with Hugging Face's model. Without
    transformers, a fairseq file is read with a warning, and a Hugging Face directory is refused.

    Raises RunError, DataError or MachineError. Each message has the path and the fix.
    """
    location = hub.folder_of(path) if path.startswith(hub.PREFIX) else absolute_path(path)
    if location.is_dir():
        return _read_folder(location)
    if not location.is_file():
        raise DataError(
            f"{location} does not exist. Give a run directory, a checkpoint's folder, a .safetensors file, a "
            "fairseq .pt file or a Hugging Face directory"
        )
    if _is_safetensors(location):
        if (location.parent / "config.json").is_file():
            return _read_huggingface(location.parent)
        return wav2vec2_hf.read_safetensors(location)
    pretrained, difference = read_fairseq(location)
    if difference is None:
        _LOG.warning(
            "%s was not checked against Hugging Face's model: transformers is not installed", location
        )
    return pretrained.weights


def read_labels(path: str) -> list[str] | None:
    """Return the labels of the published recogniser at ``path``, or None for any other weights."""
    location = hub.settings_folder_of(path) if path.startswith(hub.PREFIX) else absolute_path(path)
    if not parakeet_hf.is_recogniser(location):
        return None
    node = parakeet_hf.nodes(location)["tokenizer"]
    return HuggingFace(node["model"], labels=node["labels"]).labels


def _read_huggingface(folder: Path) -> dict[str, Tensor]:
    if parakeet_hf.is_recogniser(folder):
        return parakeet_hf.read_weights(folder)
    pretrained, _ = wav2vec2_hf.read(folder)
    return pretrained.weights


def _is_safetensors(path: Path) -> bool:
    """Return whether a file has the format safetensors: 8 bytes with the header's length, then JSON."""
    with path.open("rb") as file:
        file.seek(8)
        return file.read(1) == b"{"


def read_nodes(path: Path) -> dict[str, dict[str, Any]]:
    """Return config nodes that build the model of fairseq or Hugging Face at ``path``, by config group.

    For a wav2vec 2.0 model, only the group ``encoder`` has a node. For our own weights the result is empty,
    because the run that wrote them has its config.

    Raises DataError for a file that cannot be used. A fairseq file is read completely: 2 s for 1 GB.
    """
    folder = path if path.is_dir() else path.parent
    is_run = (folder / "checkpoints").is_dir()
    if not is_run and (folder / "config.json").is_file():
        if parakeet_hf.is_recogniser(folder):
            return parakeet_hf.nodes(folder)
        return {"encoder": _encoder_node(wav2vec2_hf.read_arguments(folder))}
    if path.is_file() and not _is_safetensors(path):
        return {"encoder": _encoder_node(wav2vec2_fairseq.read(path))}
    return {}


def read_fairseq(path: Path) -> tuple[Pretrained, float | None]:
    """Return the model in a fairseq checkpoint, and the result of ``check_fairseq``."""
    pretrained = wav2vec2_fairseq.read(path)
    return pretrained, check_fairseq(pretrained, path)


def check_fairseq(pretrained: Pretrained, path: Path) -> float | None:
    """Return the largest difference between the outputs of our model and of Hugging Face's model.

    Returns None if transformers is not installed. Raises DataError, which begins with ``path``, if the
    difference is above ``wav2vec2_hf.LIMIT``.
    """
    if not wav2vec2_hf.is_available():
        return None
    return wav2vec2_hf.check_difference(wav2vec2_hf.difference_of(pretrained), str(path))


def _read_folder(folder: Path) -> dict[str, Tensor]:
    """Return the weights in a run directory, a checkpoint's folder or another directory with weights."""
    if (folder / "checkpoints").is_dir():
        _, weights = Checkpointer(folder).weights("best")
        return weights
    if (folder / "checkpoint.json").is_file():
        Checkpointer(folder.parent).verify(folder, only=WEIGHTS)
    elif (folder / "config.json").is_file():
        return _read_huggingface(folder)
    if (folder / "model.safetensors").is_file():
        return wav2vec2_hf.read_safetensors(folder / "model.safetensors")
    raise DataError(
        f"{folder} has no weights. Give a run directory with checkpoints/, a checkpoint's folder, or a "
        "directory with model.safetensors"
    )


@dataclass(frozen=True)
class Initialised:
    """The names of a module's tensors after ``initialise``, divided by the source of their values."""

    loaded: list[str]  # tensors with the values of the file
    fresh: list[str]  # unchanged tensors, because the file lacks them


@torch.no_grad()
def initialise(module: nn.Module, weights: Mapping[str, Tensor], path: str) -> Initialised:
    """Copy ``weights`` to the parameters and buffers of ``module`` with the same names.

    The weights must contain all tensors of the module's ``encoder``. Other tensors may be missing. ``path``
    is for messages.

    Raises ConfigError, with the module unchanged, for a tensor of another shape, for a missing tensor of
    the encoder, and if no tensor would be loaded.
    """
    targets = module.state_dict()
    for name, target in targets.items():
        is_in_encoder = name.startswith("encoder.")
        if is_in_encoder and name not in weights:
            raise ConfigError(f"init_from={path}: {name} is missing in it ({_encoder_advice(weights)})")
        if name in weights and weights[name].shape != target.shape:
            advice = "set the keys below model. as in the run that wrote it"
            if is_in_encoder:
                advice = _encoder_advice(weights)
            shapes = f"{tuple(weights[name].shape)} there and {tuple(target.shape)} here"
            raise ConfigError(f"init_from={path}: {name} is {shapes} ({advice})")
    loaded = [name for name in targets if name in weights]
    if not loaded:
        raise ConfigError(f"init_from={path}: none of its tensors fits {type(module).__name__}")
    for name in loaded:
        targets[name].copy_(weights[name])
    return Initialised(loaded, fresh=[name for name in targets if name not in weights])


def _encoder_advice(weights: Mapping[str, Tensor]) -> str:
    """Return advice for a user whose encoder does not fit ``weights``."""
    if not any(name.startswith("encoder.") for name in weights):
        return "it has no encoder"
    return "encoder=finetuned takes the encoder of a run or of a published model"


def write_imported(pretrained: Pretrained, folder: Path) -> None:
    """Write a directory with model.safetensors, and config choices that build its model.

    The choices are encoder/imported.yaml and, for a model with a quantiser, model/imported.yaml. So the
    directory can be the value of ``--config-dir`` and of ``init_from``.
    """
    with wav2vec2_hf.replacing_files(folder) as temporary:
        (temporary / "encoder").mkdir()
        save_file(pretrained.weights, temporary / "model.safetensors")
        (temporary / "encoder" / f"{NAME}.yaml").write_text(_yaml_text(_encoder_node(pretrained)))
        if not pretrained.is_encoder:
            # The choice of ``model`` continues the pretraining.
            groups = {"encoder": NAME, "tokenizer": "none", "optimizer": "wav2vec2", "schedule": "wav2vec2"}
            node = {
                "defaults": [{f"override /{group}": choice} for group, choice in groups.items()],
                "model": {"_target_": _MODEL, **pretrained.model},
                "trainer": {"clip": 0.0, "ema": 0.0},
            }
            (temporary / "model").mkdir()
            (temporary / "model" / f"{NAME}.yaml").write_text(f"# @package _global_\n{_yaml_text(node)}")


def _encoder_node(pretrained: Pretrained) -> dict[str, Any]:
    node: dict[str, Any] = {"_target_": _ENCODER, **pretrained.encoder}
    for name in ("mask", "channel_mask"):
        if node[name]:
            node[name] = {"_target_": _SPAN_MASK, **node[name]}
    return node


def _yaml_text(node: dict[str, Any]) -> str:
    return str(yaml.safe_dump(node, sort_keys=False, default_flow_style=None))
