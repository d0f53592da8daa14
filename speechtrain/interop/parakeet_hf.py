"""Reads and writes Hugging Face's Parakeet: FastConformer with CTC, RNN-T or TDT (token and duration).

Arguments come from config.json and the feature extractor's file, weights from safetensors. The encoder's
parameters have the same names in both; ``_RULES`` has the others.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from speechtrain.encoders.fastconformer import ConformerLayer, FastConformer
from speechtrain.errors import MALFORMED, ConfigError, DataError, one_line
from speechtrain.features.logmel import LogMel
from speechtrain.files import read_bytes, read_json
from speechtrain.interop import wav2vec2_hf
from speechtrain.interop.pretrained import MOST_LAYERS, Settings, not_exportable
from speechtrain.models.ctc import CTC
from speechtrain.models.rnnt import RNNT
from speechtrain.nn.joint import Joint
from speechtrain.nn.prediction import LSTMPrediction
from speechtrain.text.huggingface import HuggingFace
from speechtrain.text.vocabulary import Characters, SentencePiece, Tokenizer

KINDS = {"parakeet_ctc": "CTC", "parakeet_rnnt": "RNNT", "parakeet_tdt": "TDT"}
_RULES = {
    "joint.encoder.": "encoder_projector.",
    "joint.prediction.": "decoder.decoder_projector.",
    "joint.output.": "joint.head.",
    "prediction.embedding.": "decoder.embedding.",
    "prediction.rnn.lstm.": "decoder.lstm.",
    "output.": "ctc_head.",
    "encoder.": "encoder.",
}
_ENCODER = Settings(
    width=("hidden_size", 1024),
    layers=("num_hidden_layers", 24),
    feed_forward=("intermediate_size", 4096),
    heads=("num_attention_heads", 8),
    kernel=("conv_kernel_size", 9),
    subsampling=("subsampling_factor", 8),
    channels=("subsampling_conv_channels", 256),
    dropout=("dropout", 0.1),
    position_dropout=("dropout_positions", 0.0),
    attention_dropout=("attention_dropout", 0.1),
    activation_dropout=("activation_dropout", 0.1),
    layer_drop=("layerdrop", 0.1),
    scale_input=("scale_input", True),
    attention_bias=("attention_bias", True),
    convolution_bias=("convolution_bias", True),
)
_FIXED = {"hidden_act": "silu", "subsampling_conv_kernel_size": 3, "subsampling_conv_stride": 2}
_DROPOUT = 0.2  # of prediction network and joint in NeMo's recipes; the format does not store it


def theirs(name: str) -> str:
    """Their name of one of our parameters."""
    ours = next(prefix for prefix in _RULES if name.startswith(prefix))
    return _RULES[ours] + name.removeprefix(ours)


def is_parakeet(folder: Path) -> bool:
    return str(read_json(folder / "config.json", follow=True).get("model_type")) in KINDS


def has_encoder(task: Any) -> bool:
    return isinstance(getattr(task, "encoder", None), FastConformer)


def nodes(folder: Path) -> dict[str, dict[str, Any]]:
    """The nodes of model, encoder and tokenizer that build the model in ``folder``. Raises DataError."""
    path = folder / "config.json"
    try:
        config = json.loads(read_bytes(path, follow=True))
        inner = config["encoder_config"]
        kind, size = KINDS[config["model_type"]], int(config["vocab_size"])
        blank = config["pad_token_id" if kind == "CTC" else "blank_token_id"]
        wrong = {key: inner.get(key, only) for key, only in _FIXED.items() if inner.get(key, only) != only}
        if kind != "CTC" and config.get("hidden_act", "relu") != "relu":
            wrong["hidden_act"] = config["hidden_act"]
        if wrong or blank != size - 1:
            key, value = next(iter(wrong.items()), ("the blank's id", blank))
            raise DataError(f"{path}: {key} is {value!r}; only {_FIXED.get(key, size - 1)!r} is supported")
        encoder = _node(FastConformer, **_ENCODER.read(inner), residual_dropout=0.0)
        if max(encoder["layers"], int(config.get("num_decoder_layers", 1))) > MOST_LAYERS:
            raise DataError(f"{path}: more than {MOST_LAYERS} layers")
        encoder["features"] = _features(folder, int(inner.get("num_mel_bins", 80)))
        model = _node(CTC, dropout=0.0)
        if kind != "CTC":
            model = _transducer(config, list(config.get("durations", ())) if kind == "TDT" else None)
    except (OSError, KeyError, TypeError, AttributeError, *MALFORMED) as error:
        told = one_line(f"{type(error).__name__}: {error}", 120)
        raise DataError(f"{path} does not describe a Parakeet model ({told}); download it again") from None
    tokenizer = _node(HuggingFace, model=str(folder / "tokenizer.json"), labels=blank)
    return {"model": model, "encoder": encoder, "tokenizer": tokenizer}


def _node(part: type, **arguments: Any) -> dict[str, Any]:
    """The config of ``part`` with all keys that a user may set."""
    known = inspect.signature(part).parameters.values()
    usual = {one.name: one.default for one in known if one.default is not one.empty}
    return {"_target_": f"{part.__module__}.{part.__qualname__}", **usual, **arguments}


def _transducer(config: Mapping[str, Any], durations: list[int] | None) -> dict[str, Any]:
    width, layers = int(config["decoder_hidden_size"]), int(config.get("num_decoder_layers", 2))
    timed = {"durations": durations} if durations else {}
    joint = _node(Joint, hidden=width, dropout=_DROPOUT, **timed)
    sizes = {"embedding": width, "hidden": width, "layers": layers}
    prediction = _node(LSTMPrediction, **sizes, dropout=_DROPOUT, init_scale=1.0, start="blank")
    return _node(RNNT, joint=joint, prediction=prediction)


def _features(folder: Path, mels: int) -> dict[str, Any]:
    """The arguments of ``LogMel``, of the feature extractor's file in any version's place."""
    found = read_json(folder / "processor_config.json", follow=True).get("feature_extractor")
    found = found or read_json(folder / "preprocessor_config.json", follow=True)
    rate = int(found.get("sampling_rate", 16000))
    emphasis = found.get("preemphasis", 0.97)
    return _node(
        LogMel,
        sample_rate=rate,
        window_seconds=int(found.get("win_length", 400)) / rate,
        hop_seconds=int(found.get("hop_length", 160)) / rate,
        n_fft=int(found.get("n_fft", 512)),
        mels=mels,
        preemphasis=0.0 if emphasis is None else float(emphasis),
        dither=0.0,
        form="parakeet",
        padding="constant",
        log_floor=2.0**-24,
        splice=1,
    )


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The weights in ``folder`` under our names, in fp32. Raises DataError for a damaged file."""
    found, prefixes = {}, {there: ours for ours, there in _RULES.items()}
    for name, value in wav2vec2_hf.read_tensors(folder).items():
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        if prefix is None:
            raise DataError(f"{folder}: the tensor {name} is not part of a Parakeet model")
        ours = prefixes[prefix] + name.removeprefix(prefix)
        value = value.to(torch.float32) if value.is_floating_point() else value
        found[ours] = value[:, :, 0] if ours == "output.weight" and value.dim() == 3 else value
    return found


def write(task: Any, weights: Mapping[str, Tensor], folder: Path) -> float:
    """Write a FastConformer recogniser as ``ParakeetForCTC``, ``…RNNT`` or ``…TDT``, with its processor.

    Returns the largest difference of the two encoders' and heads' outputs on the same audio. Raises
    ConfigError for a model that the format does not hold, DataError if the outputs differ.
    """
    config, kind = _config_of(task)
    transformers = wav2vec2_hf.transformers_library()
    settings = getattr(transformers, f"Parakeet{kind}Config")(**config)
    state = {}
    for name, value in weights.items():
        if not name.startswith("ctc."):
            state[theirs(name)] = value.detach().float().clone()
    if kind == "CTC":
        state["ctc_head.weight"] = state["ctc_head.weight"][:, :, None]
    else:
        _fit_embedding(state, task)
    with torch.device("meta"):
        model = getattr(transformers, f"ParakeetFor{kind}")(settings)
    with wav2vec2_hf.writing(folder) as temporary:
        model.load_state_dict(state, assign=True, strict=False)
        model.encoder.encode_positions = type(model.encoder.encode_positions)(settings.encoder_config)
        if kind != "CTC":
            model.generation_config.decoder_start_token_id = task.tokenizer.blank
        if kind == "TDT":  # its search would take durations for tokens
            rows = range(task.tokenizer.size, task.joint.output.out_features)
            model.generation_config.suppress_tokens = list(rows)
        model.save_pretrained(temporary)
        _processor(task, kind, transformers).save_pretrained(temporary)
        again = getattr(transformers, f"ParakeetFor{kind}").from_pretrained(temporary, local_files_only=True)
        return wav2vec2_hf.proved(difference(task, again.float().eval(), kind), str(folder))


def _fit_embedding(state: dict[str, Tensor], task: Any) -> None:
    """Give the embedding a row for the blank and the width of the LSTM. Zeros keep the function."""
    table = state["decoder.embedding.weight"]
    inputs = state["decoder.lstm.weight_ih_l0"]
    if not task.prediction.starts_with_blank:  # A zero vector is the input before the first label.
        table = torch.cat([table, torch.zeros_like(table[:1])])
    missing = (0, task.prediction.width - table.shape[1])
    state["decoder.embedding.weight"] = nn.functional.pad(table, missing)
    state["decoder.lstm.weight_ih_l0"] = nn.functional.pad(inputs, missing)


def _config_of(task: Any) -> tuple[dict[str, Any], str]:
    encoder, tokenizer = task.encoder, task.tokenizer
    if not isinstance(encoder, FastConformer) or encoder.context is not None:
        raise not_exportable("an encoder with encoder.context, or another one than FastConformer,")
    features, layer = encoder.features, encoder.layers[0]
    assert isinstance(layer, ConformerLayer)
    if features.form != "parakeet" or features.padding != "constant" or features.log_floor != 2.0**-24:
        raise not_exportable("encoder.features with another form, padding or log_floor than Parakeet's")
    arguments = {
        "width": encoder.width,
        "layers": len(encoder.layers),
        "feed_forward": layer.feed_forward1.linear1.out_features,
        "heads": layer.self_attn.heads,
        "kernel": layer.conv.depthwise_conv.kernel_size[0],
        "subsampling": encoder.factor,
        "channels": encoder.subsampling.layers[0].out_channels,
        "dropout": encoder.dropout.p,
        "position_dropout": encoder.position_dropout.p,
        "attention_dropout": layer.self_attn.dropout,
        "activation_dropout": layer.feed_forward1.dropout.p,
        "layer_drop": encoder.layer_drop,
        "scale_input": encoder.scale != 1.0,
        "attention_bias": layer.self_attn.q_proj.bias is not None,
        "convolution_bias": layer.conv.depthwise_conv.bias is not None,
    }
    inner = {**_ENCODER.write(arguments), "num_mel_bins": features.features}
    config = {"encoder_config": inner, "vocab_size": tokenizer.size}
    if type(task) is CTC:
        return config | {"pad_token_id": tokenizer.blank}, "CTC"
    if problem := _problem_of_transducer(task):
        raise not_exportable(problem)
    prediction = task.prediction
    config |= {"decoder_hidden_size": prediction.width, "blank_token_id": tokenizer.blank}
    config |= {"num_decoder_layers": prediction.rnn.lstm.num_layers, "pad_token_id": tokenizer.blank}
    durations = getattr(task.joint, "durations", None)
    return (config | {"durations": list(durations)}, "TDT") if durations else (config, "RNNT")


def _problem_of_transducer(task: Any) -> str:
    """Return what Parakeet's transducers lack of a model, or an empty text. It ignores the auxiliary CTC."""
    prediction = getattr(task, "prediction", None)
    if type(task) is not RNNT or not isinstance(prediction, LSTMPrediction):
        return f"{type(task).__name__} without prediction=lstm"
    if not isinstance(prediction.rnn.norm, nn.Identity):
        return "model.prediction.layer_norm=true"
    if prediction.width != task.joint.hidden or prediction.embedding.embedding_dim > prediction.width:
        return "a prediction network that is narrower or wider than the joint"
    return "" if task.joint.bias == "both" else "model.joint.bias=single"


def exportable_part(task: Any) -> tuple[Any, str]:
    """Return the model that the format holds of a recogniser, and one line on it for the user.

    A transducer is written without its auxiliary CTC. If the format does not hold the transducer, the
    encoder with the auxiliary CTC is a model of its own.
    """
    if getattr(task, "ctc", None) is None:
        return task, "all of the model"
    problem = _problem_of_transducer(task)
    if not problem:
        return task, "the transducer without its auxiliary CTC"
    ctc = CTC(task.tokenizer, task.encoder)
    ctc.output, ctc.decoder = task.ctc, task.decoder
    return ctc.train(task.training), f"the encoder with its auxiliary CTC, since Parakeet has no {problem}"


def _processor(task: Any, kind: str, transformers: Any) -> Any:
    features = task.encoder.features
    extractor = transformers.ParakeetFeatureExtractor(
        feature_size=features.features,
        sampling_rate=features.sample_rate,
        hop_length=features.hop,
        n_fft=features.n_fft,
        win_length=features.width,
        preemphasis=features.preemphasis,
    )
    spelling = {"tokenizer_object": _library(task.tokenizer), "pad_token": "<blank>"}
    tokenizer = transformers.ParakeetTokenizer(**spelling)
    return transformers.ParakeetProcessor(
        extractor, tokenizer, decoder_type=kind.lower(), blank_token="<blank>"
    )


def _library(tokenizer: Tokenizer) -> Any:
    """The library's tokenizer that decodes as ours; its last id is the blank."""
    tokenizers = importlib.import_module("tokenizers")
    if isinstance(tokenizer, HuggingFace):
        return tokenizer.library()
    if isinstance(tokenizer, Characters):
        vocabulary = {symbol: label for label, symbol in enumerate(tokenizer.labels)}
        found = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
        found.decoder = tokenizers.decoders.Fuse()
        return found
    if isinstance(tokenizer, SentencePiece):
        found = tokenizers.Tokenizer(tokenizers.models.Unigram(tokenizer.scores(), tokenizer.unknown_id))
        found.pre_tokenizer, found.decoder = (
            tokenizers.pre_tokenizers.Metaspace(),
            tokenizers.decoders.Metaspace(),
        )
        return found
    raise ConfigError(f"{type(tokenizer).__name__} has no form in Hugging Face's format")


@torch.no_grad()
def difference(task: Any, model: Any, kind: str) -> float:
    """Largest difference between the frames, and the logits of frames and labels, of the two models."""
    encoder: FastConformer = task.encoder
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(1, 20 * encoder.factor, encoder.features.features, generator=generator)
    lengths = torch.tensor([features.shape[1]])
    is_training = task.training
    task.eval()
    frames, _ = encoder.contextualise(features, lengths)
    other = model.encoder(features, attention_mask=torch.ones(features.shape[:2], dtype=torch.bool))
    pairs = [(frames, other.last_hidden_state)]
    if kind == "CTC":
        ours = task.output(frames).log_softmax(-1)
        pairs.append((ours, model.ctc_head(other.last_hidden_state).log_softmax(-1)))
    else:
        labels = torch.randint(task.tokenizer.blank, (1, 7), generator=generator)
        inputs = nn.functional.pad(labels, (1, 0), value=task.tokenizer.blank)
        sides = (
            task.joint.encoder(frames)[:, :, None],
            task.joint.prediction(task.prediction(labels))[:, None],
        )
        decoded = model.decoder(inputs)[:, None]
        logits = model.joint(decoded, model.encoder_projector(other.last_hidden_state)[:, :, None])
        pairs.append((task.joint(*sides), logits))
    task.train(is_training)
    return max(float((a - b).abs().nan_to_num(torch.inf).max()) for a, b in pairs)
