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
from speechtrain.interop.pretrained import Pretrained
from speechtrain.text.huggingface import HuggingFace

_LOG = logging.getLogger(__name__)
_SPAN_MASK = "speechtrain.nn.masking.SpanMask"
_ENCODER = "speechtrain.encoders.wav2vec2.Wav2Vec2Encoder"
_MODEL = "speechtrain.models.wav2vec2.Wav2Vec2"
NAME = "imported"
"""The choice of ``encoder=`` and ``model=`` that an imported model's directory offers."""


def read_weights(path: str) -> dict[str, Tensor]:
    """Read the tensors at ``path``, in any known format, on the CPU and under our names.

    A run directory (its best checkpoint), a checkpoint's folder, a directory or .safetensors file of
    ours, a fairseq .pt file or a Hugging Face directory: the content decides, not the name. ``hf:`` is a
    model of Hugging Face's hub, or such a directory.
    Files of other systems are checked against Hugging Face's model; without transformers, a fairseq
    file is read with a warning and a Hugging Face directory is refused.

    Raises RunError, DataError or MachineError, each naming the path and what to do.
    """
    found = hub.folder_of(path) if path.startswith(hub.PREFIX) else absolute_path(path)
    if found.is_dir():
        return _of_folder(found)
    if not found.is_file():
        raise DataError(
            f"{found} does not exist; give a run directory, a checkpoint's folder, a .safetensors file, a "
            "fairseq .pt file or a Hugging Face directory"
        )
    if _is_safetensors(found):
        if (found.parent / "config.json").is_file():
            return _of_huggingface(found.parent)
        return wav2vec2_hf.read_safetensors(found)
    pretrained, difference = read_fairseq(found)
    if difference is None:
        _LOG.warning("%s was not checked against Hugging Face's model: transformers is not installed", found)
    return pretrained.weights


def read_labels(path: str) -> list[str] | None:
    """The labels of the published recogniser at ``path``; None of any other weights."""
    place = hub.folder_of(path, weights=False) if path.startswith(hub.PREFIX) else absolute_path(path)
    if not parakeet_hf.is_parakeet(place):
        return None
    node = parakeet_hf.nodes(place)["tokenizer"]
    return HuggingFace(node["model"], labels=node["labels"]).labels


def _of_huggingface(folder: Path) -> dict[str, Tensor]:
    if parakeet_hf.is_parakeet(folder):
        return parakeet_hf.read_weights(folder)
    return wav2vec2_hf.read(folder)[0].weights


def _is_safetensors(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"  # the header's length in 8 bytes, then the header


def read_nodes(path: Path) -> dict[str, dict[str, Any]]:
    """The nodes, by group, that weights of fairseq or Hugging Face fit; none if they are ours.

    Of wav2vec 2.0 it is the encoder's. Raises DataError for a file that cannot be used. All of a fairseq
    file is read: 2 s for 1 GB.
    """
    folder = path if path.is_dir() else path.parent
    if not (folder / "checkpoints").is_dir() and (folder / "config.json").is_file():
        if parakeet_hf.is_parakeet(folder):
            return parakeet_hf.nodes(folder)
        return {"encoder": _encoder_node(wav2vec2_hf.read_arguments(folder))}
    is_fairseq = path.is_file() and not _is_safetensors(path)
    return {"encoder": _encoder_node(wav2vec2_fairseq.read(path))} if is_fairseq else {}


def read_fairseq(path: Path) -> tuple[Pretrained, float | None]:
    """Read a fairseq checkpoint; also its difference to Hugging Face's model, None without transformers.

    Raises DataError if the two differ by more than ``huggingface.LIMIT``.
    """
    pretrained = wav2vec2_fairseq.read(path)
    return pretrained, check_fairseq(pretrained, path)


def check_fairseq(pretrained: Pretrained, path: Path) -> float | None:
    """The difference of our outputs to those of Hugging Face's model; None without transformers.

    Raises DataError if it is more than ``huggingface.LIMIT``.
    """
    if not wav2vec2_hf.is_available():
        return None
    return wav2vec2_hf.proved(wav2vec2_hf.difference_of(pretrained), str(path))


def _of_folder(folder: Path) -> dict[str, Tensor]:
    if (folder / "checkpoints").is_dir():
        return Checkpointer(folder).weights("best")[1]
    if (folder / "checkpoint.json").is_file():
        Checkpointer(folder.parent).verify(folder, only=WEIGHTS)
    elif (folder / "config.json").is_file():
        return _of_huggingface(folder)
    if (folder / "model.safetensors").is_file():
        return wav2vec2_hf.read_safetensors(folder / "model.safetensors")
    raise DataError(
        f"{folder} has no weights; give a run directory with checkpoints/, a checkpoint's folder, or a "
        "directory with model.safetensors"
    )


@dataclass(frozen=True)
class Initialised:
    """The result of ``initialise``, by name."""

    loaded: list[str]  # equal to the file's
    fresh: list[str]  # unchanged: missing in the file, or not to be loaded


@torch.no_grad()
def initialise(
    module: nn.Module, weights: Mapping[str, Tensor], path: str, fresh: Container[str] = ()
) -> Initialised:
    """Set every parameter and buffer but those in ``fresh`` to the value of the same name, if any.

    A module's ``encoder.`` is loaded whole or not at all; the rest may be missing. ``path`` is for messages.

    Raises ConfigError, with the module unchanged, for the first tensor that has another shape, the first of
    the encoder that is missing, and if nothing would be loaded.
    """
    own = module.state_dict()
    weights = {name: v for name, v in migrate_names(weights, own).items() if name not in fresh}
    for name, value in own.items():
        of_encoder = name.startswith("encoder.")
        if of_encoder and name not in weights:
            raise ConfigError(f"init_from={path}: {name} is missing in it; {_advice(weights)}")
        if name in weights and weights[name].shape != value.shape:
            advice = (
                _advice(weights) if of_encoder else "set the keys below model. as in the run that wrote it"
            )
            sizes = f"{tuple(weights[name].shape)} there and {tuple(value.shape)} here"
            raise ConfigError(f"init_from={path}: {name} is {sizes}; {advice}")
    loaded = [name for name in own if name in weights]
    if not loaded:
        raise ConfigError(f"init_from={path}: none of its tensors fits {type(module).__name__}")
    for name in loaded:
        own[name].copy_(weights[name])
    taken = set(loaded)
    return Initialised(loaded, [name for name in own if name not in taken])


def _advice(weights: Mapping[str, Tensor]) -> str:
    """The encoder= choices that have these shapes, or what to do if there is none."""
    shapes = {n: tuple(v.shape) for n, v in weights.items() if n.startswith("encoder.")}
    if not shapes:
        return "it has no encoder"
    fits = [name for name, other in _choices().items() if other == shapes]
    if fits:
        return f"encoder={' or '.join(fits)} fits"
    if "encoder.subsampling.linear.weight" in shapes:
        return "recipe=finetune takes encoder, model and tokenizer from it"
    if "encoder.mask_embedding" in shapes:
        return (
            "no encoder= choice has its shapes: set the keys below encoder. as in the run that wrote "
            "it, or import it with speechtrain export --from, which writes a choice that fits"
        )
    return "use the encoder= of the run that wrote it"


def _choices() -> dict[str, dict[str, tuple[int, ...]]]:
    """Shapes of every wav2vec 2.0 encoder in conf/encoder, by name."""
    found = {}
    folder = Path(str(importlib.resources.files("speechtrain.conf")), "encoder")
    files = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(folder.glob("*.yaml"))}
    for name, own in files.items():
        parts = (*own.pop("defaults", ()), name)  # its base YAMLs first, as in Hydra
        node = {key: value for part in parts for key, value in files.get(str(part), {}).items()}
        if name.startswith("_") or node.pop("_target_", None) != _ENCODER:
            continue
        try:
            with torch.device("meta"):
                encoder = Wav2Vec2Encoder(**(node | {"mask": None, "channel_mask": None}))
        except (SpeechtrainError, TypeError):  # a choice that needs a value from another group
            continue
        state = encoder.state_dict()
        found[name] = {f"encoder.{n}": tuple(v.shape) for n, v in state.items()}
    return found


def write_imported(pretrained: Pretrained, folder: Path) -> None:
    """Write model.safetensors, and in encoder/ and model/ the YAML files that build its model.

    The directory is both a Hydra ``--config-dir`` and an ``init_from``.
    """
    with wav2vec2_hf.writing(folder) as temporary:
        (temporary / "encoder").mkdir()
        save_file(pretrained.weights, temporary / "model.safetensors")
        (temporary / "encoder" / f"{NAME}.yaml").write_text(_dumped(_encoder_node(pretrained)))
        if not pretrained.is_encoder:
            (temporary / "model").mkdir()
            (temporary / "model" / f"{NAME}.yaml").write_text(_model_yaml(pretrained))


def _encoder_node(pretrained: Pretrained) -> dict[str, Any]:
    node: dict[str, Any] = {"_target_": _ENCODER, **pretrained.encoder}
    masks = {name: node[name] for name in ("mask", "channel_mask") if node[name]}
    return node | {name: {"_target_": _SPAN_MASK, **mask} for name, mask in masks.items()}


def _model_yaml(pretrained: Pretrained) -> str:
    """A choice of the group ``model`` that pretrains the model further."""
    groups = {"encoder": NAME, "tokenizer": "none", "optimizer": "wav2vec2", "schedule": "wav2vec2"}
    node = {
        "defaults": [{f"override /{group}": choice} for group, choice in groups.items()],
        "model": {"_target_": _MODEL, **pretrained.model},
        "trainer": {"clip": 0.0, "ema": 0.0},
    }
    return "# @package _global_\n" + _dumped(node)


def _dumped(node: dict[str, Any]) -> str:
    return str(yaml.safe_dump(node, sort_keys=False, default_flow_style=None))
