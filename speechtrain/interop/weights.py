"""Reads weights of any known format under our names, and initialises a module from them."""

from __future__ import annotations

import importlib.resources
import logging
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor, nn

from speechtrain.checkpoint.migrations import migrate_names
from speechtrain.checkpoint.whole import WEIGHTS, Checkpointer
from speechtrain.encoders.wav2vec2 import Wav2Vec2Encoder
from speechtrain.errors import ConfigError, DataError, SpeechtrainError
from speechtrain.files import absolute_path
from speechtrain.interop import hub, parakeet_hf, wav2vec2_fairseq, wav2vec2_hf
from speechtrain.interop.pretrained import Pretrained, Shapes
from speechtrain.text.huggingface import HuggingFace

_LOG = logging.getLogger(__name__)
_SPAN_MASK = "speechtrain.nn.masking.SpanMask"
_ENCODER = "speechtrain.encoders.wav2vec2.Wav2Vec2Encoder"
_MODEL = "speechtrain.models.wav2vec2.Wav2Vec2"
NAME = "imported"
"""The name of the choices of ``encoder=`` and ``model=`` in an imported model's directory."""


def read_weights(path: str) -> dict[str, Tensor]:
    """Read the tensors at ``path``, in any known format, on the CPU and under our names.

    The content decides on the format, not the name. These are known:

    - a run directory (its best checkpoint is read), and a checkpoint's folder
    - a directory or a .safetensors file with our names
    - a fairseq .pt file
    - a Hugging Face directory, or ``hf:`` with such a directory or a model of Hugging Face's hub

    Files of other systems are checked against Hugging Face's model. Without transformers, a fairseq file
    is read with a warning and a Hugging Face directory is refused.

    Raises RunError, DataError or MachineError. Each message names the path and a remedy.
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
    location = hub.folder_of(path, weights=False) if path.startswith(hub.PREFIX) else absolute_path(path)
    if not parakeet_hf.is_parakeet(location):
        return None
    node = parakeet_hf.nodes(location)["tokenizer"]
    return HuggingFace(node["model"], labels=node["labels"]).labels


def _read_huggingface(folder: Path) -> dict[str, Tensor]:
    if parakeet_hf.is_parakeet(folder):
        return parakeet_hf.read_weights(folder)
    return wav2vec2_hf.read(folder)[0].weights


def _is_safetensors(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"  # The file begins with the header's length in 8 bytes and the header.


def read_nodes(path: Path) -> dict[str, dict[str, Any]]:
    """Return the config nodes that fit weights of fairseq or Hugging Face, by group.

    The only node of a wav2vec 2.0 model is ``encoder``. Our own weights have no nodes.

    Raises DataError for a file that cannot be used. A fairseq file is read whole: 2 s for 1 GB.
    """
    folder = path if path.is_dir() else path.parent
    if not (folder / "checkpoints").is_dir() and (folder / "config.json").is_file():
        if parakeet_hf.is_parakeet(folder):
            return parakeet_hf.nodes(folder)
        return {"encoder": _encoder_node(wav2vec2_hf.read_arguments(folder))}
    if path.is_file() and not _is_safetensors(path):
        return {"encoder": _encoder_node(wav2vec2_fairseq.read(path))}
    return {}


def read_fairseq(path: Path) -> tuple[Pretrained, float | None]:
    """Read a fairseq checkpoint, and compare it by ``check_fairseq``. Return the model and the difference."""
    pretrained = wav2vec2_fairseq.read(path)
    return pretrained, check_fairseq(pretrained, path)


def check_fairseq(pretrained: Pretrained, path: Path) -> float | None:
    """Return the difference of our outputs from those by Hugging Face's model, or None without transformers.

    Raises DataError if the difference is above ``wav2vec2_hf.LIMIT``.
    """
    if not wav2vec2_hf.is_available():
        return None
    return wav2vec2_hf.check_difference(wav2vec2_hf.difference_of(pretrained), str(path))


def _read_folder(folder: Path) -> dict[str, Tensor]:
    if (folder / "checkpoints").is_dir():
        return Checkpointer(folder).weights("best")[1]
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
    """The names of the tensors of a module after ``initialise``."""

    loaded: list[str]  # These have the file's values.
    fresh: list[str]  # These are unchanged: the file lacks them, or they were skipped.


@torch.no_grad()
def initialise(
    module: nn.Module, weights: Mapping[str, Tensor], path: str, skip: Container[str] = ()
) -> Initialised:
    """Set the parameters and buffers of ``module`` to the weights of the same names that are not in ``skip``.

    The module's ``encoder.`` is loaded whole or not at all. Other tensors may be missing in the weights.
    ``path`` is for messages.

    Raises ConfigError, with the module unchanged, for a tensor of another shape, for a missing tensor of
    the encoder, and if no tensor would be loaded.
    """
    targets = module.state_dict()
    stored = {name: tensor for name, tensor in migrate_names(weights, targets).items() if name not in skip}
    for name, target in targets.items():
        is_of_encoder = name.startswith("encoder.")
        if is_of_encoder and name not in stored:
            raise ConfigError(f"init_from={path}: {name} is missing in it ({_advice(stored)})")
        if name in stored and stored[name].shape != target.shape:
            advice = "set the keys below model. as in the run that wrote it"
            if is_of_encoder:
                advice = _advice(stored)
            sizes = f"{tuple(stored[name].shape)} there and {tuple(target.shape)} here"
            raise ConfigError(f"init_from={path}: {name} is {sizes} ({advice})")
    loaded = [name for name in targets if name in stored]
    if not loaded:
        raise ConfigError(f"init_from={path}: none of its tensors fits {type(module).__name__}")
    for name in loaded:
        targets[name].copy_(stored[name])
    return Initialised(loaded, fresh=[name for name in targets if name not in stored])


def _advice(weights: Mapping[str, Tensor]) -> str:
    """Return the encoder= choices that have the shapes of these weights, or the remedy if there is none."""
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items() if name.startswith("encoder.")}
    if not shapes:
        return "it has no encoder"
    choices = [name for name, choice_shapes in _encoder_choices().items() if choice_shapes == shapes]
    if choices:
        return f"encoder={' or '.join(choices)} fits"
    if "encoder.subsampling.linear.weight" in shapes:
        return "recipe=finetune takes encoder, model and tokenizer from it"
    if "encoder.mask_embedding" in shapes:
        return (
            "no encoder= choice has its shapes: set the keys below encoder. as in the run that wrote "
            "it, or import it with speechtrain export --from, which writes a choice that fits"
        )
    return "use the encoder= of the run that wrote it"


def _encoder_choices() -> dict[str, Shapes]:
    """Return the shapes of each wav2vec 2.0 encoder in conf/encoder, by the name of the choice."""
    choices = {}
    folder = Path(str(importlib.resources.files("speechtrain.conf")), "encoder")
    files = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(folder.glob("*.yaml"))}
    for name, content in files.items():
        node: dict[str, Any] = {}
        for base in content.pop("defaults", ()):  # As in Hydra, the keys of a base file come first.
            node.update(files.get(str(base), {}))
        node.update(content)
        if name.startswith("_") or node.pop("_target_", None) != _ENCODER:
            continue
        try:
            with torch.device("meta"):
                encoder = Wav2Vec2Encoder(**(node | {"mask": None, "channel_mask": None}))
        except (SpeechtrainError, TypeError):  # This choice needs a value from another group.
            continue
        state = encoder.state_dict()
        choices[name] = {f"encoder.{key}": tuple(tensor.shape) for key, tensor in state.items()}
    return choices


def write_imported(pretrained: Pretrained, folder: Path) -> None:
    """Write model.safetensors, and the YAML files that build its model in encoder/ and model/.

    The directory is both a Hydra ``--config-dir`` and an ``init_from``.
    """
    with wav2vec2_hf.replacing_files(folder) as temporary:
        (temporary / "encoder").mkdir()
        save_file(pretrained.weights, temporary / "model.safetensors")
        (temporary / "encoder" / f"{NAME}.yaml").write_text(_yaml_text(_encoder_node(pretrained)))
        if not pretrained.is_encoder:
            (temporary / "model").mkdir()
            (temporary / "model" / f"{NAME}.yaml").write_text(_model_yaml(pretrained))


def _encoder_node(pretrained: Pretrained) -> dict[str, Any]:
    node: dict[str, Any] = {"_target_": _ENCODER, **pretrained.encoder}
    for name in ("mask", "channel_mask"):
        if node[name]:
            node[name] = {"_target_": _SPAN_MASK, **node[name]}
    return node


def _model_yaml(pretrained: Pretrained) -> str:
    """Return a choice of the group ``model`` that continues the pretraining of the model."""
    groups = {"encoder": NAME, "tokenizer": "none", "optimizer": "wav2vec2", "schedule": "wav2vec2"}
    node = {
        "defaults": [{f"override /{group}": choice} for group, choice in groups.items()],
        "model": {"_target_": _MODEL, **pretrained.model},
        "trainer": {"clip": 0.0, "ema": 0.0},
    }
    return "# @package _global_\n" + _yaml_text(node)


def _yaml_text(node: dict[str, Any]) -> str:
    return str(yaml.safe_dump(node, sort_keys=False, default_flow_style=None))
