"""Reads and writes directories of Hugging Face's wav2vec 2.0 models; each conversion is checked as it runs.

``transformers`` (extra ``interop``) is the reference of the check: its model and ours get the same second
of audio. A conversion whose outputs differ by more than ``LIMIT`` is an error and writes nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from speechtrain.errors import MALFORMED, ConfigError, DataError, MachineError, one_line
from speechtrain.files import apply_umask, open_filled, read_bytes, read_json, write_json
from speechtrain.interop.pickles import read_pickle, tensors_of
from speechtrain.interop.pretrained import CONV, LAYER, Pretrained, Rule, Settings, inward, outward, renamed
from speechtrain.nn.masking import SpanMask

LIMIT = 1e-4
"""Largest difference allowed between the two models' outputs, which are of order 1."""

_RULES: list[Rule] = [
    (r"encoder\.mask_embedding", r"wav2vec2.masked_spec_embed"),
    (rf"{CONV}\.conv\.(\w+)", r"wav2vec2.feature_extractor.conv_layers.\1.conv.\2"),
    (rf"{CONV}\.norm\.(\w+)", r"wav2vec2.feature_extractor.conv_layers.\1.layer_norm.\2"),
    (r"encoder\.norm\.(\w+)", r"wav2vec2.feature_projection.layer_norm.\1"),
    (r"encoder\.projection\.(\w+)", r"wav2vec2.feature_projection.projection.\1"),
    (r"encoder\.transformer\.position\.(\w+)", r"wav2vec2.encoder.pos_conv_embed.conv.\1"),
    (r"encoder\.transformer\.norm\.(\w+)", r"wav2vec2.encoder.layer_norm.\1"),
    (rf"{LAYER}\.attention\.(query|key|value|output)\.(\w+)", r"wav2vec2.encoder.layers.\1.attention.\2.\3"),
    (rf"{LAYER}\.attention_norm\.(\w+)", r"wav2vec2.encoder.layers.\1.layer_norm.\2"),
    (rf"{LAYER}\.feed_forward_in\.(\w+)", r"wav2vec2.encoder.layers.\1.feed_forward.intermediate_dense.\2"),
    (rf"{LAYER}\.feed_forward_out\.(\w+)", r"wav2vec2.encoder.layers.\1.feed_forward.output_dense.\2"),
    (rf"{LAYER}\.norm\.(\w+)", r"wav2vec2.encoder.layers.\1.final_layer_norm.\2"),
    (r"quantizer\.codebook", r"quantizer.codevectors"),
    (r"quantizer\.projection\.(\w+)", r"quantizer.weight_proj.\1"),
    (r"project_q\.(\w+)", r"project_q.\1"),
    (r"final_proj\.(\w+)", r"project_hid.\1"),
    (r"output\.(\w+)", r"lm_head.\1"),
]
_ENCODER = Settings(
    conv_bias=("conv_bias", False),
    conv_norm=("feat_extract_norm", "group"),
    width=("hidden_size", 768),
    layers=("num_hidden_layers", 12),
    feed_forward=("intermediate_size", 3072),
    heads=("num_attention_heads", 12),
    pre_norm=("do_stable_layer_norm", False),
    position_kernel=("num_conv_pos_embeddings", 128),
    position_groups=("num_conv_pos_embedding_groups", 16),
    dropout=("hidden_dropout", 0.1),
    attention_dropout=("attention_dropout", 0.1),
    activation_dropout=("activation_dropout", 0.1),
    input_dropout=("feat_proj_dropout", 0.0),
    layer_drop=("layerdrop", 0.1),
)
_MODEL = Settings(
    final_width=("proj_codevector_dim", 256),
    codebooks=("num_codevector_groups", 2),
    codes=("num_codevectors_per_group", 320),
    code_width=("codevector_dim", 256),
    negatives=("num_negatives", 100),
    contrast_temperature=("contrastive_logits_temperature", 0.1),
    diversity_weight=("diversity_loss_weight", 0.1),
    target_dropout=("feat_quantizer_dropout", 0.0),
)
_MASK, _CHANNEL_MASK = (
    Settings(
        probability=(f"mask_{kind}_prob", share),
        length=(f"mask_{kind}_length", 10),
        min_masks=(f"mask_{kind}_min_masks", least),
    )
    for kind, share, least in (("time", 0.05, 2), ("feature", 0.0, 0))
)
_CONVOLUTION = {"conv_dim": [512] * 7, "conv_kernel": [10, 3, 3, 3, 3, 2, 2], "conv_stride": [5, *[2] * 6]}
"""Channels, kernels and strides, with the values of a file that lacks them."""
# by the norm: the encoder's and the model's published values of what the format does not store
_PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "group": ({"gradient_scale": 0.1}, {"temperature": [2.0, 0.5, 0.999995], "penalty_weight": 10.0}),
    "layer": ({"gradient_scale": 1.0}, {"temperature": [2.0, 0.1, 0.999995], "penalty_weight": 0.0}),
}
_PREFIX = "wav2vec2."
_PROJECTION = "wav2vec2.feature_projection.projection"
_MASK_EMBEDDING = "masked_spec_embed"
_PAIR = {"weight_g": "parametrizations.weight.original0", "weight_v": "parametrizations.weight.original1"}


def huggingface_name(name: str) -> str:
    """The name in ``Wav2Vec2ForPreTraining`` of one of ours, a weight-norm pair as ``weight_g``, ``_v``."""
    return renamed(name, _RULES)


def is_available() -> bool:
    """Whether ``transformers`` is installed."""
    return importlib.util.find_spec("transformers") is not None


def transformers_library() -> Any:
    """The library, without its log lines. Raises MachineError where it cannot be imported."""
    try:
        module = importlib.import_module("transformers")
        module.Wav2Vec2Model  # noqa: B018 - imported here, and torchaudio with it, if that is installed
    except (ImportError, OSError, RuntimeError) as error:
        raise MachineError(
            "a conversion to or from Hugging Face needs transformers, which cannot be imported "
            f"({one_line(str(error), 200)}); pip install -e '.[interop]', and if torchaudio is there, "
            "the one of this torch"
        ) from None
    module.logging.set_verbosity_error()
    module.logging.disable_progress_bar()
    return module


def difference_of(pretrained: Pretrained) -> float:
    """Largest difference between the outputs of our model and Hugging Face's with the same weights.

    Raises MachineError without transformers.
    """
    return _difference(pretrained, _model(pretrained))


def _model(pretrained: Pretrained) -> Any:
    """Hugging Face's model with the same weights, in evaluation mode."""
    transformers = transformers_library()
    head = "ForPreTraining" if pretrained.model else "ForCTC" if pretrained.labels else "Model"
    kind = getattr(transformers, f"Wav2Vec2{head}")
    config = transformers.Wav2Vec2Config(**config_of(pretrained))
    with torch.device("meta"):  # costs no initial weights, which are replaced
        model = kind(config)
    names = set(model.state_dict())
    state = {}
    width = pretrained.encoder["width"]
    identity = {f"{_PROJECTION}.weight": torch.eye(width), f"{_PROJECTION}.bias": torch.zeros(width)}
    theirs = outward(pretrained.weights, huggingface_name)
    for name, value in (identity | theirs).items():  # their model also projects between equal widths
        own = name.removeprefix(_PREFIX) if head == "Model" else name
        base, _, leaf = own.rpartition(".")
        if leaf == _MASK_EMBEDDING and own not in names:
            continue  # their model that masks nothing has none
        state[own if own in names else f"{base}.{_PAIR.get(leaf, leaf)}"] = value
    model.load_state_dict(state, assign=True)
    return model.eval()


@torch.no_grad()
def _difference(pretrained: Pretrained, model: Any) -> float:
    encoder, task = pretrained.build()
    time = torch.arange(16000) / 16000
    noise = torch.randn(16000, generator=torch.Generator().manual_seed(0))
    # a second of chirp and noise, the same everywhere
    audio = (0.3 * torch.sin(2 * math.pi * (200 + 1500 * time) * time) + 0.1 * noise)[None]
    base = getattr(model, "wav2vec2", model)
    theirs = base(audio)
    features, lengths, _ = encoder.extract(audio, torch.tensor([audio.shape[1]]))
    hidden = encoder.contextualise(features, lengths)
    pairs = [(hidden, theirs.last_hidden_state), (features, theirs.extract_features)]
    # this audio does not use it
    pairs.append((encoder.mask_embedding, getattr(base, _MASK_EMBEDDING, encoder.mask_embedding)))
    if pretrained.labels:
        weight, bias = pretrained.weights["output.weight"], pretrained.weights["output.bias"]
        pairs.append((F.linear(hidden, weight, bias), model.lm_head(theirs.last_hidden_state)))
    if task is not None:
        # from the same features: rounding must not decide between two codes
        codes, _ = model.quantizer(theirs.extract_features)
        weight = torch.ones(features.shape[:2])
        ours = task.quantizer(theirs.extract_features, 1.0, weight).codes
        pairs.append((task.project_q(ours), model.project_q(codes)))
        pairs.append((task.final_proj(hidden), model.project_hid(theirs.last_hidden_state)))
        # codes that this audio does not choose
        pairs.append((task.quantizer.codebook.flatten(), model.quantizer.codevectors.flatten()))
    if any(a.shape != b.shape for a, b in pairs):
        return math.inf
    return max(float((a - b).abs().nan_to_num(math.inf).max()) for a, b in pairs)


def proved(difference: float, where: str) -> float:
    """Return ``difference``. Raises DataError if it is above ``LIMIT``."""
    if not difference <= LIMIT:
        raise DataError(
            f"{where}: on the same audio our model and Hugging Face's differ by {difference:.2g}; the "
            f"limit is {LIMIT:g}, so nothing is written"
        )
    return difference


def read(folder: str | Path) -> tuple[Pretrained, float]:
    """Read a model from Hugging Face's directory; also returns its difference to ours.

    ``Wav2Vec2ForPreTraining``, ``Wav2Vec2Model`` and ``Wav2Vec2ForCTC`` are read, the last
    without its head. Weights come from model.safetensors (or its shards) or pytorch_model.bin, the
    latter without running pickled code. Values that the format does not store (gradient scale,
    temperature, feature penalty) are those published for models of this norm.

    Raises DataError for a directory that is incomplete or of another model, for the first tensor that
    does not fit, and if the two models differ; MachineError without transformers.
    """
    folder = Path(folder)
    transformers = transformers_library()
    config = _config(folder)
    tensors = _normal_names(read_tensors(folder))
    is_encoder = "quantizer.codevectors" not in tensors
    if is_encoder:  # our encoder has no heads of fine-tuned models
        tensors = {name: value for name, value in tensors.items() if name.startswith(_PREFIX)}
    pretrained = _described(folder, config, is_encoder)
    shapes = pretrained.shapes()
    if "encoder.projection.weight" not in shapes:
        _drop_identity(tensors, folder)
    if not (config.get("mask_time_prob", 0.05) or config.get("mask_feature_prob")):
        # then their model has no embedding for masked frames
        tensors.setdefault(_PREFIX + _MASK_EMBEDDING, torch.zeros(pretrained.encoder["width"]))
    weights = inward(tensors, shapes, huggingface_name, where=str(folder))
    pretrained = Pretrained(pretrained.encoder, pretrained.model, weights)
    kind = transformers.Wav2Vec2Model if is_encoder else transformers.Wav2Vec2ForPreTraining
    try:
        model = kind.from_pretrained(folder, local_files_only=True).float().eval()
    except Exception as error:  # whatever transformers raises for a file that we can read
        told = f"{folder}: transformers cannot load it ({type(error).__name__}: {one_line(str(error), 120)})"
        raise DataError(told) from None
    return pretrained, proved(_difference(pretrained, model), str(folder))


def read_arguments(folder: Path) -> Pretrained:
    """Read what a directory says of its encoder, without its weights. Raises DataError."""
    return _described(folder, _config(folder), is_encoder=True)


def _described(folder: Path, config: Mapping[str, Any], is_encoder: bool) -> Pretrained:
    try:
        pretrained = _arguments(folder, config, is_encoder)
        pretrained.shapes()
        return pretrained
    except (ConfigError, TypeError, RuntimeError, *MALFORMED) as error:
        told = f"{folder / 'config.json'} does not describe a wav2vec 2.0 model: {one_line(str(error), 120)}"
        raise DataError(told) from None


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(read_bytes(path, follow=True))
    except (OSError, *MALFORMED) as error:
        told = f"{path} cannot be read ({one_line(str(error), 120)}); give a Hugging Face directory"
        raise DataError(told) from None
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind != "wav2vec2":
        raise DataError(f"{path} describes the model type {kind!r}; only wav2vec2 is supported")
    fixed = {"hidden_act": "gelu", "feat_extract_activation": "gelu", "add_adapter": False}
    for key, only in (fixed | {"layer_norm_eps": 1e-5, "adapter_attn_dim": None}).items():
        if config.get(key, only) != only:
            raise DataError(f"{path}: {key} is {config[key]!r}; only {only!r} is supported")
    return config


def read_tensors(folder: Path) -> dict[str, Tensor]:
    names = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
    whole, index, old = (folder / name for name in names)
    if whole.is_file():
        return read_safetensors(whole)
    if index.is_file():
        return {name: value for shard in _shards(index) for name, value in read_safetensors(shard).items()}
    if old.is_file():
        found = read_pickle(old)
        if not isinstance(found, dict):
            raise DataError(f"{old} has no named tensors; download it again")
        return tensors_of(found, old)
    raise DataError(f"{folder} has neither model.safetensors nor pytorch_model.bin")


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file. Raises DataError for one that is damaged."""
    try:
        open_filled(path).close()
        return load_file(path)
    except (SafetensorError, OSError, KeyError, TypeError, RuntimeError, *MALFORMED) as error:
        raise DataError(f"{path} cannot be read ({one_line(str(error), 120)}); copy it again") from None


def _shards(index: Path) -> list[Path]:
    """The files that an index lists, looked for in its folder only."""
    try:
        listed = json.loads(read_bytes(index, follow=True))["weight_map"]
        names = {Path(name).name for name in listed.values()}
    except (OSError, KeyError, TypeError, AttributeError, *MALFORMED) as error:
        raise DataError(f"{index} lists no files ({type(error).__name__}); download it again") from None
    return [index.parent / name for name in sorted(names)]


def _normal_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename tensors of any class and version to the names of ``Wav2Vec2ForPreTraining``."""
    if not any(name.startswith(_PREFIX) for name in tensors):
        tensors = {_PREFIX + name: value for name, value in tensors.items()}
    normal = {}
    for name, value in tensors.items():
        for short, long in _PAIR.items():
            name = name.replace(long, short)
        normal[name] = value
    return normal


def _drop_identity(tensors: dict[str, Tensor], folder: Path) -> None:
    """Remove an identity projection between equal widths, which our encoder lacks. Raises DataError."""
    weight, bias = (tensors.pop(f"{_PROJECTION}.{name}", None) for name in ("weight", "bias"))
    is_identity = weight is not None and weight.dim() == 2 and torch.equal(weight, torch.eye(*weight.shape))
    if weight is not None and not (is_identity and (bias is None or not bias.any())):
        raise DataError(
            f"{folder}: the tensor {_PROJECTION}.weight projects between equal widths, for which our encoder "
            "has no layer"
        )


def _arguments(folder: Path, config: Mapping[str, Any], is_encoder: bool) -> Pretrained:
    encoder = _ENCODER.read(config)
    of_encoder, of_model = _PUBLISHED.get(encoder["conv_norm"], _PUBLISHED["group"])
    sizes = (config.get(key, usual) for key, usual in _CONVOLUTION.items())
    audio, channels = read_json(folder / "preprocessor_config.json", follow=True), _CHANNEL_MASK.read(config)
    encoder |= {
        "conv_layers": [[int(number) for number in layer] for layer in zip(*sizes, strict=False)],
        "normalise_audio": bool(audio.get("do_normalize", encoder["conv_norm"] == "layer")),
        "sample_rate": int(audio.get("sampling_rate", 16000)),
        "mask": asdict(SpanMask(**_MASK.read(config))),
        "channel_mask": asdict(SpanMask(**channels)) if channels["probability"] else None,
        **of_encoder,
    }
    return Pretrained(encoder, {} if is_encoder else _MODEL.read(config) | of_model, {})


def config_of(pretrained: Pretrained) -> dict[str, Any]:
    """``Wav2Vec2Config``'s arguments for a model."""
    encoder, model, labels = pretrained.encoder, pretrained.model, pretrained.labels
    mask, channels = encoder["mask"], encoder["channel_mask"]
    return {
        "hidden_act": "gelu",
        "final_dropout": 0.0,
        **_ENCODER.write(encoder),
        **dict(zip(_CONVOLUTION, map(list, zip(*encoder["conv_layers"], strict=True)), strict=True)),
        **(_MASK.write(mask) if mask else {"mask_time_prob": 0.0}),
        **(_CHANNEL_MASK.write(channels) if channels else {"mask_feature_prob": 0.0}),
        **(_MODEL.write(model) if model else {}),
        **({"vocab_size": len(labels) + 1, "pad_token_id": len(labels)} if labels else {}),
    }


def write(pretrained: Pretrained, folder: str | Path) -> float:
    """Write ``Wav2Vec2ForPreTraining``, ``…ForCTC`` or ``Wav2Vec2Model``; returns the difference to ours.

    All files, with the vocabulary of a CTC layer, are written next to ``folder``, loaded from there by
    transformers, compared with our model on the same audio, and only then moved.

    Raises DataError if the two differ, MachineError without transformers.
    """
    folder = Path(folder)
    model = _model(pretrained)
    reader = {
        "do_normalize": pretrained.encoder["normalise_audio"],
        "feature_extractor_type": "Wav2Vec2FeatureExtractor",
        "feature_size": 1,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": pretrained.encoder["conv_norm"] == "layer",
        "sampling_rate": pretrained.encoder["sample_rate"],
    }
    with writing(folder) as temporary:
        model.save_pretrained(temporary)
        write_json(temporary / "preprocessor_config.json", reader, durable=False)
        if pretrained.labels:
            _write_vocabulary(pretrained.labels, temporary)
        again = type(model).from_pretrained(temporary, local_files_only=True).float().eval()
        return proved(_difference(pretrained, again), str(folder))


def _write_vocabulary(labels: Sequence[str], folder: Path) -> None:
    """Write the files of ``Wav2Vec2CTCTokenizer``: its padding is the blank, and ``|`` is the space."""
    symbols = ["|" if label == " " else label for label in labels]
    ids = {symbol: label for label, symbol in enumerate([*symbols, "<pad>"])}
    names = {"unk_token": None, "bos_token": None, "eos_token": None, "pad_token": "<pad>"}
    names |= {"tokenizer_class": "Wav2Vec2CTCTokenizer", "word_delimiter_token": "|"}
    write_json(folder / "vocab.json", ids, durable=False)
    write_json(folder / "tokenizer_config.json", {**names, "do_lower_case": False}, durable=False)


@contextmanager
def writing(folder: Path) -> Iterator[Path]:
    """A new directory, whose files move into ``folder`` if the block ends without an error; others stay."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for path in temporary.glob("*.safetensors"):
            apply_umask(path)
        shutil.copytree(temporary, folder, copy_function=os.replace, dirs_exist_ok=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
