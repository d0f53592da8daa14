"""The graphs of a recogniser in ONNX: features, encoder, prediction network, joint and CTC head.

A graph reads one recording. Legend: S samples, T frames, F features, W encoder width, V classes.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from speechtrain.batch import Batch
from speechtrain.compute_policy import ComputePolicy, apply_policy
from speechtrain.encoders.base import LogMelEncoder
from speechtrain.errors import ConfigError, one_line
from speechtrain.models.ctc import CTC
from speechtrain.models.rnnt import RNNT
from speechtrain.nn.joint import Joint
from speechtrain.nn.lstm import LSTM
from speechtrain.nn.prediction import LSTMPrediction, Prediction, StatelessPrediction

# ONNX Runtime has no strided views. It computes the spectrum fastest as a convolution.
_POLICY = ComputePolicy(spectrum="conv", attention="slices", conv="conv1d", feature_frames=0)
_EXAMPLE_SECONDS = 2.0
_FOLDED = 2**26  # values of the largest constant that is computed at the export


@dataclass(frozen=True)
class Graph:
    """A module with example inputs by name, and the names of its outputs.

    ``free_axes`` has the axes of inputs that depend on the recordings. ``metadata`` is stored in the file.
    ``key`` is the config key of the module.
    """

    module: nn.Module
    inputs: dict[str, Tensor]
    outputs: tuple[str, ...]
    free_axes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    key: str = "encoder"

    def example_outputs(self) -> dict[str, Tensor]:
        with torch.no_grad():
            return dict(zip(self.outputs, self.module(*self.inputs.values()), strict=True))


class _Features(nn.Module):
    """Waveform (1, S) and the offset of its dither (1,) to features (1, T, F) and their number (1,)."""

    def __init__(self, features: nn.Module) -> None:
        super().__init__()
        self.features = features

    def forward(self, audio: Tensor, offset: Tensor) -> Any:
        lengths = torch.ones_like(offset) * audio.shape[1]
        return self.features(audio, lengths, keys=offset)


class _Identity(nn.Module):
    """Takes the place of the features in an encoder that reads features."""

    def forward(self, features: Tensor, lengths: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        return features, lengths


class _Encoder(nn.Module):
    """Features or a waveform, and their length (1,), to frames (1, T, W) and their number (1,)."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, features: Tensor, lengths: Tensor) -> Any:
        zeros = lengths * 0
        return self.encoder(
            Batch(features, lengths, zeros[:, None], zeros, zeros.float(), zeros, ids=("",), texts=("",))
        )


class _WaveformEncoder(_Encoder):
    """A waveform (1, S) to frames (1, T, W) and their number (1,)."""

    def forward(self, audio: Tensor) -> Any:  # type: ignore[override]
        lengths = torch.ones(1, dtype=torch.int64) * audio.shape[1]
        if self.encoder.normalise_audio:
            centred = audio - audio.mean()
            audio = centred / (centred.square().mean() + 1e-5).sqrt()
        return super().forward(audio, lengths)


class _CTCHead(nn.Module):
    """Frames (1, T, W) to log-probabilities (1, T, V), blank last."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, frames: Tensor) -> tuple[Tensor]:
        return (self.linear(frames).log_softmax(-1),)


class _PredictionStep(nn.Module):
    """A label (1,) and a state to the output (1, H) and the next state.

    The blank is the label before the first one. A search starts with a state of zeros, so the state of a
    stateless network is stored as its difference to the embedding of the blank.
    """

    def __init__(self, prediction: Prediction) -> None:
        super().__init__()
        self.prediction = prediction
        embedding = prediction.embedding
        table = embedding.weight.detach()
        if not prediction.starts_with_blank:
            table = torch.cat([table, torch.zeros_like(table[:1])])
        self.prediction.embedding = nn.Embedding(table.shape[0], table.shape[1], _weight=table)
        self.first = table[-1]

    def states(self) -> list[Tensor]:
        """Return the state before the first label."""
        if isinstance(self.prediction, StatelessPrediction):
            return [torch.zeros(1, self.prediction.context, len(self.first))]
        lstm: Any = self.prediction.rnn
        return list(lstm.zeros(self.first, 1))

    def forward(self, label: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        if isinstance(self.prediction, StatelessPrediction):
            output, next_state = self.prediction.step(label, state[0] + self.first)
            return output, next_state - self.first
        output, next_states = self.prediction.step(label, state)
        return output, *next_states


class _JointStep(nn.Module):
    """A frame (1, W) and an output of the prediction network to logits (1, V + durations)."""

    def __init__(self, joint: Joint) -> None:
        super().__init__()
        self.joint = joint

    def forward(self, frame: Tensor, prediction: Tensor) -> tuple[Tensor]:
        return (self.joint(self.joint.encoder(frame), self.joint.prediction(prediction)),)


class _LSTMOperators(nn.Module):
    """A ``nn.LSTM`` as operators of ONNX. torch would write the frames of the example one by one."""

    def __init__(self, lstm: nn.LSTM) -> None:
        super().__init__()
        self.hidden_size, self.num_layers, self.dropout = lstm.hidden_size, lstm.num_layers, 0.0
        self.weights = nn.ParameterList()
        for inputs, recurrent, input_bias, bias in lstm.all_weights:
            for weight in (inputs, recurrent):
                self.weights.append(self._in_onnx_order(weight)[None])
            biases = [self._in_onnx_order(input_bias), self._in_onnx_order(bias)]
            self.weights.append(torch.cat(biases)[None])

    def _in_onnx_order(self, weight: Tensor) -> Tensor:
        """Order the gates of a weight (4H, ·) as input, output, forget, candidate."""
        enter, forget, candidate, output = weight.detach().chunk(4)
        return torch.cat([enter, output, forget, candidate])

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Any]:
        hiddens, cells = [], []
        frames, rows, _ = x.shape
        if state is None:
            zeros = x.new_zeros(self.num_layers, rows, self.hidden_size)
            state = (zeros, zeros)
        state_size = (1, rows, self.hidden_size)
        for layer in range(self.num_layers):
            weights = [self.weights[3 * layer + index] for index in range(3)]
            start = [part[layer : layer + 1] for part in state]
            y, hidden, cell = torch.onnx.ops.symbolic_multi_out(
                "LSTM",
                [x, *weights, None, *start],
                {"hidden_size": self.hidden_size},
                dtypes=[torch.float32] * 3,
                shapes=[(frames, *state_size), state_size, state_size],
            )
            x = y[:, 0]
            hiddens.append(hidden)
            cells.append(cell)
        return x, (torch.cat(hiddens), torch.cat(cells))


def graphs_of(task: CTC | RNNT, policy: ComputePolicy | None = _POLICY) -> dict[str, Graph]:
    """Return the graphs by the names of their files. Without ``policy``, the policy of ``task`` stays.

    Raises ConfigError for a prediction network of another class than ours.
    """
    if isinstance(task, RNNT) and not isinstance(task.prediction, LSTMPrediction | StatelessPrediction):
        network = type(task.prediction).__name__
        raise ConfigError(f"ONNX cannot have {network}. Choose prediction=lstm or prediction=stateless")
    task = copy.deepcopy(task).eval()
    if policy is not None:
        apply_policy(task, policy)
    encoder = task.encoder
    samples = round(_EXAMPLE_SECONDS * encoder.sample_rate)
    audio = torch.randn(1, samples, generator=torch.Generator().manual_seed(0))
    outputs = ("frames", "lengths")
    graphs = {}
    if isinstance(encoder, LogMelEncoder):
        inputs = {"audio": audio, "offset": torch.zeros(1, dtype=torch.int64)}
        feature_outputs = ("features", "feature_lengths")
        features = Graph(_Features(encoder.features), inputs, feature_outputs, {"audio": (1,)})
        graphs["features"] = features
        encoder.features = _Identity()  # type: ignore[assignment]
        inputs = features.example_outputs()
        graphs["encoder"] = Graph(_Encoder(encoder), inputs, outputs, {"features": (1,)})
    else:
        graphs["encoder"] = Graph(_WaveformEncoder(encoder), {"audio": audio}, outputs, {"audio": (1,)})
    frames = graphs["encoder"].example_outputs()["frames"]
    head = task.output if isinstance(task, CTC) else task.ctc
    if head is not None:
        graphs["ctc"] = Graph(_CTCHead(head), {"frames": frames}, ("scores",), {"frames": (1,)})
    if isinstance(task, RNNT):
        step = _PredictionStep(task.prediction)
        inputs = {"label": torch.zeros(1, dtype=torch.int64)}
        for index, state in enumerate(step.states()):
            inputs[f"state{index}"] = state
        next_states = [f"next_{name}" for name in inputs if name != "label"]
        prediction = Graph(step, inputs, ("prediction", *next_states), key="prediction")
        output = prediction.example_outputs()["prediction"]
        inputs = {"frame": frames[:, 0], "prediction": output}
        graphs["prediction"] = prediction
        graphs["joint"] = Graph(_JointStep(task.joint), inputs, ("scores",), key="model.joint")
    return graphs


def write_graph(graph: Graph, path: Path) -> None:
    """Write a graph as a file of ONNX. Raises ConfigError if torch cannot."""
    from onnxscript import optimizer

    for module in graph.module.modules():
        if isinstance(module, LSTM):
            module.lstm = _LSTMOperators(module.lstm)  # type: ignore[assignment]
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # The logger warns of packages that are not needed.
            logging.getLogger("torch.onnx").setLevel(logging.ERROR)
            program = _onnx_program(graph)
    except Exception as error:  # torch raises errors of many types for a module that it cannot export.
        reason = one_line(str(error), 200)
        raise ConfigError(f"{graph.key}: torch cannot write it as ONNX ({reason}). Choose another") from None
    # The rules that optimize=True adds remove additions of constants up to 1e-8, such as features.log_floor.
    optimizer.inline(program.model)
    # The distances of a stream do not change, so their keys are computed here.
    optimizer.fold_constants(program.model, input_size_limit=_FOLDED, output_size_limit=_FOLDED)
    optimizer.remove_unused_nodes(program.model)
    program.model.metadata_props.update(graph.metadata)
    program.save(path)


def _onnx_program(graph: Graph) -> torch.onnx.ONNXProgram:
    shapes: list[dict[int, Any]] = []
    for name in graph.inputs:
        shapes.append(dict.fromkeys(graph.free_axes.get(name, ()), torch.export.Dim.DYNAMIC))
    dynamic_shapes: tuple[Any, ...] = tuple(shapes)
    if "label" in graph.inputs:  # The states of a prediction network are one argument of its forward.
        dynamic_shapes = (shapes[0], tuple(shapes[1:]))
    program = torch.export.export(
        graph.module,
        tuple(graph.inputs.values()),
        dynamic_shapes=dynamic_shapes,
        strict=False,
    )
    onnx_program = torch.onnx.export(
        program,
        (),
        input_names=list(graph.inputs),
        output_names=list(graph.outputs),
        dynamo=True,
        verbose=False,
        optimize=False,
    )
    assert onnx_program is not None
    return onnx_program
