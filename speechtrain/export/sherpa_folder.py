"""Writes the folder of ``--to sherpa``: a recogniser in the layout of NeMo's models, for sherpa-onnx 2.

sherpa-onnx computes the features itself, so the features of the run must be its features. The export is
checked on the run's held-out recordings before the folder is written.

Legend: B rows, T frames of features, F features, N frames of the encoder, W encoder width, V classes.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from speechtrain.data import voice_activity
from speechtrain.encoders.base import LogMelEncoder
from speechtrain.errors import ConfigError
from speechtrain.export import held_out
from speechtrain.export.graphs import Graph, graphs_of
from speechtrain.export.onnx_folder import copy_programs, digests, greedy_task, write_graphs
from speechtrain.export.recognise_sherpa import open_recogniser, transcribe
from speechtrain.files import sha256, write_json, write_text
from speechtrain.inference.loaded_run import LoadedRun
from speechtrain.run_directory import provenance


class _Transducer(nn.Module):
    """Features (B, F, T) and their lengths (B,) to frames (B, W, N) and their lengths (B,)."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        frames, frame_lengths = self.encoder(features.transpose(1, 2), lengths)
        return frames.transpose(1, 2), frame_lengths


class _CTC(nn.Module):
    """Features (B, F, T) and their lengths (B,) to log-probabilities (B, T, V).

    sherpa-onnx divides ``lengths`` by the subsampling factor and rounds down, which would lose the last frame
    of an encoder that rounds up. So each frame is repeated, and the file states a factor of 1. Repetitions
    do not change the text of CTC.
    """

    def __init__(self, encoder: nn.Module, head: nn.Module, factor: int) -> None:
        super().__init__()
        self.encoder, self.head, self.factor = encoder, head, factor

    def forward(self, features: Tensor, lengths: Tensor) -> Tensor:
        frames, _ = self.encoder(features.transpose(1, 2), lengths)
        (scores,) = self.head(frames)
        index = torch.arange(features.shape[2]) // self.factor
        repeated_scores: Tensor = scores[:, index.clamp(max=scores.shape[1] - 1)]
        return repeated_scores


class _Prediction(nn.Module):
    """A label (1, 1), its length (1,) and two states to the output (1, H, 1), the length and the next states.

    sherpa-onnx always stores two states of one shape, as an LSTM has. A network with one state ignores the
    other.
    """

    def __init__(self, step: nn.Module, shapes: list[torch.Size]) -> None:
        super().__init__()
        self.step, self.shapes = step, shapes

    def forward(
        self, label: Tensor, length: Tensor, state0: Tensor, state1: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        states = [state.view(shape) for state, shape in zip((state0, state1), self.shapes, strict=False)]
        output, *next_states = self.step(label[:, 0].long(), *states)
        next_state1 = next_states[1] if len(next_states) == 2 else state1
        return output[:, :, None], length, next_states[0].view(state0.shape), next_state1


class _Joint(nn.Module):
    """A frame (1, W, 1) and an output of the prediction network (1, H, 1) to logits (1, 1, 1, V)."""

    def __init__(self, step: nn.Module) -> None:
        super().__init__()
        self.step = step

    def forward(self, frame: Tensor, prediction: Tensor) -> Tensor:
        scores: Tensor = self.step(frame[:, :, 0], prediction[:, :, 0])[0]
        return scores[:, None, None]


def write(loaded: LoadedRun, folder: Path) -> list[str]:
    """Write the export of a run into the empty ``folder``. Return lines for the user.

    Raises ConfigError for a model that sherpa-onnx cannot run, and DataError if the texts in fp32 differ from
    PyTorch's texts.
    """
    task = greedy_task(loaded, "--to sherpa")
    require_fit(task, sherpa_features(task.sample_rate, has_joint=hasattr(task, "joint")))
    write_model(loaded, folder, sherpa_graphs(task), {})
    text_of = partial(held_out.text_of, loaded)
    return held_out.write_check(loaded, folder, text_of, open_recogniser, transcribe)


def write_model(loaded: LoadedRun, folder: Path, graphs: dict[str, Graph], settings: dict[str, Any]) -> None:
    """Write the graphs, the labels, model.json with ``settings``, and the program."""
    task: Any = loaded.opened.task
    write_graphs(graphs, folder)
    write_text(folder / "tokens.txt", tokens(task.tokenizer.spelling()))
    sums = digests(folder)
    for graph_sums in sums.values():
        graph_sums["tokens"] = sha256(folder / "tokens.txt")
    content = {
        "sample_rate": task.sample_rate,
        "mels": task.encoder.features.mels,
        "longest_pause": loaded.longest_pause,
        **settings,
        "sha256": sums,
    }
    write_json(folder / "model.json", content | provenance(loaded.opened.run.run_dir))
    copy_programs(folder, "recognise_sherpa.py", "recording.py", voice_activity.__file__)


def require_fit(task: Any, features: dict[str, Any]) -> None:
    """Raise ConfigError that names the keys which keep sherpa-onnx from running ``task``.

    ``features`` are the arguments of LogMel that it needs.
    """
    encoder = task.encoder
    if not isinstance(encoder, LogMelEncoder):
        name = type(encoder).__name__
        raise ConfigError(
            f"--to sherpa needs log-mel features, and encoder is {name}. Choose another encoder"
        )
    log_mel = encoder.features
    seconds = {"window_seconds": log_mel.width, "hop_seconds": log_mel.hop}
    problems = []
    for key, value in features.items():
        own_value = seconds[key] / log_mel.sample_rate if key in seconds else getattr(log_mel, key)
        is_near = isinstance(value, float) and math.isclose(own_value, value, rel_tol=1e-3)
        if own_value != value and not is_near:
            problems.append(f"encoder.features.{key}={value}")
    durations = list(getattr(getattr(task, "joint", None), "durations", ()))
    if durations != list(range(len(durations))):
        problems.append(f"model.joint.durations={list(range(len(durations)))}".replace(" ", ""))
    if problems:
        raise ConfigError(f"--to sherpa needs a run that was trained with {' '.join(problems)}")


def sherpa_features(sample_rate: int, has_joint: bool) -> dict[str, Any]:
    """Return the arguments of LogMel with which it computes the features of sherpa-onnx.

    sherpa-onnx has other windows and bands for transducers than for CTC (``offline-stream.cc``,
    ``offline-recognizer-ctc-impl.h`` and ``offline-recognizer-transducer-nemo-impl.h`` of 2.0.1).
    """
    form, f_max = "kaldi_hann", sample_rate / 2
    if has_joint:
        form, f_max = "kaldi", f_max - 400.0
    window_samples = round(0.025 * sample_rate)
    return {
        "form": form,
        "padding": "reflect",
        "window_seconds": 0.025,
        "hop_seconds": 0.01,
        "n_fft": 2 ** (window_samples - 1).bit_length(),
        "f_min": 0.0,
        "f_max": f_max,
        "preemphasis": 0.97,
        "log_floor": 2.0**-24,
        "dither": 0.0,
        "normalise": "all",
        "splice": 1,
        "trim_silence_db": None,
    }


def tokens(spelling: list[str]) -> str:
    """Return the content of tokens.txt: symbols and their ids, the blank last.

    A symbol has ``▁`` for its spaces. A label without letters has a name in angle brackets.
    """
    lines = []
    for label, text in enumerate(spelling):
        symbol = text.replace(" ", "▁")
        if not symbol or symbol.split() != [symbol]:
            symbol = f"<{label}>"
        lines.append(f"{symbol} {label}\n")
    return "".join(lines) + f"<blk> {len(spelling)}\n"


def sherpa_graphs(task: Any) -> dict[str, Graph]:
    """Return the graphs of a recogniser with the inputs, outputs and metadata that sherpa-onnx expects."""
    graphs = graphs_of(task)
    encoder = graphs["encoder"].module
    if "joint" not in graphs:
        module = _CTC(encoder, graphs["ctc"].module, _subsampling(task))
        metadata = {"model_type": "EncDecCTCModelBPE", "subsampling_factor": "1"}
        metadata |= {"normalize_type": "per_feature", **_sizes(task)}
        return {"model": _encoder_graph(graphs["encoder"], module, ("logprobs",), metadata)}
    parts = transducer_parts(graphs)
    metadata = {"normalize_type": "per_feature", **transducer_metadata(task, parts["decoder"])}
    if task.joint.durations:
        metadata["url"] = "tdt"  # sherpa-onnx finds the kind of the model in it.
    outputs = ("outputs", "encoded_lengths")
    return {"encoder": _encoder_graph(graphs["encoder"], _Transducer(encoder), outputs, metadata), **parts}


def transducer_metadata(task: Any, decoder: Graph) -> dict[str, str]:
    """Return the metadata of a transducer's encoder, without the kind of its normalisation."""
    layers, _, hidden = decoder.inputs["state0"].shape
    return {
        **_sizes(task),
        "model_type": "EncDecHybridRNNTCTCBPEModel",
        "subsampling_factor": str(_subsampling(task)),
        "pred_rnn_layers": str(layers),
        "pred_hidden": str(hidden),
    }


def _sizes(task: Any) -> dict[str, str]:
    return {"feat_dim": str(task.encoder.features.mels), "vocab_size": str(task.tokenizer.blank)}


def _subsampling(task: Any) -> int:
    """Return the number of log-mel frames for each frame of the encoder."""
    log_mel_frames: float = task.frame_seconds / task.encoder.features.frame_seconds
    return round(log_mel_frames)


def transducer_parts(graphs: dict[str, Graph]) -> dict[str, Graph]:
    """Return the decoder and the joiner of a transducer from the graphs of ``graphs_of``."""
    frame, prediction_output = graphs["joint"].inputs.values()
    joint_inputs = {
        "encoder_outputs": frame[:, :, None],
        "decoder_outputs": prediction_output[:, :, None],
    }
    joiner = Graph(_Joint(graphs["joint"].module), joint_inputs, ("outputs",), key="model.joint")
    return {"decoder": _prediction_graph(graphs["prediction"]), "joiner": joiner}


def _encoder_graph(
    graph: Graph, module: nn.Module, outputs: tuple[str, ...], metadata: dict[str, str]
) -> Graph:
    features, lengths = graph.inputs.values()
    # An example of two rows, because torch takes an axis of size 1 for a constant.
    inputs = {"audio_signal": features.transpose(1, 2).repeat(2, 1, 1), "length": lengths.repeat(2)}
    return Graph(module, inputs, outputs, {"audio_signal": (0, 2), "length": (0,)}, metadata)


def _prediction_graph(graph: Graph) -> Graph:
    states = [tensor for name, tensor in graph.inputs.items() if name != "label"]
    shape = states[0].shape
    if len(states) == 1:
        shape = torch.Size((1, 1, states[0].numel()))
    inputs = {
        "targets": torch.zeros(1, 1, dtype=torch.int32),
        "target_length": torch.ones(1, dtype=torch.int32),
        "state0": torch.zeros(shape),
        "state1": torch.zeros(shape),
    }
    module = _Prediction(graph.module, [state.shape for state in states])
    return Graph(
        module, inputs, ("outputs", "prednet_lengths", "next_state0", "next_state1"), key="prediction"
    )
