"""Reads fairseq's wav2vec 2.0 checkpoints of every layout, without running pickled code, and writes one.

fairseq cannot be installed together with speechtrain, so files are checked in two ways: keys, shapes
and types against the published model, and the tensors, by a second table of names, in Hugging Face's
model (``huggingface.difference_of``). docs/interchange.md has the check against fairseq itself.
"""

from __future__ import annotations

import ast
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speechtrain.errors import ConfigError, DataError
from speechtrain.files import atomic
from speechtrain.interop.pickles import plain, read_pickle, tensor_of
from speechtrain.interop.wav2vec2 import CONV, LAYER, STRIDES, Pretrained, Rule, inward, outward, renamed

_COMMON: list[Rule] = [
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
_NORMS: dict[str, Rule] = {
    "group": (rf"{CONV}\.norm\.(\w+)", r"feature_extractor.conv_layers.\1.2.\2"),
    "layer": (rf"{CONV}\.norm\.(\w+)", r"feature_extractor.conv_layers.\1.2.1.\2"),
}
_ATTENTION = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj"}

# fairseq's names in Hugging Face's model, not through our names: it checks both other tables
_THEIR_CONV = r"wav2vec2.feature_extractor.conv_layers.\1"
_HUGGINGFACE: list[Rule] = [
    (r"mask_emb", r"wav2vec2.masked_spec_embed"),
    (r"feature_extractor\.conv_layers\.(\d+)\.0\.(\w+)", rf"{_THEIR_CONV}.conv.\2"),
    (r"feature_extractor\.conv_layers\.(\d+)\.2\.(?:1\.)?(\w+)", rf"{_THEIR_CONV}.layer_norm.\2"),
    (r"layer_norm\.(\w+)", r"wav2vec2.feature_projection.layer_norm.\1"),
    (r"post_extract_proj\.(\w+)", r"wav2vec2.feature_projection.projection.\1"),
    (r"encoder\.pos_conv\.0\.(\w+)", r"wav2vec2.encoder.pos_conv_embed.conv.\1"),
    (r"encoder\.layer_norm\.(\w+)", r"wav2vec2.encoder.layer_norm.\1"),
    (r"encoder\.layers\.(\d+)\.self_attn\.(\w+)\.(\w+)", r"wav2vec2.encoder.layers.\1.attention.\2.\3"),
    (r"encoder\.layers\.(\d+)\.self_attn_layer_norm\.(\w+)", r"wav2vec2.encoder.layers.\1.layer_norm.\2"),
    (r"encoder\.layers\.(\d+)\.fc1\.(\w+)", r"wav2vec2.encoder.layers.\1.feed_forward.intermediate_dense.\2"),
    (r"encoder\.layers\.(\d+)\.fc2\.(\w+)", r"wav2vec2.encoder.layers.\1.feed_forward.output_dense.\2"),
    (r"encoder\.layers\.(\d+)\.final_layer_norm\.(\w+)", r"wav2vec2.encoder.layers.\1.final_layer_norm.\2"),
    (r"quantizer\.vars", r"quantizer.codevectors"),
    (r"quantizer\.weight_proj\.(\w+)", r"quantizer.weight_proj.\1"),
    (r"project_q\.(\w+)", r"project_q.\1"),
    (r"final_proj\.(\w+)", r"project_hid.\1"),
]


def fairseq_name(name: str, conv_norm: str) -> str:
    """fairseq's name of one of our weights; the extractor's norms are named by their kind."""
    theirs = renamed(name, [_NORMS[conv_norm], *_COMMON])
    for ours, projection in _ATTENTION.items():
        theirs = theirs.replace(f".self_attn.{ours}.", f".self_attn.{projection}.")
    return theirs


def huggingface_tensors(pretrained: Pretrained) -> dict[str, Tensor]:
    """The weights renamed from fairseq's names to those of Hugging Face's ``Wav2Vec2ForPreTraining``."""
    return {renamed(name, _HUGGINGFACE): value for name, value in state_of(pretrained).items()}


def state_of(pretrained: Pretrained) -> OrderedDict[str, Tensor]:
    """The weights under fairseq's names and in its shapes."""
    kind = pretrained.encoder["conv_norm"]
    return OrderedDict(outward(pretrained.weights, lambda name: fairseq_name(name, kind)))


# --- reading --------------------------------------------------------------------------------------


def read(path: str | Path) -> Pretrained:
    """Read a wav2vec 2.0 checkpoint in any layout of fairseq; no pickled code is run.

    Settings may be a plain dictionary, OmegaConf's or a Namespace. Tensors may be half precision, the
    positional convolution's pair may have either name, and Gaudi's four-dimensional convolutions lose
    their second to last dimension. Of a fine-tuned model the encoder is read. Optimizer states are not
    read, except in files of torch before 1.6, which are read whole.

    Raises DataError, which names the first tensor or setting that does not fit, for a file that is
    refused, damaged, not wav2vec 2.0 or another variant of it.
    """
    path = Path(path)
    content = read_pickle(path)
    stored = content.get("model") if isinstance(content, dict) else None
    if not isinstance(stored, dict) or not any(str(name).endswith("mask_emb") for name in stored):
        raise DataError(f"{path} has no wav2vec 2.0 model; give the .pt file that fairseq wrote")
    prefix = next(str(name) for name in stored if str(name).endswith("mask_emb")).removesuffix("mask_emb")
    settings, task, criterion = _settings(content, bool(prefix), path)
    tensors = _tensors(stored, prefix, path)
    try:
        encoder = _encoder_arguments(settings, task, tensors, path=path)
        has_targets = "final_proj.weight" in tensors or not prefix
        model = _model_arguments(settings, criterion, encoder) if has_targets else {}
        shapes = Pretrained(encoder, model, {}).shapes()
    except (ConfigError, TypeError, ValueError, SyntaxError) as error:
        raise DataError(f"{path}: the settings do not describe a wav2vec 2.0 model: {error}") from None
    weights = inward(tensors, shapes, lambda name: fairseq_name(name, encoder["conv_norm"]), where=str(path))
    return Pretrained(encoder, model, weights)


def _settings(
    content: Mapping[str, Any], is_tuned: bool, path: Path
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Settings of the wav2vec 2.0 model, of its task and of its criterion."""
    found = plain(content.get("cfg")) or plain(content.get("args"))
    if not isinstance(found, dict):
        raise DataError(f"{path} has neither cfg nor args, so the model's settings are unknown")
    if is_tuned:
        inner = _section(found, "model").get("w2v_args")
        if not isinstance(inner, dict):
            raise DataError(f"{path} is fine-tuned, and the settings of its model (w2v_args) are missing")
        found = inner
    return _section(found, "model"), _section(found, "task"), _section(found, "criterion")


def _section(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """A section of the settings, or all settings: old files have one flat list."""
    section = settings.get(name)
    return section if isinstance(section, dict) else settings


def _tensors(stored: Mapping[str, Any], prefix: str, path: Path) -> dict[str, Tensor]:
    """Tensors below ``prefix``, with the names of a new checkpoint and no shapes of Gaudi's."""
    tensors = {}
    for name, value in stored.items():
        if not str(name).startswith(prefix):
            continue  # a fine-tuned model's own layers
        if not isinstance(value, Tensor):
            raise DataError(f"{path}: {name} is not a tensor")
        tensors[str(name).removeprefix(prefix)] = tensor_of(value, path)
    for pair, name in (("original0", "weight_g"), ("original1", "weight_v")):
        other = f"encoder.pos_conv.0.parametrizations.weight.{pair}"
        if other in tensors:
            tensors[f"encoder.pos_conv.0.{name}"] = tensors.pop(other)
    for name, tensor in tensors.items():
        if name.startswith("feature_extractor.") and tensor.dim() == 4:
            tensors[name] = tensor.squeeze(2)
    for name in [name for name in tensors if name.endswith(("in_proj_weight", "in_proj_bias"))]:
        base, _, kind = name.rpartition("in_proj_")
        parts = tensors.pop(name).chunk(3)
        tensors |= {f"{base}{p}_proj.{kind}": part for p, part in zip("qkv", parts, strict=True)}
    return tensors


def _encoder_arguments(
    settings: Mapping[str, Any], task: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path
) -> dict[str, Any]:
    for key, usual in (("activation_fn", "gelu"), ("layer_type", "transformer"), ("quantize_input", False)):
        if settings.get(key, usual) not in (usual, None):
            raise DataError(f"{path}: {key} is {settings[key]!r}; only {usual} is supported")
    width = int(settings.get("encoder_embed_dim", len(tensors["mask_emb"])))
    norm = {"default": "group", "layer_norm": "layer"}.get(str(settings.get("extractor_mode", "default")))
    if norm is None:
        raise DataError(
            f"{path}: extractor_mode is {settings['extractor_mode']!r}, not default or layer_norm"
        )
    position = tensors.get("encoder.pos_conv.0.weight_v")
    return {
        "conv_layers": _conv_layers(settings.get("conv_feature_layers"), tensors, path),
        "conv_bias": bool(settings.get("conv_bias", False)),
        "conv_norm": norm,
        "gradient_scale": float(settings.get("feature_grad_mult", 1.0)),
        "width": width,
        "layers": int(settings.get("encoder_layers", 12)),
        "feed_forward": int(settings.get("encoder_ffn_embed_dim", 4 * width)),
        "heads": int(settings.get("encoder_attention_heads", width // 64)),
        "pre_norm": bool(settings.get("layer_norm_first", False)),
        "position_kernel": int(settings.get("conv_pos", 128 if position is None else position.shape[2])),
        "position_groups": int(settings.get("conv_pos_groups", 16)),
        "dropout": float(settings.get("dropout", 0.1)),
        "attention_dropout": float(settings.get("attention_dropout", 0.1)),
        "activation_dropout": float(settings.get("activation_dropout", 0.0)),
        "input_dropout": float(settings.get("dropout_input", 0.0)),
        "layer_drop": float(settings.get("encoder_layerdrop", 0.0)),
        "normalise_audio": bool(task.get("normalize", False)),
        "sample_rate": int(task.get("sample_rate", 16000)),
        "mask": _mask(settings, "mask", 2),
        "channel_mask": _mask(settings, "mask_channel", 0) if settings.get("mask_channel_prob") else None,
    }


def _mask(settings: Mapping[str, Any], kind: str, min_masks: int) -> dict[str, Any]:
    return {
        "probability": float(settings.get(f"{kind}_prob", 0.65 if kind == "mask" else 0.0)),
        "length": int(settings.get(f"{kind}_length", 10)),
        "kind": str(settings.get(f"{kind}_selection", "static")),
        "other": float(settings.get(f"{kind}_other", 0.0)),
        "overlap": not settings.get(f"no_{kind}_overlap", False),
        "min_space": int(settings.get(f"{kind}_min_space", 1)),
        "min_masks": min_masks,
    }


def _model_arguments(
    settings: Mapping[str, Any], criterion: Mapping[str, Any], encoder: Mapping[str, Any]
) -> dict[str, Any]:
    final = int(settings.get("final_dim") or 0) or encoder["width"]
    weights = _numbers(criterion.get("loss_weights")) or [0.0, 0.0]
    return {
        "final_width": final,
        "codebooks": int(settings.get("latent_groups", 2)),
        "codes": int(settings.get("latent_vars", 320)),
        "code_width": int(settings.get("latent_dim") or 0) or final,
        "temperature": _numbers(settings.get("latent_temp")) or [2.0, 0.5, 0.999995],
        "negatives": int(settings.get("num_negatives", 100)),
        "contrast_temperature": float(settings.get("logit_temp", 0.1)),
        "diversity_weight": weights[0],
        "penalty_weight": weights[1] if len(weights) > 1 else 0.0,
        "target_dropout": float(settings.get("dropout_features", 0.0)),
    }


def _numbers(value: Any) -> list[float]:
    """A list of numbers, which may be stored as text."""
    parsed = ast.literal_eval(value) if isinstance(value, str) else value
    return [float(number) for number in parsed or []]


def _conv_layers(text: Any, tensors: Mapping[str, Tensor], path: Path) -> list[list[int]]:
    """[channels, kernel, stride] of each convolution; the expression is parsed, not run as code."""
    if text is None:
        names = (f"feature_extractor.conv_layers.{i}.0.weight" for i in range(32))
        weights = [tensors[name] for name in names if name in tensors]
        strides = STRIDES.get(tuple(weight.shape[2] for weight in weights))
        if strides is None:
            raise DataError(f"{path}: the settings have no conv_feature_layers, so the strides are unknown")
        return [[len(weight), weight.shape[2], s] for weight, s in zip(weights, strides, strict=True)]
    try:
        layers = _sequence(ast.parse(str(text), mode="eval").body)
        return [[int(a), int(b), int(c)] for a, b, c in layers]
    except (SyntaxError, ValueError, TypeError, RecursionError):
        raise DataError(f"{path}: conv_feature_layers is {str(text)[:80]!r}, not a list of triples") from None


def _sequence(node: ast.expr) -> Any:
    """Compute lists, tuples and integers, joined by + and repeated by *. Raises ValueError."""
    if isinstance(node, ast.List | ast.Tuple):
        return [_sequence(element) for element in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _sequence(node.left) + _sequence(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        times = _sequence(node.right)
        if not isinstance(times, int) or times > 64:
            raise ValueError
        return _sequence(node.left) * times
    value = ast.literal_eval(node)
    if not isinstance(value, int):
        raise ValueError
    return value


# --- writing --------------------------------------------------------------------------------------


def checkpoint_of(pretrained: Pretrained, updates: int = 0) -> dict[str, Any]:
    """The checkpoint that fairseq's trainer would save, except the optimizer's state, which is None.

    Raises ConfigError for an encoder alone: fairseq's model also has the parts of pretraining.
    """
    if pretrained.is_encoder:
        raise ConfigError(
            "fairseq's wav2vec 2.0 needs a quantiser and projections, and this is an encoder; export the "
            "pretraining run, or use --to huggingface"
        )
    names = {"criterion_name": "Wav2vecCriterion", "optimizer_name": "FairseqAdam"}
    return {
        "args": None,
        "cfg": _config(pretrained),
        "model": state_of(pretrained),
        "criterion": None,
        "optimizer_history": [{**names, "lr_scheduler_state": {"best": None}, "num_updates": updates}],
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


def _model_settings(encoder: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "_name": "wav2vec2",
        "extractor_mode": {"group": "default", "layer": "layer_norm"}[encoder["conv_norm"]],
        "encoder_layers": encoder["layers"],
        "encoder_embed_dim": encoder["width"],
        "encoder_ffn_embed_dim": encoder["feed_forward"],
        "encoder_attention_heads": encoder["heads"],
        "activation_fn": "gelu",
        "dropout": encoder["dropout"],
        "attention_dropout": encoder["attention_dropout"],
        "activation_dropout": encoder["activation_dropout"],
        "encoder_layerdrop": encoder["layer_drop"],
        "dropout_input": encoder["input_dropout"],
        "dropout_features": model["target_dropout"],
        "final_dim": model["final_width"],
        "layer_norm_first": encoder["pre_norm"],
        "conv_feature_layers": str([tuple(layer) for layer in encoder["conv_layers"]]),
        "conv_bias": encoder["conv_bias"],
        "logit_temp": model["contrast_temperature"],
        "quantize_targets": True,
        "quantize_input": False,
        "same_quantizer": False,
        "target_glu": False,
        "feature_grad_mult": encoder["gradient_scale"],
        "latent_vars": model["codes"],
        "latent_groups": model["codebooks"],
        "latent_dim": model["code_width"],
        **_mask_settings(encoder["mask"], "mask"),
        **_mask_settings(encoder["channel_mask"], "mask_channel"),
        "num_negatives": model["negatives"],
        "negatives_from_everywhere": False,
        "cross_sample_negatives": 0,
        "codebook_negatives": 0,
        "conv_pos": encoder["position_kernel"],
        "conv_pos_groups": encoder["position_groups"],
        "latent_temp": list(model["temperature"]),
    }


def _config(pretrained: Pretrained) -> dict[str, Any]:
    encoder, model = pretrained.encoder, pretrained.model
    empty = ("common", "checkpoint", "dataset", "distributed_training", "optimization")
    audio = {"sample_rate": encoder["sample_rate"], "normalize": encoder["normalise_audio"]}
    return {
        "_name": None,
        **{name: {} for name in empty},
        "model": _model_settings(encoder, model),
        "task": {"_name": "audio_pretraining", "data": "", **audio},
        "criterion": {
            "_name": "wav2vec",
            "infonce": True,
            "loss_weights": [model["diversity_weight"], model["penalty_weight"]],
            "log_keys": ["prob_perplexity", "code_perplexity", "temp"],
        },
        "optimizer": {"_name": "adam"},
        "lr_scheduler": {"_name": "polynomial_decay"},
    }


def _mask_settings(mask: Mapping[str, Any] | None, kind: str) -> dict[str, Any]:
    if mask is None:
        return {f"{kind}_prob": 0.0}
    return {
        f"{kind}_prob": mask["probability"],
        f"{kind}_length": mask["length"],
        f"{kind}_selection": mask["kind"],
        f"{kind}_other": mask["other"],
        f"no_{kind}_overlap": not mask["overlap"],
        f"{kind}_min_space": mask["min_space"],
    }


def write(pretrained: Pretrained, content: Mapping[str, Any], path: str | Path) -> None:
    """Write the checkpoint of ``checkpoint_of``, after it was read back and is equal bit by bit.

    Raises DataError if the checkpoint that was read back differs.
    """
    path = Path(path)
    with atomic(path) as temporary:
        torch.save(dict(content), temporary)
        again = read(temporary)
        same = again.weights.keys() == pretrained.weights.keys() and all(
            torch.equal(value, pretrained.weights[name]) for name, value in again.weights.items()
        )
        # without masks: fairseq has fixed numbers for some of our settings (min_masks)
        form = {name: value for name, value in again.encoder.items() if not name.endswith("mask")}
        if not same or not form.items() <= pretrained.encoder.items() or again.model != pretrained.model:
            raise DataError(f"{path} is not written: the file that was read back differs from the model")
