"""A wav2vec 2.0 model outside of any run, and the common parts of its converters.

``wav2vec2_fairseq`` and ``wav2vec2_hf`` convert files of their formats to ``Pretrained`` and back. "Our"
names are speechtrain's, "foreign" names are those formats'.
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
"""The shape of each tensor, by our name."""
Rule = tuple[str, str]
"""A pattern that matches a whole name of ours, and its foreign replacement, in the syntax of ``re``."""
CONV, LAYER = r"encoder\.extractor\.layers\.(\d+)", r"encoder\.transformer\.layers\.(\d+)"
"""Patterns of our names of a convolution and of a transformer layer. The group is the layer's number."""
# Foreign names of the four projections of an attention. The two formats have the same names.
_ATTENTION = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj"}


@dataclass(frozen=True)
class Pretrained:
    """A wav2vec 2.0 model outside of any run.

    - ``encoder`` has the arguments of ``Wav2Vec2Encoder``. Its ``mask`` and ``channel_mask`` are the
      arguments of ``SpanMask``, or None.
    - ``model`` has the arguments of ``Wav2Vec2`` except the encoder. It is empty if the file lacks a
      quantiser.
    - ``weights`` are in fp32 and have the task's names (``encoder.…``).
    - ``labels`` are the symbols of a CTC layer (``output.…``), whose last class is the blank. They are empty
      without that layer.
    """

    encoder: dict[str, Any]
    model: dict[str, Any]
    weights: dict[str, Tensor]
    labels: tuple[str, ...] = ()

    @property
    def is_encoder(self) -> bool:
        """Whether the model has no quantiser, which only pretraining needs."""
        return not self.model

    @property
    def values(self) -> int:
        """The number of parameters."""
        return sum(tensor.numel() for tensor in self.weights.values())

    def encoder_only(self) -> Pretrained:
        """Return the model without its quantiser, projections and CTC layer."""
        weights = {name: tensor for name, tensor in self.weights.items() if name.startswith("encoder.")}
        return Pretrained(self.encoder, {}, weights)

    def build(self) -> tuple[Wav2Vec2Encoder, Wav2Vec2 | None]:
        """Return the encoder and the pretraining task with the weights, in evaluation mode.

        The task is None if the model has no quantiser.
        """
        with torch.device("meta"):  # The initial weights are replaced, so they need no memory.
            module, encoder = self._module()
        module.load_state_dict(self.weights, assign=True)
        module.eval()
        task = module if isinstance(module, Wav2Vec2) else None
        return encoder, task

    def shapes(self) -> Shapes:
        """Return the names and shapes of the weights that the arguments describe.

        Raises ConfigError for arguments that are out of range.
        """
        layers = self.encoder["layers"]
        convolutions = len(self.encoder["conv_layers"])
        if max(layers, convolutions) > MOST_LAYERS:
            raise ConfigError(f"{layers} layers and {convolutions} convolutions: the most are {MOST_LAYERS}")
        with torch.device("meta"):
            module, _ = self._module()
        return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}

    def _module(self) -> tuple[nn.Module, Wav2Vec2Encoder]:
        """Return a new module whose tensors have the names of ``weights``, and its encoder."""
        arguments = dict(self.encoder)
        for name in ("mask", "channel_mask"):
            mask = arguments[name]
            arguments[name] = SpanMask(**mask) if mask else None
        encoder = Wav2Vec2Encoder(**arguments)
        if self.model:
            return Wav2Vec2(encoder, **self.model), encoder
        parts = nn.ModuleDict({"encoder": encoder})
        if self.labels:
            parts["output"] = nn.Linear(encoder.width, len(self.labels) + 1)  # one more class: the blank
        return parts, encoder


def describe_encoder(module: nn.Module, weights: Mapping[str, Tensor]) -> Pretrained:
    """Return the encoder of the task ``module`` with ``weights``.

    Raises ConfigError if the task has no wav2vec 2.0 encoder.
    """
    encoder = getattr(module, "encoder", None)
    if not isinstance(encoder, Wav2Vec2Encoder):
        raise not_exportable(f"{type(module).__name__} with {type(encoder).__name__}")
    tensors = {name: tensor.detach().cpu().float() for name, tensor in weights.items()}
    return Pretrained(_encoder_arguments(encoder), {}, tensors).encoder_only()


def describe(module: nn.Module, weights: Mapping[str, Tensor]) -> Pretrained:
    """Return the model of the task ``module`` with ``weights``.

    Raises ConfigError if the task is neither a ``Wav2Vec2`` nor a ``CTC`` of characters with a wav2vec 2.0
    encoder.
    """
    arguments = describe_encoder(module, weights).encoder
    tensors = {name: tensor.detach().cpu().float() for name, tensor in weights.items()}
    if isinstance(module, Wav2Vec2):
        return Pretrained(arguments, _model_arguments(module), tensors)
    if type(module) is CTC and "|" not in module.tokenizer.labels:
        labels = module.tokenizer.labels
        # A tokenizer of subwords decodes its labels to another text, for example with spaces for "▁".
        has_subwords = module.tokenizer.decode(range(len(labels))) != "".join(labels)
        if not has_subwords:
            return Pretrained(arguments, {}, tensors, tuple(labels))
    raise not_exportable(f"{type(module).__name__} with {type(module.tokenizer).__name__}")


def not_exportable(reason: str) -> ConfigError:
    """Return the error for a model that no format can store. It lists the models that can be exported."""
    return ConfigError(
        f"{reason} cannot be exported whole. These can: model=wav2vec2, model=ctc with encoder=wav2vec2 and "
        "tokenizer=characters without '|', and for --to huggingface encoder=fastconformer_* with model=ctc, "
        "model.ctc_weight above 0 or prediction=lstm. --encoder exports the encoder of any model with "
        "encoder=wav2vec2"
    )


def _encoder_arguments(encoder: Wav2Vec2Encoder) -> dict[str, Any]:
    """Return the arguments that build a copy of ``encoder``."""
    transformer = encoder.transformer
    layer = transformer.layers[0]
    assert isinstance(layer, TransformerLayer)
    extractor = encoder.extractor
    block = extractor.layers[0]
    assert isinstance(block, ConvBlock)
    conv_layers = []
    for width, (kernel, stride) in zip(extractor.widths, extractor.spans, strict=True):
        conv_layers.append([width, kernel, stride])
    return {
        "conv_layers": conv_layers,
        "conv_bias": block.conv.bias is not None,
        "conv_norm": "group" if isinstance(block.norm, nn.GroupNorm) else "layer",
        "gradient_scale": extractor.gradient_scale,
        "width": encoder.width,
        "layers": len(transformer.layers),
        "feed_forward": layer.feed_forward_in.out_features,
        "heads": layer.attention.heads,
        "pre_norm": transformer.pre_norm,
        "position_kernel": transformer.position.kernel,
        "position_groups": transformer.position.groups,
        "dropout": transformer.dropout.p,
        "attention_dropout": layer.attention.dropout.p,
        "activation_dropout": layer.activation_dropout.p,
        "input_dropout": encoder.input_dropout.p,
        "layer_drop": encoder.layer_drop,
        "normalise_audio": encoder.normalise_audio,
        "sample_rate": encoder.sample_rate,
        "mask": encoder.mask and asdict(encoder.mask),
        "channel_mask": encoder.channel_mask and asdict(encoder.channel_mask),
    }


def _model_arguments(task: Wav2Vec2) -> dict[str, Any]:
    codebooks, codes, width = task.quantizer.codebook.shape
    return {
        "final_width": task.final_proj.out_features,
        "codebooks": codebooks,
        "codes": codes,
        "code_width": codebooks * width,  # One code of each codebook is concatenated.
        "temperature": list(task.temperature),
        "negatives": task.negatives,
        "contrast_temperature": task.contrast_temperature,
        "diversity_weight": task.diversity_weight,
        "penalty_weight": task.penalty_weight,
        "target_dropout": task.target_dropout,
    }


class Settings(dict[str, tuple[str, Any]]):
    """Maps each of our arguments to the foreign name of the setting, and to the default for files without it.

    >>> Settings(layers=("encoder_layers", 12), heads=("heads", 8)).read({"encoder_layers": "24"})
    {'layers': 24, 'heads': 8}
    """

    def read(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return our arguments from the settings in a file, each converted to the type of its default."""
        arguments = {}
        for argument, (setting, default) in self.items():
            arguments[argument] = type(default)(settings.get(setting, default))
        return arguments

    def write(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the foreign settings from our arguments."""
        return {setting: arguments[argument] for argument, (setting, _) in self.items()}


def rename(name: str, rules: Sequence[Rule]) -> str:
    """Return the foreign name of our tensor ``name``, by the first rule whose pattern matches the whole name.

    Afterwards, the names of an attention's projections are replaced. Raises KeyError if no rule matches.

    >>> rename("encoder.norm.bias", [(r"encoder\\.norm\\.(.+)", r"layer_norm.\\1")])
    'layer_norm.bias'
    """
    for pattern, replacement in rules:
        match = re.fullmatch(pattern, name)
        if match:
            words = match.expand(replacement).split(".")
            return ".".join([_ATTENTION.get(word, word) for word in words])
    raise KeyError(name)


def export_tensors(weights: Mapping[str, Tensor], foreign_name_of: Callable[[str], str]) -> dict[str, Tensor]:
    """Return weights under foreign names and in foreign shapes.

    The codebooks (G, V, width), G books of V codes, become (1, G V, width).
    """
    exported = {}
    for name, tensor in weights.items():
        if name == "quantizer.codebook":
            tensor = tensor.reshape(1, -1, tensor.shape[2])
        exported[foreign_name_of(name)] = tensor
    return exported


def import_tensors(
    tensors: Mapping[str, Tensor], shapes: Shapes, foreign_name_of: Callable[[str], str], where: str
) -> dict[str, Tensor]:
    """Return foreign tensors under our names, in fp32 and with our ``shapes``.

    Raises DataError for a tensor that is missing, has another shape or is not expected. The message begins
    with ``where``.
    """
    weights = {}
    expected_names = set()
    for name, shape in shapes.items():
        foreign_name = foreign_name_of(name)
        expected_names.add(foreign_name)
        if foreign_name not in tensors:
            raise DataError(f"{where}: the tensor {foreign_name} is missing, and the config needs it")
        tensor = tensors[foreign_name]
        foreign_shape = shape
        if name == "quantizer.codebook":
            codebooks, codes, width = shape
            foreign_shape = (1, codebooks * codes, width)
        if tuple(tensor.shape) != foreign_shape:
            sizes = f"{tuple(tensor.shape)}, and the config needs {foreign_shape}"
            raise DataError(f"{where}: the tensor {foreign_name} is {sizes}")
        weights[name] = tensor.detach().to(torch.float32).reshape(shape).contiguous()
    unexpected = [foreign_name for foreign_name in tensors if foreign_name not in expected_names]
    if unexpected:
        raise DataError(
            f"{where}: the tensor {unexpected[0]} is not part of wav2vec 2.0 as the config describes it"
        )
    return weights
