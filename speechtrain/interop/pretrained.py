"""Common parts of the wav2vec 2.0 converters: our names of tensors, and the arguments that build a model.

A format module (``fairseq``, ``huggingface``) converts files to ``Pretrained`` and back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from speechtrain.encoders.wav2vec2 import Wav2Vec2Encoder
from speechtrain.errors import ConfigError, DataError
from speechtrain.models.ctc import CTC
from speechtrain.models.wav2vec2 import Wav2Vec2
from speechtrain.nn.conv_extractor import ConvBlock
from speechtrain.nn.masking import SpanMask
from speechtrain.nn.transformer import TransformerLayer

MOST_LAYERS = 1_000
Shapes = dict[str, tuple[int, ...]]
Rule = tuple[str, str]
"""A pattern for whole names, and its replacement, in the syntax of ``re``."""
CONV, LAYER = r"encoder\.extractor\.layers\.(\d+)", r"encoder\.transformer\.layers\.(\d+)"
"""Patterns of our names of a convolution and of a transformer layer; each captures the layer's number."""
_ATTENTION = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj"}


@dataclass(frozen=True)
class Pretrained:
    """A wav2vec 2.0 model outside of any run.

    ``encoder`` are ``Wav2Vec2Encoder``'s arguments with ``mask`` and ``channel_mask`` as arguments of
    ``SpanMask`` or None; ``model`` are those of ``Wav2Vec2`` without its encoder, empty if the file
    has no quantiser. ``weights`` have the task's names (``encoder.…``), in fp32. ``labels`` are the
    symbols of a CTC layer (``output.…``), whose last class is the blank; empty if there is none.
    """

    encoder: dict[str, Any]
    model: dict[str, Any]
    weights: dict[str, Tensor]
    labels: tuple[str, ...] = ()

    @property
    def is_encoder(self) -> bool:
        """Whether the parts that only pretraining needs are missing."""
        return not self.model

    @property
    def values(self) -> int:
        """Number of parameters."""
        return sum(value.numel() for value in self.weights.values())

    def encoder_only(self) -> Pretrained:
        """The model without quantiser and projections."""
        own = {name: value for name, value in self.weights.items() if name.startswith("encoder.")}
        return Pretrained(self.encoder, {}, own)

    def build(self) -> tuple[Wav2Vec2Encoder, Wav2Vec2 | None]:
        """Build encoder and task in evaluation mode, with the weights; no task if ``is_encoder``."""
        with torch.device("meta"):
            module, encoder = self._module()
        module.load_state_dict(self.weights, assign=True)
        module.eval()
        return encoder, module if isinstance(module, Wav2Vec2) else None

    def shapes(self) -> Shapes:
        """Names and shapes that follow from the arguments. Raises ConfigError for values out of range."""
        layers, convolutions = self.encoder["layers"], len(self.encoder["conv_layers"])
        if max(layers, convolutions) > MOST_LAYERS:
            raise ConfigError(f"{layers} layers and {convolutions} convolutions; the most are {MOST_LAYERS}")
        with torch.device("meta"):
            module, _ = self._module()
        return {name: tuple(value.shape) for name, value in module.state_dict().items()}

    def _module(self) -> tuple[nn.Module, Wav2Vec2Encoder]:
        given = ((name, self.encoder[name]) for name in ("mask", "channel_mask"))
        masks = {name: SpanMask(**mask) if mask else None for name, mask in given}
        encoder = Wav2Vec2Encoder(**{**self.encoder, **masks})
        if self.model:
            return Wav2Vec2(encoder, **self.model), encoder
        head = {"output": nn.Linear(encoder.width, len(self.labels) + 1)} if self.labels else {}
        return nn.ModuleDict({"encoder": encoder, **head}), encoder


def describe(module: nn.Module, weights: Mapping[str, Tensor], encoder_only: bool = False) -> Pretrained:
    """The model in a task: a ``Wav2Vec2``, a ``CTC`` of characters, or only the encoder.

    Raises ConfigError for a task without a wav2vec 2.0 encoder, for another one unless ``encoder_only``.
    """
    encoder = getattr(module, "encoder", None)
    if not isinstance(encoder, Wav2Vec2Encoder):
        raise not_exportable(f"{type(module).__name__} with {type(encoder).__name__}")
    arguments = _encoder_arguments(encoder)
    own = {name: value.detach().cpu().float() for name, value in weights.items()}
    if encoder_only:
        return Pretrained(arguments, {}, own).encoder_only()
    if isinstance(module, Wav2Vec2):
        return Pretrained(arguments, _model_arguments(module), own)
    if type(module) is CTC and "|" not in module.tokenizer.labels:
        labels = module.tokenizer.labels
        if module.tokenizer.decode(range(len(labels))) == "".join(labels):  # no subwords
            return Pretrained(arguments, {}, own, tuple(labels))
    raise not_exportable(f"{type(module).__name__} with {type(module.tokenizer).__name__}")


def not_exportable(reason: str) -> ConfigError:
    """Return the error of a model that no format holds, with all models that can be exported."""
    return ConfigError(
        f"{reason} cannot be exported whole. These can: model=wav2vec2, model=ctc with encoder=wav2vec2 and "
        "tokenizer=characters without '|', and for --to huggingface encoder=fastconformer_* with model=ctc, "
        "model.ctc_weight above 0 or prediction=lstm. --encoder exports the encoder of any model with "
        "encoder=wav2vec2"
    )


def _encoder_arguments(encoder: Wav2Vec2Encoder) -> dict[str, Any]:
    extractor, transformer = encoder.extractor, encoder.transformer
    first, layer = extractor.layers[0], transformer.layers[0]
    assert isinstance(first, ConvBlock)
    assert isinstance(layer, TransformerLayer)
    return {
        "conv_layers": [[w, *span] for w, span in zip(extractor.widths, extractor.spans, strict=True)],
        "conv_bias": first.conv.bias is not None,
        "conv_norm": "group" if isinstance(first.norm, nn.GroupNorm) else "layer",
        "gradient_scale": extractor.gradient_scale,
        "width": encoder.width,
        "layers": len(transformer.layers),
        "feed_forward": layer.feed_forward_in.out_features,
        "heads": layer.attention.heads,
        "pre_norm": transformer.pre_norm,
        "position_kernel": transformer.position.kernel,
        "position_groups": transformer.position.groups,
        "dropout": transformer.dropout.p,
        "attention_dropout": layer.attention.dropout,
        "activation_dropout": layer.activation_dropout.p,
        "input_dropout": encoder.input_dropout.p,
        "layer_drop": encoder.layer_drop,
        "normalise_audio": encoder.normalise_audio,
        "sample_rate": encoder.sample_rate,
        "mask": encoder.mask and asdict(encoder.mask),
        "channel_mask": encoder.channel_mask and asdict(encoder.channel_mask),
    }


def _model_arguments(task: Wav2Vec2) -> dict[str, Any]:
    groups, entries, width = task.quantizer.codebook.shape
    return {
        "final_width": task.final_proj.out_features,
        "codebooks": groups,
        "codes": entries,
        "code_width": groups * width,
        "temperature": list(task.temperature),
        "negatives": task.negatives,
        "contrast_temperature": task.contrast_temperature,
        "diversity_weight": task.diversity_weight,
        "penalty_weight": task.penalty_weight,
        "target_dropout": task.target_dropout,
    }


class Settings(dict[str, tuple[str, Any]]):
    """By our argument: another format's name of it, and its value in a file that lacks it.

    >>> Settings(layers=("encoder_layers", 12), heads=("heads", 8)).read({"encoder_layers": "24"})
    {'layers': 24, 'heads': 8}
    """

    def read(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Our arguments for the settings of a file, converted to the types of the values here."""
        return {ours: type(usual)(found.get(theirs, usual)) for ours, (theirs, usual) in self.items()}

    def write(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The other format's settings for our arguments."""
        return {theirs: arguments[ours] for ours, (theirs, _) in self.items()}


def renamed(name: str, rules: Sequence[Rule]) -> str:
    """Rename ``name`` by the first rule whose pattern matches all of it. Raises KeyError if none does.

    Query, key, value and output of an attention have the same names in both formats.

    >>> renamed("encoder.norm.bias", [(r"encoder\\.norm\\.(.+)", r"layer_norm.\\1")])
    'layer_norm.bias'
    """
    for pattern, replacement in rules:
        if match := re.fullmatch(pattern, name):
            theirs = match.expand(replacement)
            return re.sub(r"(?<=\.)(query|key|value|output)(?=\.)", lambda m: _ATTENTION[m[1]], theirs)
    raise KeyError(name)


def outward(weights: Mapping[str, Tensor], theirs: Callable[[str], str]) -> dict[str, Tensor]:
    """Rename weights to another format's names; codebooks (G, V, width) become (1, G V, width)."""
    return {
        theirs(name): value.reshape(1, -1, value.shape[2]) if name == "quantizer.codebook" else value
        for name, value in weights.items()
    }


def inward(
    tensors: Mapping[str, Tensor], shapes: Shapes, theirs: Callable[[str], str], where: str
) -> dict[str, Tensor]:
    """Rename another format's tensors to our names, in fp32, each of the expected shape.

    Raises DataError, which begins with ``where``, for a tensor that is missing, misshapen or not expected.
    """
    weights, expected = {}, set()
    for name, shape in shapes.items():
        key = theirs(name)
        expected.add(key)
        if key not in tensors:
            raise DataError(f"{where}: the tensor {key} is missing; the config needs it")
        value = tensors[key]
        outside = (1, shape[0] * shape[1], shape[2]) if name == "quantizer.codebook" else shape
        if tuple(value.shape) != outside:
            raise DataError(f"{where}: the tensor {key} is {tuple(value.shape)}; the config needs {outside}")
        weights[name] = value.detach().to(torch.float32).reshape(shape).contiguous()
    if odd := [key for key in tensors if key not in expected]:
        raise DataError(f"{where}: the tensor {odd[0]} is not part of wav2vec 2.0 as the config describes it")
    return weights
