"""Read fairseq's wav2vec 2.0 checkpoints of every layout, without running pickled code, and write one layout.

fairseq cannot be installed together with speechtrain. So the tests compare keys, shapes and types with the
published model, and names with Hugging Face's model. docs/interchange.md describes the check against fairseq.
"""

from __future__ import annotations

import ast
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speechtrain.errors import MALFORMED, ConfigError, DataError, one_line
from speechtrain.files import atomic
from speechtrain.interop.pickles import plain_settings, read_pickle, tensors_of
from speechtrain.interop.pretrained import (
    CONV,
    LAYER,
    MOST_LAYERS,
    Pretrained,
    Rule,
    Settings,
    export_tensors,
    import_tensors,
    rename,
)
from speechtrain.nn.masking import SpanMask

_LONGEST_TEXT = 10_000  # the maximum of characters of a list that the settings store as text
# Rules that translate our names of tensors into fairseq's names: a pattern of our names, and its replacement.
# ``_NORM_RULES`` has one more rule for each kind of norm.
_COMMON_RULES: list[Rule] = [
    (r"encoder\.mask_embedding", r"mask_emb"),
    (rf"{CONV}\.conv\.(\w+)", r"feature_extractor.conv_layers.\1.0.\2"),
    (r"encoder\.norm\.(\w+)", r"layer_norm.\1"),
    (r"encoder\.projection\.(\w+)", r"post_extract_proj.\1"),
    (r"encoder\.transformer\.position\.(\w+)", r"encoder.pos_conv.0.\1"),
    (r"encoder\.transformer\.norm\.(\w+)", r"encoder.layer_norm.\1"),
    (rf"{LAYER}\.attention\.(query|key|value|output)\.(\w+)", r"encoder.layers.\1.self_attn.\2.\3"),
    (rf"{LAYER}\.attention_norm\.(\w+)", r"encoder.layers.\1.self_attn_layer_norm.\2"),
    (rf"{LAYER}\.feed_forward_in\.(\w+)", r"encoder.layers.\1.fc1.\2"),
    (rf"{LAYER}\.feed_forward_out\.(\w+)", r"encoder.layers.\1.fc2.\2"),
    (rf"{LAYER}\.norm\.(\w+)", r"encoder.layers.\1.final_layer_norm.\2"),
    (r"quantizer\.codebook", r"quantizer.vars"),
    (r"quantizer\.projection\.(\w+)", r"quantizer.weight_proj.\1"),
    (r"(project_q|final_proj)\.(\w+)", r"\1.\2"),
]
_NORM_RULES: dict[str, Rule] = {
    "group": (rf"{CONV}\.norm\.(\w+)", r"feature_extractor.conv_layers.\1.2.\2"),
    "layer": (rf"{CONV}\.norm\.(\w+)", r"feature_extractor.conv_layers.\1.2.1.\2"),
}
# The arguments of the encoder, of the audio and of the model. Each has the name of fairseq's setting and the
# default for a file without this setting.
_ENCODER_SETTINGS = Settings(
    conv_bias=("conv_bias", False),
    gradient_scale=("feature_grad_mult", 1.0),
    width=("encoder_embed_dim", 768),
    layers=("encoder_layers", 12),
    feed_forward=("encoder_ffn_embed_dim", 3072),
    heads=("encoder_attention_heads", 12),
    pre_norm=("layer_norm_first", False),
    position_kernel=("conv_pos", 128),
    position_groups=("conv_pos_groups", 16),
    dropout=("dropout", 0.1),
    attention_dropout=("attention_dropout", 0.1),
    activation_dropout=("activation_dropout", 0.0),
    input_dropout=("dropout_input", 0.0),
    layer_drop=("encoder_layerdrop", 0.0),
)
_TASK_SETTINGS = Settings(normalise_audio=("normalize", False), sample_rate=("sample_rate", 16000))
_MODEL_SETTINGS = Settings(
    codebooks=("latent_groups", 2),
    codes=("latent_vars", 320),
    negatives=("num_negatives", 100),
    contrast_temperature=("logit_temp", 0.1),
    target_dropout=("dropout_features", 0.0),
)
_STRIDES: dict[tuple[int, ...], tuple[int, ...]] = {(10, 3, 3, 3, 3, 2, 2): (5, 2, 2, 2, 2, 2, 2)}
"""The strides of the published extractor, by its kernels. They cannot be read from a tensor."""
_DIMENSIONS = {
    r"mask_emb|.*\.in_proj_bias": 1,
    r".*\.in_proj_weight": 2,
    r"encoder\.pos_conv\.0\.weight_v|feature_extractor\.conv_layers\.\d+\.0\.weight": 3,
}
"""The number of dimensions of some tensors, by a pattern of names.

These tensors are split, or the encoder's sizes are read from their shapes. So they are checked before all
shapes are compared with the shapes of the built encoder.
"""
_CONV_NORMS = {"default": "group", "layer_norm": "layer"}  # our norm by fairseq's extractor_mode
_FIXED = {
    "activation_fn": "gelu",
    "layer_type": "transformer",
    "quantize_input": False,
    "crop_seq_to_multiple": 1,
}
"""Settings of the encoder for which only this value is supported."""
_FIXED_MASKS = {"require_same_masks": True, "mask_dropout": 0.0, "mask_channel_before": False}
_FIXED_NEGATIVES = {
    "negatives_from_everywhere": False,
    "cross_sample_negatives": 0,
    "codebook_negatives": 0,
}
_FIXED_OBJECTIVE = {**_FIXED_MASKS, **_FIXED_NEGATIVES, "infonce": True}
"""Settings of pretraining's objective for which only this value is supported."""


def _mask_settings(kind: str) -> Settings:
    """Return the settings of a mask. ``kind`` is ``mask`` (of frames) or ``mask_channel``."""
    probability = 0.65 if kind == "mask" else 0.0
    return Settings(
        probability=(f"{kind}_prob", probability),
        length=(f"{kind}_length", 10),
        kind=(f"{kind}_selection", "static"),
        other=(f"{kind}_other", 0.0),
        min_space=(f"{kind}_min_space", 1),
    )


def fairseq_name(name: str, conv_norm: str) -> str:
    """Return fairseq's name of our tensor ``name``. The names of norms depend on their kind ``conv_norm``."""
    return rename(name, [_NORM_RULES[conv_norm], *_COMMON_RULES])


def state_of(pretrained: Pretrained) -> OrderedDict[str, Tensor]:
    """Return the weights under fairseq's names and in its shapes."""
    conv_norm = pretrained.encoder["conv_norm"]
    return OrderedDict(export_tensors(pretrained.weights, partial(fairseq_name, conv_norm=conv_norm)))


def read(path: str | Path) -> Pretrained:
    """Return the model in a wav2vec 2.0 checkpoint of any layout of fairseq. No pickled code is run.

    - The settings may be a dictionary, an OmegaConf object or a Namespace.
    - Tensors may be half precision. The two tensors of the positional convolution may have the names of any
      torch version.
    - Gaudi's four-dimensional convolutions lose the dimension before the last.
    - Only the encoder of a fine-tuned model is read.
    - Optimizer states are not read, except in files of torch before 1.6, which are read completely.

    Raises DataError for a file that is refused or damaged, and for another model than wav2vec 2.0 or another
    variant of it. The message has the first tensor or setting that does not fit.
    """
    path = Path(path)
    content = read_pickle(path)
    prefix = _find_prefix(content, path)
    is_finetuned = prefix != ""
    settings, task, criterion = _settings(content, is_finetuned, path)
    tensors = _tensors(content["model"], prefix, path)
    # A pretrained model always has a quantiser. A fine-tuned model has one if it also has the final
    # projection, because fairseq removes both together.
    has_quantizer = not is_finetuned or "final_proj.weight" in tensors
    fixed = _FIXED | _FIXED_OBJECTIVE if has_quantizer else _FIXED
    all_settings = {**settings, **criterion}
    for key, supported in fixed.items():
        if all_settings.get(key, supported) not in (supported, None):
            raise DataError(f"{path}: {key} is {all_settings[key]!r}, and only {supported!r} is supported")
    try:
        encoder = _encoder_arguments(settings, task, tensors, path=path)
        model = _model_arguments(settings, criterion, encoder) if has_quantizer else {}
        shapes = Pretrained(encoder, model, weights={}).shapes()
    except (ConfigError, TypeError, SyntaxError, RuntimeError, *MALFORMED) as error:
        reason = one_line(str(error), 200)
        raise DataError(f"{path}: the settings do not describe a wav2vec 2.0 model: {reason}") from None
    foreign_name_of = partial(fairseq_name, conv_norm=encoder["conv_norm"])
    weights = import_tensors(tensors, shapes, foreign_name_of, where=str(path))
    return Pretrained(encoder, model, weights)


def _find_prefix(content: Any, path: Path) -> str:
    """Return the prefix of the names of wav2vec 2.0's tensors in a checkpoint.

    It is empty for a pretrained model. A fine-tuned model contains wav2vec 2.0 as a part, with a prefix.
    """
    tensors = content.get("model") if isinstance(content, dict) else None
    if isinstance(tensors, dict):
        for name, tensor in tensors.items():
            if str(name).endswith("mask_emb") and isinstance(tensor, Tensor):
                return str(name).removesuffix("mask_emb")
    raise DataError(f"{path} has no wav2vec 2.0 model. Give the .pt file that fairseq wrote")


def _settings(
    content: Mapping[str, Any], is_finetuned: bool, path: Path
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the settings of the wav2vec 2.0 model, of its task and of its criterion.

    New files store the settings under ``cfg``, old files under ``args``.
    """
    settings = plain_settings(content.get("cfg")) or plain_settings(content.get("args"))
    if not isinstance(settings, dict):
        raise DataError(f"{path} has neither cfg nor args, so the model's settings are unknown")
    if is_finetuned:
        settings = _section(settings, "model").get("w2v_args")
        if not isinstance(settings, dict):
            raise DataError(f"{path} is fine-tuned, and the settings of its model (w2v_args) are missing")
    return _section(settings, "model"), _section(settings, "task"), _section(settings, "criterion")


def _section(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a section of the settings, or all settings of an old file, which has no sections."""
    section = settings.get(name)
    return section if isinstance(section, dict) else settings


def _tensors(stored: Mapping[str, Any], prefix: str, path: Path) -> dict[str, Tensor]:
    """Return the tensors of wav2vec 2.0 without ``prefix``, in one layout for files of all versions."""
    # The layers of a fine-tuned model outside wav2vec 2.0 do not have the prefix.
    without_prefix = {}
    for name in map(str, stored):
        if name.startswith(prefix):
            without_prefix[name.removeprefix(prefix)] = stored[name]
    tensors = tensors_of(without_prefix, path)
    # New versions of torch have other names for the two tensors of a weight norm.
    for torch_name, name in (("original0", "weight_g"), ("original1", "weight_v")):
        new_name = f"encoder.pos_conv.0.parametrizations.weight.{torch_name}"
        if new_name in tensors:
            tensors[f"encoder.pos_conv.0.{name}"] = tensors.pop(new_name)
    # On Gaudi, the convolutions over time have a further dimension of size 1.
    for name, tensor in tensors.items():
        if name.startswith("feature_extractor.") and tensor.dim() == 4:
            tensors[name] = tensor.squeeze(2)
    for name, tensor in tensors.items():
        for pattern, dimensions in _DIMENSIONS.items():
            if re.fullmatch(pattern, name) and tensor.dim() != dimensions:
                raise DataError(f"{path}: the tensor {name} has {tensor.dim()} dimensions, not {dimensions}")
    # Old files have one tensor for query, key and value.
    for name in list(tensors):
        if name.endswith(("in_proj_weight", "in_proj_bias")):
            base, _, kind = name.rpartition("in_proj_")
            parts = tensors.pop(name).tensor_split(3)
            for letter, part in zip("qkv", parts, strict=True):
                tensors[f"{base}{letter}_proj.{kind}"] = part
    return tensors


def _encoder_arguments(
    settings: Mapping[str, Any], task: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path
) -> dict[str, Any]:
    """Return the arguments of ``Wav2Vec2Encoder``. Sizes that the settings lack follow from the tensors."""
    extractor_mode = str(settings.get("extractor_mode", "default"))
    if extractor_mode not in _CONV_NORMS:
        raise DataError(f"{path}: extractor_mode is {extractor_mode!r}, not default or layer_norm")
    width = int(settings.get("encoder_embed_dim", len(tensors["mask_emb"])))
    default_sizes = {
        "encoder_embed_dim": width,
        "encoder_ffn_embed_dim": 4 * width,
        "encoder_attention_heads": width // 64,
    }
    position_weight = tensors.get("encoder.pos_conv.0.weight_v")
    if position_weight is not None:
        default_sizes["conv_pos"] = position_weight.shape[2]
    channel_mask = None
    if settings.get("mask_channel_prob"):
        channel_mask = _mask(settings, "mask_channel", min_masks=0)
    return {
        "conv_layers": _conv_layers(settings.get("conv_feature_layers"), tensors, path),
        "conv_norm": _CONV_NORMS[extractor_mode],
        **_ENCODER_SETTINGS.read({**default_sizes, **settings}),
        **_TASK_SETTINGS.read(task),
        "mask": _mask(settings, "mask", min_masks=2),
        "channel_mask": channel_mask,
    }


def _mask(settings: Mapping[str, Any], kind: str, min_masks: int) -> dict[str, Any]:
    """Return the arguments of ``SpanMask`` from the settings of a mask.

    ``kind`` is as in ``_mask_settings``. fairseq has a fixed number for ``min_masks``.
    """
    overlap = not settings.get(f"no_{kind}_overlap", False)
    return {**_mask_settings(kind).read(settings), "overlap": overlap, "min_masks": min_masks}


def _model_arguments(
    settings: Mapping[str, Any], criterion: Mapping[str, Any], encoder: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of ``Wav2Vec2`` except the encoder."""
    # For both widths, a missing setting or 0 means the default.
    final_width = int(settings.get("final_dim") or 0) or encoder["width"]
    code_width = int(settings.get("latent_dim") or 0) or final_width
    loss_weights = _numbers(criterion.get("loss_weights"))
    loss_weights += [0.0, 0.0]  # Missing weights are 0.
    return {
        "final_width": final_width,
        "code_width": code_width,
        **_MODEL_SETTINGS.read(settings),
        "temperature": _numbers(settings.get("latent_temp")) or [2.0, 0.5, 0.999995],
        "diversity_weight": loss_weights[0],
        "penalty_weight": loss_weights[1],
    }


def _numbers(setting: Any) -> list[float]:
    """Return the numbers in a setting, a list or the text of a list. None means an empty list."""
    if isinstance(setting, str):
        setting = ast.literal_eval(setting[:_LONGEST_TEXT])
    return [float(number) for number in setting or []]


def _conv_layers(text: Any, tensors: Mapping[str, Tensor], path: Path) -> list[list[int]]:
    """Return [channels, kernel, stride] of each convolution.

    ``text`` is a Python expression such as ``[(512, 10, 5)] + [(512, 3, 2)] * 4``. It is parsed and never
    run. If it is None, the layers follow from the tensors, provided that the kernels are as in the published
    models.
    """
    if text is None:
        names = [f"feature_extractor.conv_layers.{index}.0.weight" for index in range(32)]
        weights = [tensors[name] for name in names if name in tensors]
        channels = [weight.shape[0] for weight in weights]
        kernels = [weight.shape[2] for weight in weights]
        strides = _STRIDES.get(tuple(kernels))
        if strides is None:
            raise DataError(f"{path}: the settings have no conv_feature_layers, so the strides are unknown")
        return [list(layer) for layer in zip(channels, kernels, strides, strict=True)]
    try:
        expression = ast.parse(str(text)[:_LONGEST_TEXT], mode="eval")
        layers = _evaluate(expression.body)
        return [[int(channels), int(kernel), int(stride)] for channels, kernel, stride in layers]
    except (SyntaxError, TypeError, *MALFORMED):
        raise DataError(f"{path}: conv_feature_layers is {str(text)[:80]!r}, not a list of triples") from None


def _evaluate(node: ast.expr) -> Any:
    """Return the value of an expression of lists, tuples and integers with + and *.

    The value is a list or an integer. A tuple becomes a list. Raises ValueError for any other expression.
    """
    if isinstance(node, ast.List | ast.Tuple):
        return [_evaluate(element) for element in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _evaluate(node.left) + _evaluate(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        elements = _evaluate(node.left)
        repetitions = _evaluate(node.right)
        if not isinstance(repetitions, int) or len(elements) * repetitions > MOST_LAYERS:
            raise ValueError
        return elements * repetitions
    number = ast.literal_eval(node)
    if not isinstance(number, int):
        raise ValueError
    return number


def checkpoint_of(pretrained: Pretrained, updates: int = 0) -> dict[str, Any]:
    """Return the checkpoint that fairseq's trainer would save. The optimizer's state is None.

    Raises ConfigError for an encoder alone, because fairseq's model also has the parts of pretraining.
    """
    if pretrained.is_encoder:
        raise ConfigError(
            "fairseq's wav2vec 2.0 needs a quantiser and projections, and this is an encoder. Export the "
            "pretraining run, or use --to huggingface"
        )
    history = {
        "criterion_name": "Wav2vecCriterion",
        "optimizer_name": "FairseqAdam",
        "lr_scheduler_state": {"best": None},
        "num_updates": updates,
    }
    return {
        "args": None,
        "cfg": _config(pretrained),
        "model": state_of(pretrained),
        "criterion": None,
        "optimizer_history": [history],
        "task_state": {},
        "extra_state": {
            "metrics": {},
            "previous_training_time": 0.0,
            "train_iterator": {"version": 2, "epoch": 1, "iterations_in_epoch": 0, "shuffle": True},
            "val_loss": None,
            "best": None,
        },
        "last_optimizer_state": None,
    }


def _config(pretrained: Pretrained) -> dict[str, Any]:
    """Return all of fairseq's settings, by section. The sections that describe no model are empty."""
    encoder = pretrained.encoder
    model = pretrained.model
    extractor_modes = {norm: mode for mode, norm in _CONV_NORMS.items()}
    model_settings = {
        "_name": "wav2vec2",
        "extractor_mode": extractor_modes[encoder["conv_norm"]],
        "conv_feature_layers": str([tuple(layer) for layer in encoder["conv_layers"]]),
        "activation_fn": "gelu",
        **_ENCODER_SETTINGS.write(encoder),
        **_MODEL_SETTINGS.write(model),
        "final_dim": model["final_width"],
        "latent_dim": model["code_width"],
        "latent_temp": list(model["temperature"]),
        **_written_mask(encoder["mask"], "mask"),
        **_written_mask(encoder["channel_mask"], "mask_channel"),
        "quantize_targets": True,
        "quantize_input": False,
        "same_quantizer": False,
        "target_glu": False,
        "checkpoint_activations": False,
        **_FIXED_MASKS,
        **_FIXED_NEGATIVES,
    }
    empty_sections = ("common", "checkpoint", "dataset", "distributed_training", "optimization")
    return {
        "_name": None,
        **{section: {} for section in empty_sections},
        "model": model_settings,
        "task": {"_name": "audio_pretraining", "data": "", **_TASK_SETTINGS.write(encoder)},
        "criterion": {
            "_name": "wav2vec",
            "infonce": True,
            "loss_weights": [model["diversity_weight"], model["penalty_weight"]],
            "log_keys": ["prob_perplexity", "code_perplexity", "temp"],
        },
        "optimizer": {"_name": "adam"},
        "lr_scheduler": {"_name": "polynomial_decay"},
    }


def _written_mask(mask: Mapping[str, Any] | None, kind: str) -> dict[str, Any]:
    """Return all settings of a mask, also if it masks nothing.

    fairseq's fine-tuning replaces the settings of a checkpoint, but only settings that the checkpoint has.
    """
    mask = mask or asdict(SpanMask(probability=0.0))
    return {**_mask_settings(kind).write(mask), f"no_{kind}_overlap": not mask["overlap"]}


def write(pretrained: Pretrained, content: Mapping[str, Any], path: str | Path) -> None:
    """Write ``content``, which ``checkpoint_of(pretrained)`` has returned, to ``path``.

    The file is read back. Raises DataError, and leaves no file, if the model differs in any bit.
    """
    path = Path(path)
    with atomic(path) as temporary:
        torch.save(dict(content), temporary, pickle_protocol=2)
        if not _is_equal(read(temporary), pretrained):
            raise DataError(f"{path} is not written: the file that was read back differs from the model")


def _is_equal(loaded: Pretrained, pretrained: Pretrained) -> bool:
    """Return whether two models have equal weights, and equal arguments except the masks.

    fairseq has fixed numbers for some settings of our masks (``min_masks``).
    """
    for name, argument in loaded.encoder.items():
        if not name.endswith("mask") and argument != pretrained.encoder.get(name):
            return False
    if loaded.model != pretrained.model:
        return False
    if loaded.weights.keys() != pretrained.weights.keys():
        return False
    return all(torch.equal(tensor, pretrained.weights[name]) for name, tensor in loaded.weights.items())
