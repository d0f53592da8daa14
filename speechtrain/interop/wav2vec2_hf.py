"""Read and write directories of Hugging Face's wav2vec 2.0 models. Each conversion is checked when it runs.

The reference of the check is the package ``transformers`` (extra ``interop``): its model and our model
process the same second of audio. If the outputs differ by more than ``LIMIT``, the conversion raises an error
and writes nothing.
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

from speechtrain.errors import MALFORMED, ConfigError, DataError, MissingPackage, one_line
from speechtrain.files import apply_umask, open_filled, read_bytes, read_json, write_json
from speechtrain.interop.pickles import read_pickle, tensors_of
from speechtrain.interop.pretrained import (
    CONV,
    LAYER,
    Pretrained,
    Rule,
    Settings,
    export_tensors,
    import_tensors,
    rename,
)
from speechtrain.nn.masking import SpanMask

LIMIT = 1e-4
"""The largest allowed difference between the two models' outputs, which are of order 1."""

# The names in Hugging Face's ``Wav2Vec2ForPreTraining``, by our names.
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


def _mask_settings(kind: str, probability: float, min_masks: int) -> Settings:
    """Return the settings of a mask of frames (``kind`` is ``time``) or of channels (``feature``)."""
    return Settings(
        probability=(f"mask_{kind}_prob", probability),
        length=(f"mask_{kind}_length", 10),
        min_masks=(f"mask_{kind}_min_masks", min_masks),
    )


_MASK = _mask_settings("time", probability=0.05, min_masks=2)
_CHANNEL_MASK = _mask_settings("feature", probability=0.0, min_masks=0)
_CONVOLUTION = {"conv_dim": [512] * 7, "conv_kernel": [10, 3, 3, 3, 3, 2, 2], "conv_stride": [5, *[2] * 6]}
"""Channels, kernels and strides of the convolutions. A file that lacks them has these values."""
# Arguments of the published models by ``conv_norm``. The format does not store them.
_PUBLISHED_ENCODER = {"group": {"gradient_scale": 0.1}, "layer": {"gradient_scale": 1.0}}
_PUBLISHED_MODEL: dict[str, dict[str, Any]] = {
    "group": {"temperature": [2.0, 0.5, 0.999995], "penalty_weight": 10.0},
    "layer": {"temperature": [2.0, 0.1, 0.999995], "penalty_weight": 0.0},
}
_PREFIX = "wav2vec2."  # of the tensors in models with heads. ``Wav2Vec2Model`` has no prefix.
_PROJECTION = "wav2vec2.feature_projection.projection"
_MASK_EMBEDDING = "masked_spec_embed"
# The names of the two tensors of a weight norm, in our files and in Hugging Face's model in memory.
_WEIGHT_NORM_NAMES = {
    "weight_g": "parametrizations.weight.original0",
    "weight_v": "parametrizations.weight.original1",
}


def huggingface_name(name: str) -> str:
    """Return the name of our tensor ``name`` in ``Wav2Vec2ForPreTraining``.

    The two tensors of a weight norm are named ``weight_g`` and ``weight_v``.
    """
    return rename(name, _RULES)


def is_available() -> bool:
    """Return whether ``transformers`` is installed."""
    return importlib.util.find_spec("transformers") is not None


def transformers_library() -> Any:
    """Import transformers and turn off its log lines. Raises MissingPackage if it cannot be imported."""
    try:
        module = importlib.import_module("transformers")
        # transformers imports a class, and then also torchaudio if it is installed, at the first use.
        module.Wav2Vec2Model  # noqa: B018
    except (ImportError, OSError, RuntimeError) as error:
        raise MissingPackage(
            "a conversion to or from Hugging Face needs transformers, which cannot be imported "
            f"({one_line(str(error), 200)}): pip install -e '.[interop]'. If torchaudio is installed, it "
            "must be the one for this torch"
        ) from None
    module.logging.set_verbosity_error()
    module.logging.disable_progress_bar()
    return module


def difference_of(pretrained: Pretrained) -> float:
    """Return the largest difference between the outputs of our model and of Hugging Face's model.

    Raises MissingPackage without transformers.
    """
    return _difference_between(pretrained, _build_model(pretrained))


def _build_model(pretrained: Pretrained) -> Any:
    """Return Hugging Face's model with the weights of ``pretrained``, in evaluation mode."""
    transformers = transformers_library()
    model_class, has_head = transformers.Wav2Vec2Model, False
    if pretrained.model:
        model_class, has_head = transformers.Wav2Vec2ForPreTraining, True
    elif pretrained.labels:
        model_class, has_head = transformers.Wav2Vec2ForCTC, True
    config = transformers.Wav2Vec2Config(**config_of(pretrained))
    with torch.device("meta"):  # The initial weights are replaced, so they need no memory.
        model = model_class(config)
    names = set(model.state_dict())
    width = pretrained.encoder["width"]
    # Hugging Face's model has this projection even between equal widths, where our encoder has none. If our
    # encoder has the projection, its tensors replace the identity.
    identity = {f"{_PROJECTION}.weight": torch.eye(width), f"{_PROJECTION}.bias": torch.zeros(width)}
    tensors = identity | export_tensors(pretrained.weights, huggingface_name)
    state = {}
    for name, tensor in tensors.items():
        if not has_head:
            name = name.removeprefix(_PREFIX)
        base, _, leaf = name.rpartition(".")
        if leaf == _MASK_EMBEDDING and name not in names:
            continue  # Hugging Face's model has no mask embedding if it masks nothing.
        if leaf in _WEIGHT_NORM_NAMES and name not in names:
            name = f"{base}.{_WEIGHT_NORM_NAMES[leaf]}"
        state[name] = tensor
    model.load_state_dict(state, assign=True)
    return model.eval()


@torch.no_grad()
def _difference_between(pretrained: Pretrained, model: Any) -> float:
    """Return the largest difference between the outputs of ``pretrained`` and of Hugging Face's ``model``."""
    encoder, task = pretrained.build()
    # A second of chirp and noise, (1, 16000), which is the same on every machine.
    time = torch.arange(16000) / 16000
    noise = torch.randn(16000, generator=torch.Generator().manual_seed(0))
    chirp = torch.sin(2 * math.pi * (200 + 1500 * time) * time)
    audio = (0.3 * chirp + 0.1 * noise)[None]
    reference_encoder = getattr(model, "wav2vec2", model)  # ``Wav2Vec2Model`` itself, or inside another class
    reference = reference_encoder(audio)
    features, lengths, _ = encoder.extract(audio, torch.tensor([audio.shape[1]]))
    hidden = encoder.contextualise(features, lengths)
    pairs = [(hidden, reference.last_hidden_state), (features, reference.extract_features)]
    # No output depends on the mask embedding, since no frame of this audio is masked. Hugging Face's model
    # has no mask embedding if it masks nothing.
    mask_embedding = getattr(reference_encoder, _MASK_EMBEDDING, None)
    if mask_embedding is not None:
        pairs.append((encoder.mask_embedding, mask_embedding))
    if pretrained.labels:
        weight, bias = pretrained.weights["output.weight"], pretrained.weights["output.bias"]
        pairs.append((F.linear(hidden, weight, bias), model.lm_head(reference.last_hidden_state)))
    if task is not None:
        pairs.append((task.final_proj(hidden), model.project_hid(reference.last_hidden_state)))
        # Both quantisers get the same features. Otherwise a rounding difference could make them choose
        # different codes.
        same_features = reference.extract_features
        quantized = task.quantizer(same_features, 1.0, torch.ones(same_features.shape[:2]))
        reference_codes, _ = model.quantizer(same_features)
        pairs.append((task.project_q(quantized.codes), model.project_q(reference_codes)))
        # A second of audio does not use every code, so the codebooks are compared, too.
        pairs.append((task.quantizer.codebook.flatten(), model.quantizer.codevectors.flatten()))
    return largest_difference(pairs)


def largest_difference(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return the largest absolute difference within the pairs.

    It is infinite if the shapes of a pair differ or a value is NaN.
    """
    largest = 0.0
    for output, reference in pairs:
        if output.shape != reference.shape:
            return math.inf
        differences = (output - reference).abs().nan_to_num(math.inf)
        largest = max(largest, float(differences.max()))
    return largest


def check_difference(difference: float, where: str) -> float:
    """Return ``difference``. Raises DataError, which begins with ``where``, if it is above ``LIMIT``."""
    if difference > LIMIT:
        raise DataError(
            f"{where}: on the same audio our model and Hugging Face's differ by {difference:.2g}. The "
            f"limit is {LIMIT:g}, so nothing is written"
        )
    return difference


def read(folder: str | Path) -> tuple[Pretrained, float]:
    """Return the model in Hugging Face's directory ``folder``, and the largest difference of its outputs.

    - The directory may contain a ``Wav2Vec2ForPreTraining``, a ``Wav2Vec2Model``, or a ``Wav2Vec2ForCTC``,
      of which the head is not read.
    - The weights are read from model.safetensors (or its shards), or from pytorch_model.bin without running
      pickled code.
    - The format does not store the gradient scale, the temperature and the feature penalty. They get the
      published values for models with the same norm.

    Raises DataError for a directory that is incomplete or has another model, for the first tensor that
    does not fit, and if the outputs differ. Raises MissingPackage without transformers.
    """
    folder = Path(folder)
    transformers = transformers_library()
    config = _read_config(folder)
    # The names of any model class and version become the names of ``Wav2Vec2ForPreTraining``.
    stored = read_tensors(folder)
    prefix = "" if any(name.startswith(_PREFIX) for name in stored) else _PREFIX
    tensors = {}
    for name, tensor in stored.items():
        for our_name, foreign_name in _WEIGHT_NORM_NAMES.items():
            name = name.replace(foreign_name, our_name)
        tensors[prefix + name] = tensor
    if "quantizer.codevectors" in tensors:
        model_class, describe = transformers.Wav2Vec2ForPreTraining, _pretraining_model_of
    else:
        model_class, describe = transformers.Wav2Vec2Model, _encoder_of
        # Without the prefix, only the heads of fine-tuned models remain. They are left out.
        tensors = {name: tensor for name, tensor in tensors.items() if name.startswith(_PREFIX)}
    with _explain_config(folder):
        pretrained = describe(folder, config)
        shapes = pretrained.shapes()
    if "encoder.projection.weight" not in shapes:
        _drop_identity(tensors, folder)
    masks_frames = config.get("mask_time_prob", 0.05)
    masks_channels = config.get("mask_feature_prob")
    if not masks_frames and not masks_channels:
        # Hugging Face's model then has no mask embedding.
        tensors.setdefault(_PREFIX + _MASK_EMBEDDING, torch.zeros(pretrained.encoder["width"]))
    weights = import_tensors(tensors, shapes, huggingface_name, where=str(folder))
    pretrained = Pretrained(pretrained.encoder, pretrained.model, weights)
    try:
        model = model_class.from_pretrained(folder, local_files_only=True).float().eval()
    except Exception as error:  # transformers raises errors of many types for a file that we can read.
        reason = f"{type(error).__name__}: {one_line(str(error), 120)}"
        raise DataError(f"{folder}: transformers cannot load it ({reason})") from None
    return pretrained, check_difference(_difference_between(pretrained, model), str(folder))


def read_arguments(folder: Path) -> Pretrained:
    """Return the encoder of the model in ``folder``, without its weights. Raises DataError."""
    config = _read_config(folder)
    with _explain_config(folder):
        pretrained = _encoder_of(folder, config)
        pretrained.shapes()  # Raises for sizes that are out of range.
    return pretrained


@contextmanager
def _explain_config(folder: Path) -> Iterator[None]:
    """Return a context in which each error of wrong values in config.json becomes a DataError."""
    try:
        yield
    except (ConfigError, TypeError, RuntimeError, *MALFORMED) as error:
        reason = one_line(str(error), 120)
        raise DataError(f"{folder / 'config.json'} does not describe a wav2vec 2.0 model: {reason}") from None


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(read_bytes(path, follow=True))
    except (OSError, *MALFORMED) as error:
        reason = one_line(str(error), 120)
        raise DataError(f"{path} cannot be read ({reason}). Give a Hugging Face directory") from None
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind != "wav2vec2":
        raise DataError(
            f"{path} describes the model type {kind!r}. Supported are wav2vec2 and, for init_from only, "
            "parakeet_ctc, parakeet_rnnt, parakeet_tdt and nemotron_asr_streaming"
        )
    supported_values = {
        "hidden_act": "gelu",
        "feat_extract_activation": "gelu",
        "add_adapter": False,
        "layer_norm_eps": 1e-5,
        "adapter_attn_dim": None,
    }
    for key, supported in supported_values.items():
        if config.get(key, supported) != supported:
            raise DataError(f"{path}: {key} is {config[key]!r}, and only {supported!r} is supported")
    return config


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a directory, under their names in the files. Raises DataError."""
    names = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
    single_file, index, pickle_file = (folder / name for name in names)
    if single_file.is_file():
        return read_safetensors(single_file)
    if index.is_file():
        tensors: dict[str, Tensor] = {}
        for shard in _shards(index):
            tensors |= read_safetensors(shard)
        return tensors
    if pickle_file.is_file():
        content = read_pickle(pickle_file)
        if not isinstance(content, dict):
            raise DataError(f"{pickle_file} has no named tensors. Download it again")
        return tensors_of(content, pickle_file)
    raise DataError(f"{folder} has neither model.safetensors nor pytorch_model.bin")


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file. Raises DataError if the file is damaged."""
    try:
        open_filled(path).close()
        return load_file(path)
    except (SafetensorError, OSError, KeyError, TypeError, RuntimeError, *MALFORMED) as error:
        raise DataError(f"{path} cannot be read ({one_line(str(error), 120)}). Copy it again") from None


def _shards(index: Path) -> list[Path]:
    """Return the files that an index lists.

    Only their names are used. All files are in the folder of the index, so a path cannot lead elsewhere.
    """
    try:
        content = json.loads(read_bytes(index, follow=True))
        shard_of_tensor = content["weight_map"]
        names = {Path(name).name for name in shard_of_tensor.values()}
    except (OSError, KeyError, TypeError, AttributeError, *MALFORMED) as error:
        raise DataError(f"{index} lists no files ({type(error).__name__}). Download it again") from None
    return [index.parent / name for name in sorted(names)]


def _drop_identity(tensors: dict[str, Tensor], folder: Path) -> None:
    """Remove an identity projection between equal widths, which our encoder lacks.

    Raises DataError if the projection is not the identity.
    """
    weight = tensors.pop(f"{_PROJECTION}.weight", None)
    bias = tensors.pop(f"{_PROJECTION}.bias", None)
    if weight is None:
        return
    is_identity = weight.dim() == 2 and torch.equal(weight, torch.eye(*weight.shape))
    has_bias = bias is not None and bool(bias.any())
    if not is_identity or has_bias:
        raise DataError(
            f"{folder}: the tensor {_PROJECTION}.weight projects between equal widths, for which our encoder "
            "has no layer"
        )


def _encoder_of(folder: Path, config: Mapping[str, Any]) -> Pretrained:
    """Return the encoder that a config describes, without weights.

    Wrong values raise errors of many types, here and in ``_pretraining_model_of``.
    """
    encoder = _ENCODER.read(config)
    norm = _published_norm(encoder)
    conv_sizes = [config.get(key, default) for key, default in _CONVOLUTION.items()]
    conv_layers = []
    for channels, kernel, stride in zip(*conv_sizes, strict=False):
        conv_layers.append([int(channels), int(kernel), int(stride)])
    audio = read_json(folder / "preprocessor_config.json", follow=True)
    channel_settings = _CHANNEL_MASK.read(config)
    channel_mask = asdict(SpanMask(**channel_settings)) if channel_settings["probability"] else None
    encoder |= {
        "conv_layers": conv_layers,
        "normalise_audio": bool(audio.get("do_normalize", norm == "layer")),
        "sample_rate": int(audio.get("sampling_rate", 16000)),
        "mask": asdict(SpanMask(**_MASK.read(config))),
        "channel_mask": channel_mask,
        **_PUBLISHED_ENCODER[norm],
    }
    return Pretrained(encoder, {}, weights={})


def _pretraining_model_of(folder: Path, config: Mapping[str, Any]) -> Pretrained:
    """Return the model with its quantiser that a config describes, without weights."""
    encoder = _encoder_of(folder, config).encoder
    model = _MODEL.read(config) | _PUBLISHED_MODEL[_published_norm(encoder)]
    return Pretrained(encoder, model, weights={})


def _published_norm(encoder: Mapping[str, Any]) -> str:
    """Return the norm of the published model with the values that the format does not store."""
    norm = str(encoder["conv_norm"])
    # The encoder's constructor later refuses an unknown norm, with a good message.
    return norm if norm in _PUBLISHED_ENCODER else "group"


def config_of(pretrained: Pretrained) -> dict[str, Any]:
    """Return the arguments of ``Wav2Vec2Config`` for a model."""
    encoder = pretrained.encoder
    labels = pretrained.labels
    channels, kernels, strides = zip(*encoder["conv_layers"], strict=True)
    config = {
        "hidden_act": "gelu",
        "final_dropout": 0.0,
        **_ENCODER.write(encoder),
        "conv_dim": list(channels),
        "conv_kernel": list(kernels),
        "conv_stride": list(strides),
        "mask_time_prob": 0.0,
        "mask_feature_prob": 0.0,
    }
    if encoder["mask"]:
        config |= _MASK.write(encoder["mask"])
    if encoder["channel_mask"]:
        config |= _CHANNEL_MASK.write(encoder["channel_mask"])
    if pretrained.model:
        config |= _MODEL.write(pretrained.model)
    if labels:
        blank = len(labels)  # Hugging Face's CTC uses the padding as the blank.
        config |= {"vocab_size": len(labels) + 1, "pad_token_id": blank}
    return config


def write(pretrained: Pretrained, folder: str | Path) -> float:
    """Write a ``Wav2Vec2ForPreTraining``, ``Wav2Vec2ForCTC`` or ``Wav2Vec2Model`` to ``folder``.

    1. The files, with the vocabulary of a CTC layer, are written to a temporary directory next to ``folder``.
    2. transformers loads them from there, and its model is compared with ours on the same audio.
    3. The files move into ``folder``.

    Returns the largest difference between the outputs of the two models. Raises DataError if it is above
    ``LIMIT``, and MissingPackage without transformers.
    """
    folder = Path(folder)
    model = _build_model(pretrained)
    feature_extractor = {
        "do_normalize": pretrained.encoder["normalise_audio"],
        "feature_extractor_type": "Wav2Vec2FeatureExtractor",
        "feature_size": 1,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": pretrained.encoder["conv_norm"] == "layer",
        "sampling_rate": pretrained.encoder["sample_rate"],
    }
    with replacing_files(folder) as temporary:
        model.save_pretrained(temporary)
        write_json(temporary / "preprocessor_config.json", feature_extractor, durable=False)
        if pretrained.labels:
            _write_vocabulary(pretrained.labels, temporary)
        loaded = type(model).from_pretrained(temporary, local_files_only=True).float().eval()
        return check_difference(_difference_between(pretrained, loaded), str(folder))


def _write_vocabulary(labels: Sequence[str], folder: Path) -> None:
    """Write the files of ``Wav2Vec2CTCTokenizer``. Its padding is the blank, and ``|`` is the space."""
    symbols = ["|" if label == " " else label for label in labels]
    symbols.append("<pad>")
    ids = {symbol: number for number, symbol in enumerate(symbols)}
    tokenizer_config = {
        "unk_token": None,
        "bos_token": None,
        "eos_token": None,
        "pad_token": "<pad>",
        "tokenizer_class": "Wav2Vec2CTCTokenizer",
        "word_delimiter_token": "|",
        "do_lower_case": False,
    }
    write_json(folder / "vocab.json", ids, durable=False)
    write_json(folder / "tokenizer_config.json", tokenizer_config, durable=False)


@contextmanager
def replacing_files(folder: Path) -> Iterator[Path]:
    """Yield a new directory. If the block ends without an error, its files move into ``folder``.

    They replace files of the same names. Other files in ``folder`` stay.
    """
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for path in temporary.glob("*.safetensors"):
            apply_umask(path)
        shutil.copytree(temporary, folder, copy_function=os.replace, dirs_exist_ok=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
