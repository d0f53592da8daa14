"""Read and write Hugging Face's Parakeet and Nemotron models, which have a FastConformer.

Parakeet has a CTC, an RNN-T or a TDT (token and duration). Nemotron (``nemotron_hf.py``) has an RNN-T, and
its FastConformer can read a stream.

The arguments of a model are read from config.json and the feature extractor's file, and the weights from
safetensors. "Our" names are speechtrain's, "foreign" names are Hugging Face's. The encoder's parameters have
the same names in both, except Nemotron's subsampling. ``_RULES`` has the other names.
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

from speechtrain.decoding.greedy import Greedy
from speechtrain.encoders.fastconformer import FastConformer
from speechtrain.errors import MALFORMED, ConfigError, DataError, one_line
from speechtrain.features.logmel import LogMel
from speechtrain.files import read_bytes, read_json
from speechtrain.interop import nemotron_hf, wav2vec2_hf
from speechtrain.interop.pretrained import MOST_LAYERS, Settings, not_exportable
from speechtrain.models.ctc import CTC
from speechtrain.models.rnnt import RNNT
from speechtrain.nn.conformer import Convolution
from speechtrain.nn.joint import Joint
from speechtrain.nn.prediction import LSTMPrediction
from speechtrain.text.huggingface import HuggingFace
from speechtrain.text.vocabulary import Characters, SentencePiece, Tokenizer

KINDS = {
    "parakeet_ctc": "CTC",
    "parakeet_rnnt": "RNNT",
    "parakeet_tdt": "TDT",
    nemotron_hf.MODEL_TYPE: "RNNT",
}
"""The kind of a model, by the ``model_type`` in its config."""
# The foreign prefixes of parameters, by our prefixes.
_RULES = {
    "joint.encoder.": "encoder_projector.",
    "joint.prediction.": "decoder.decoder_projector.",
    "joint.output.": "joint.head.",
    "prediction.embedding.": "decoder.embedding.",
    "prediction.rnn.lstm.": "decoder.lstm.",
    "output.": "ctc_head.",
    "encoder.": "encoder.",
}
# The same for Nemotron. No parameter of Parakeet has one of the additional foreign prefixes.
_NEMOTRON_RULES = {**nemotron_hf.RULES, **_RULES}
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
# Settings of the encoder for which only this value is supported.
_FIXED = {"hidden_act": "silu", "subsampling_conv_kernel_size": 3, "subsampling_conv_stride": 2}
# NeMo's recipes have this dropout in the prediction network and the joint. The format does not store it.
_DROPOUT = 0.2


def huggingface_name(name: str, rules: Mapping[str, str] = _RULES) -> str:
    """Return Hugging Face's name of our parameter ``name``. Raises KeyError for a parameter without one."""
    for prefix, foreign_prefix in rules.items():
        if name.startswith(prefix):
            return foreign_prefix + name.removeprefix(prefix)
    raise KeyError(name)


def _our_name(foreign_name: str) -> str | None:
    """Return our name of a parameter of Hugging Face's model, or None for a parameter without one."""
    for prefix, foreign_prefix in _NEMOTRON_RULES.items():
        if foreign_name.startswith(foreign_prefix):
            return prefix + foreign_name.removeprefix(foreign_prefix)
    return None


def is_recogniser(folder: Path) -> bool:
    """Return whether ``folder`` is the directory of a Parakeet or Nemotron model."""
    config = read_json(folder / "config.json", follow=True)
    return str(config.get("model_type")) in KINDS


def has_fastconformer(task: Any) -> bool:
    """Return whether the encoder of ``task`` is a FastConformer."""
    return isinstance(getattr(task, "encoder", None), FastConformer)


def nodes(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the config nodes that build the model in ``folder``, by config group.

    The groups are ``model``, ``encoder``, ``tokenizer`` and, for a transducer, ``decoder``.

    Raises DataError if the directory does not describe a supported model.
    """
    path = folder / "config.json"
    try:
        config = json.loads(read_bytes(path, follow=True))
        _refuse_unsupported_values(config, path)
        encoder_config = config["encoder_config"]
        processor = read_json(folder / "processor_config.json", follow=True)
        # Older versions of transformers write a file for the feature extractor.
        extractor = processor.get("feature_extractor")
        extractor = extractor or read_json(folder / "preprocessor_config.json", follow=True)
        filters_dtype = extractor.get("mel_filters_dtype", "float32")
        if filters_dtype != "float32":
            raise DataError(
                f"{folder}: mel_filters_dtype is {filters_dtype!r}, and only 'float32' is supported"
            )
        encoder = _node(FastConformer, **_ENCODER.read(encoder_config), residual_dropout=0.0)
        if max(encoder["layers"], int(config.get("num_decoder_layers", 1))) > MOST_LAYERS:
            raise DataError(f"{path}: more than {MOST_LAYERS} layers")
        encoder["features"] = _features_node(extractor, int(encoder_config.get("num_mel_bins", 80)))
        if config["model_type"] == nemotron_hf.MODEL_TYPE:
            encoder |= nemotron_hf.encoder_arguments(encoder_config, processor)
            encoder["features"]["normalise"] = "none"
        model = _model_node(config)
        labels = int(config["vocab_size"]) - 1  # The last id is the blank.
        labels_per_frame = int(config.get("max_symbols_per_step", 10))
    except (OSError, KeyError, TypeError, AttributeError, *MALFORMED) as error:
        reason = one_line(f"{type(error).__name__}: {error}", 120)
        raise DataError(f"{path} does not describe a recogniser ({reason}). Download it again") from None
    tokenizer = _node(HuggingFace, model=str(folder / "tokenizer.json"), labels=labels)
    groups = {"model": model, "encoder": encoder, "tokenizer": tokenizer}
    if KINDS[config["model_type"]] != "CTC":
        groups["decoder"] = _node(Greedy, max_symbols_per_step=labels_per_frame)
    return groups


def _refuse_unsupported_values(config: Mapping[str, Any], path: Path) -> None:
    """Raise DataError for the first setting whose value is not supported."""
    encoder_config = config["encoder_config"]
    is_ctc = KINDS[config["model_type"]] == "CTC"
    blank_key = "pad_token_id" if is_ctc else "blank_token_id"
    checks = []  # the name of a setting, its value in the file, and the supported value
    for key, supported in _FIXED.items():
        checks.append((key, encoder_config.get(key, supported), supported))
    if not is_ctc:
        checks.append(("hidden_act", config.get("hidden_act", "relu"), "relu"))
    checks.append(("the blank's id", config[blank_key], int(config["vocab_size"]) - 1))
    for name, stored, supported in checks:
        if stored != supported:
            raise DataError(f"{path}: {name} is {stored!r}, and only {supported!r} is supported")


def _node(part: type, **arguments: Any) -> dict[str, Any]:
    """Return a config node that builds ``part``: the defaults of all parameters, and ``arguments``."""
    defaults = {}
    for name, parameter in inspect.signature(part).parameters.items():
        # The augmentation is injected from its own group, and no key of the encoder.
        if parameter.default is not parameter.empty and name != "augment":
            defaults[name] = parameter.default
    return {"_target_": f"{part.__module__}.{part.__qualname__}", **defaults, **arguments}


def _model_node(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the node of the model: a CTC or a transducer. The joint of a TDT also predicts durations."""
    kind = KINDS[config["model_type"]]
    if kind == "CTC":
        return _node(CTC, dropout=0.0)
    width = int(config["decoder_hidden_size"])
    layers = int(config.get("num_decoder_layers", 2))
    joint = _node(Joint, hidden=width, dropout=_DROPOUT)
    if kind == "TDT" and config.get("durations"):
        joint["durations"] = list(config["durations"])
    prediction = _node(
        LSTMPrediction,
        embedding=width,
        hidden=width,
        layers=layers,
        dropout=_DROPOUT,
        init_scale=1.0,
        start="blank",
    )
    return _node(RNNT, joint=joint, prediction=prediction)


def _features_node(settings: Mapping[str, Any], mels: int) -> dict[str, Any]:
    """Return the node of ``LogMel`` for the settings of a feature extractor."""
    rate = int(settings.get("sampling_rate", 16000))
    emphasis = settings.get("preemphasis", 0.97)
    if emphasis is None:
        emphasis = 0.0
    return _node(
        LogMel,
        sample_rate=rate,
        window_seconds=int(settings.get("win_length", 400)) / rate,
        hop_seconds=int(settings.get("hop_length", 160)) / rate,
        n_fft=int(settings.get("n_fft", 512)),
        mels=mels,
        preemphasis=float(emphasis),
        dither=0.0,
        form="parakeet",
        padding="constant",
        log_floor=2.0**-24,
        splice=1,
    )


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights in ``folder`` under our names, in fp32. Raises DataError for a damaged file."""
    weights = {}
    for foreign_name, tensor in wav2vec2_hf.read_tensors(folder).items():
        name = _our_name(foreign_name)
        if name is None:
            raise DataError(f"{folder}: the tensor {foreign_name} is not part of such a model")
        if tensor.is_floating_point():
            tensor = tensor.to(torch.float32)
        if name == "output.weight" and tensor.dim() == 3:  # Hugging Face's CTC layer is a convolution.
            tensor = tensor[:, :, 0]
        weights[name] = tensor
    return weights


def write(task: Any, weights: Mapping[str, Tensor], folder: Path) -> float:
    """Write a FastConformer recogniser as a model of Hugging Face, with its processor.

    The class is ``ParakeetForCTC``, ``…RNNT`` or ``…TDT``, or for a causal encoder
    ``NemotronAsrStreamingForRNNT``.

    Returns the largest difference between our model's and Hugging Face's frames and logits.

    Raises ConfigError for a model that the format cannot store, and DataError if the outputs differ.
    """
    arguments, kind = _config_of(task)
    transformers = wav2vec2_hf.transformers_library()
    model_class = getattr(transformers, f"{family(task)}For{kind}")
    config = model_class.config_class(**arguments)
    state = _state_of(task, weights, kind)
    with torch.device("meta"):  # The initial weights are replaced, so they need no memory.
        model = model_class(config)
    with wav2vec2_hf.replacing_files(folder) as temporary:
        model.load_state_dict(state, assign=True, strict=False)
        # The buffers of this module are not among the weights, so they are still on the meta device. A new
        # module computes them.
        positions_class = type(model.encoder.encode_positions)
        model.encoder.encode_positions = positions_class(config.encoder_config)
        if kind != "CTC":
            # The first input of the prediction network is the blank.
            model.generation_config.decoder_start_token_id = task.tokenizer.blank
        if kind == "TDT":
            # The outputs of the joint after the labels are durations, which the search must not choose.
            outputs = range(task.joint.output.out_features)
            model.generation_config.suppress_tokens = list(outputs[task.tokenizer.size :])
        model.save_pretrained(temporary)
        _processor(task, kind, transformers).save_pretrained(temporary)
        loaded = model_class.from_pretrained(temporary, local_files_only=True).float().eval()
        return wav2vec2_hf.check_difference(_difference(task, loaded), str(folder))


def family(task: Any) -> str:
    """Return the first part of the names of Hugging Face's classes for ``task``."""
    return "NemotronAsrStreaming" if task.encoder.causal else "Parakeet"


def _state_of(task: Any, weights: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    """Return the weights under Hugging Face's names and in its shapes, without an auxiliary CTC."""
    rules = _NEMOTRON_RULES if task.encoder.causal else _RULES
    state = {}
    for name, tensor in weights.items():
        if not name.startswith("ctc."):
            state[huggingface_name(name, rules)] = tensor.detach().float().clone()
    if kind == "CTC":
        state["ctc_head.weight"] = state["ctc_head.weight"][:, :, None]  # a convolution of width 1
        return state
    # The embedding (labels, width) is widened to the width of the LSTM, and gets a row for the blank if it
    # has none. The new values are zeros, so the outputs of the prediction network stay the same.
    embedding = state["decoder.embedding.weight"]
    input_weights = state["decoder.lstm.weight_ih_l0"]
    if not task.prediction.starts_with_blank:
        # Our prediction network then starts with a zero vector. Hugging Face's starts with the blank's row.
        blank_row = torch.zeros_like(embedding[:1])
        embedding = torch.cat([embedding, blank_row])
    new_columns = task.prediction.width - embedding.shape[1]
    state["decoder.embedding.weight"] = nn.functional.pad(embedding, (0, new_columns))
    state["decoder.lstm.weight_ih_l0"] = nn.functional.pad(input_weights, (0, new_columns))
    return state


def _config_of(task: Any) -> tuple[dict[str, Any], str]:
    """Return the arguments of Hugging Face's config, and the kind of the model: CTC, RNNT or TDT.

    Raises ConfigError for a model that the format cannot store.
    """
    blank = task.tokenizer.blank
    config = {
        "vocab_size": task.tokenizer.size,
        "pad_token_id": blank,
        "encoder_config": _encoder_config(task.encoder),
    }
    if type(task) is CTC:
        if task.encoder.causal:
            raise not_exportable("model=ctc with encoder.causal=true")
        return config, "CTC"
    problem = _problem_of_transducer(task)
    if problem:
        raise not_exportable(problem)
    prediction = task.prediction
    config["decoder_hidden_size"] = prediction.width
    config["blank_token_id"] = blank
    config["num_decoder_layers"] = prediction.rnn.lstm.num_layers
    if isinstance(task.decoder, Greedy):
        config["max_symbols_per_step"] = task.decoder.max_symbols_per_step
    durations = getattr(task.joint, "durations", None)
    if not durations:
        return config, "RNNT"
    if task.encoder.causal:
        raise not_exportable("model.joint.durations with encoder.causal=true")
    config["durations"] = list(durations)
    return config, "TDT"


def _encoder_config(encoder: Any) -> dict[str, Any]:
    """Return Hugging Face's settings of an encoder. Raises ConfigError if the format cannot store it."""
    if not isinstance(encoder, FastConformer):
        raise not_exportable("an encoder that is not a FastConformer")
    attention = {}
    if encoder.causal:
        attention = nemotron_hf.encoder_settings(encoder)
    elif encoder.context is not None:
        raise not_exportable("an encoder with encoder.context and encoder.causal=false")
    features = encoder.features
    layer: Any = encoder.layers[0]
    if features.form != "parakeet" or features.padding != "constant" or features.log_floor != 2.0**-24:
        raise not_exportable("encoder.features with another form, padding or log_floor than Parakeet's")
    if encoder.causal and isinstance(layer.conv, Convolution):
        raise not_exportable("encoder.causal_convolution=chunk")
    if encoder.causal and features.normalise != "none":
        raise not_exportable(f"encoder.causal=true with encoder.features.normalise={features.normalise}")
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
        "attention_dropout": layer.self_attn.dropout.p,
        "activation_dropout": layer.feed_forward1.dropout.p,
        "layer_drop": encoder.layer_drop,
        "scale_input": encoder.scale != 1.0,
        "attention_bias": layer.self_attn.q_proj.bias is not None,
        "convolution_bias": layer.conv.depthwise_conv.bias is not None,
    }
    return {**_ENCODER.write(arguments), "num_mel_bins": features.features, **attention}


def _problem_of_transducer(task: Any) -> str:
    """Return the first property of a model that Parakeet's transducers cannot have.

    Returns an empty text if the format can store the model. An auxiliary CTC is not checked.
    """
    prediction = getattr(task, "prediction", None)
    if type(task) is not RNNT or not isinstance(prediction, LSTMPrediction):
        return f"{type(task).__name__} without prediction=lstm"
    if not isinstance(prediction.rnn.norm, nn.Identity):
        return "model.prediction.layer_norm=true"
    if prediction.width != task.joint.hidden or prediction.embedding.embedding_dim > prediction.width:
        return "a prediction network that is narrower or wider than the joint"
    if task.joint.bias != "both":
        return "model.joint.bias=single"
    return ""


def exportable_part(task: Any) -> tuple[Any, str]:
    """Return the part of a recogniser that the format can store, and a description of it for the user.

    A transducer is written without its auxiliary CTC. If the format cannot store the transducer, the part
    is the encoder with the auxiliary CTC.
    """
    if getattr(task, "ctc", None) is None:
        return task, "all of the model"
    problem = _problem_of_transducer(task)
    if not problem:
        return task, "the transducer without its auxiliary CTC"
    ctc = CTC(task.tokenizer, task.encoder)
    ctc.output = task.ctc
    ctc.decoder = task.decoder
    ctc.train(task.training)
    return ctc, f"the encoder with its auxiliary CTC, since Parakeet has no {problem}"


def _processor(task: Any, kind: str, transformers: Any) -> Any:
    """Return Hugging Face's processor: the feature extractor and the tokenizer of a model."""
    features = task.encoder.features
    extractor_class = getattr(transformers, f"{family(task)}FeatureExtractor")
    extractor = extractor_class(
        feature_size=features.features,
        sampling_rate=features.sample_rate,
        hop_length=features.hop,
        n_fft=features.n_fft,
        win_length=features.width,
        preemphasis=features.preemphasis,
    )
    library_tokenizer = _library_tokenizer(task.tokenizer)
    tokenizer = transformers.ParakeetTokenizer(tokenizer_object=library_tokenizer, pad_token="<blank>")
    if task.encoder.causal:
        return transformers.NemotronAsrStreamingProcessor(
            extractor,
            tokenizer,
            supported_num_lookahead_tokens=nemotron_hf.lookaheads(task.encoder),
            default_num_lookahead_tokens=task.encoder.context[1] - 1,
        )
    return transformers.ParakeetProcessor(
        extractor, tokenizer, decoder_type=kind.lower(), blank_token="<blank>"
    )


def _library_tokenizer(tokenizer: Tokenizer) -> Any:
    """Return a tokenizer of the library ``tokenizers`` that decodes labels as ``tokenizer`` does."""
    tokenizers = importlib.import_module("tokenizers")
    if isinstance(tokenizer, HuggingFace):
        return tokenizer.library()
    if isinstance(tokenizer, Characters):
        vocabulary = {symbol: label for label, symbol in enumerate(tokenizer.labels)}
        characters = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
        characters.decoder = tokenizers.decoders.Fuse()
        return characters
    if isinstance(tokenizer, SentencePiece):
        pieces = tokenizers.Tokenizer(tokenizers.models.Unigram(tokenizer.scores(), tokenizer.unknown_id))
        pieces.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
        pieces.decoder = tokenizers.decoders.Metaspace()
        return pieces
    raise ConfigError(f"{type(tokenizer).__name__} has no form in Hugging Face's format")


@torch.no_grad()
def _difference(task: Any, model: Any) -> float:
    """Return the largest difference of the two models' frames and logits, for the same random features."""
    encoder: FastConformer = task.encoder
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(1, 20 * encoder.factor, encoder.features.features, generator=generator)
    lengths = torch.tensor([features.shape[1]])
    mask = torch.ones(features.shape[:2], dtype=torch.bool)
    is_training = task.training
    task.eval()
    frames, _ = encoder.contextualise(features, lengths)
    reference_frames = model.encoder(features, attention_mask=mask).last_hidden_state
    if type(task) is CTC:
        logits = task.output(frames).log_softmax(-1)
        reference_logits = model.ctc_head(reference_frames).log_softmax(-1)
    else:
        labels = torch.randint(task.tokenizer.blank, (1, 7), generator=generator)
        # ``joint.encoder`` and ``joint.prediction`` are the projections to the width of the joint.
        # The outputs have the shapes (1, T, 1, H) and (1, 1, U + 1, H), so the joint combines all pairs.
        encoded = task.joint.encoder(frames)[:, :, None]
        predicted = task.joint.prediction(task.prediction(labels))[:, None]
        logits = task.joint(encoded, predicted)
        # Our prediction network adds its first input to the labels. Hugging Face's does not.
        reference_labels = nn.functional.pad(labels, (1, 0), value=task.tokenizer.blank)
        reference_encoded = model.encoder_projector(reference_frames)[:, :, None]
        reference_predicted = model.decoder(reference_labels)[:, None]
        # The arguments of the two joints have opposite orders.
        reference_logits = model.joint(reference_predicted, reference_encoded)
    task.train(is_training)
    return wav2vec2_hf.largest_difference([(frames, reference_frames), (logits, reference_logits)])
