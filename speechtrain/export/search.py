"""The search of ``recognise.py`` with a record of its decisions, in ONNX Runtime or in PyTorch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from speechtrain.export.graphs import Graph, graphs_of
from speechtrain.export.recognise import transcribe
from speechtrain.inference.loaded_run import LoadedRun


class _TorchSession:
    """A module of PyTorch with the methods of a session of ONNX Runtime."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def get_inputs(self) -> list[Any]:
        return [SimpleNamespace(name=name) for name in self._graph.inputs]

    def get_outputs(self) -> list[Any]:
        return [SimpleNamespace(name=name) for name in self._graph.outputs]

    def run(self, names: None, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        tensors = [torch.from_numpy(inputs[name]) for name in self._graph.inputs]
        with torch.no_grad():
            return [output.numpy() for output in self._graph.module(*tensors)]


class _Recorder:
    """A session that records its decisions: a decision for each row of scores (N, ``classes`` + durations).

    ``choices`` has the index of the best class and, with durations, of the best duration of each decision.
    ``margins`` has the differences between the best and the second best score. Both have one or two columns.
    """

    def __init__(self, session: Any, classes: int) -> None:
        self._session, self._classes = session, classes
        self.get_inputs, self.get_outputs = session.get_inputs, session.get_outputs
        self.choices, self.margins = list[np.ndarray](), list[np.ndarray]()

    def run(self, names: None, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        outputs: list[np.ndarray] = self._session.run(names, inputs)
        scores = outputs[-1].reshape(-1, outputs[-1].shape[-1])
        choices, margins = [], []
        for part in (scores[:, : self._classes], scores[:, self._classes :]):  # symbols, then durations
            if part.shape[1] > 1:
                second_best, best = np.partition(part, -2, axis=1)[:, -2:].T
                choices.append(part.argmax(1))
                margins.append(best - second_best)
        self.choices += list(np.stack(choices, 1))
        self.margins += list(np.stack(margins, 1))
        return outputs


class Search:
    """The search of ``recognise.py`` with the content of model.json and the sessions of the graphs."""

    def __init__(self, model: Mapping[str, Any], sessions: dict[str, Any]) -> None:
        self.model, self._sessions = model, sessions
        self._head_name = "ctc" if model["kind"] == "ctc" else "joint"

    def text(self, samples: np.ndarray) -> str:
        """Return the text of samples (S,), whose decisions are recorded in place of the previous ones."""
        self.decisions = _Recorder(self._sessions[self._head_name], self.model["blank"] + 1)
        sessions = self._sessions | {self._head_name: self.decisions}
        return str(transcribe(self.model, sessions, samples))  # type: ignore[no-untyped-call]

    def margin(self, reference: Search, text: str) -> float:
        """Return the margin of ``reference`` at the first decision that differs, or inf without one."""
        pairs = zip(reference.decisions.choices, self.decisions.choices, strict=False)
        for margins, (choice, other_choice) in zip(reference.decisions.margins, pairs, strict=False):
            if (choice != other_choice).any():
                return float(margins[choice != other_choice][0])
        return math.inf

    def margin_before(self, text: str) -> float:
        """Return the smallest margin of the decisions from the last label in common to the first other label.

        ``text`` is the result of another search, whose decisions are not known.
        """
        model, common_text, last_label, smallest = self.model, "", self.model["blank"], math.inf
        for choice, margins in zip(self.decisions.choices, self.decisions.margins, strict=True):
            label = int(choice[0])
            smallest = min([smallest, *margins])
            is_new = label != model["blank"] and (model["kind"] != "ctc" or label != last_label)
            last_label = label
            if is_new:
                common_text += model["labels"][label]
                if not text.startswith(common_text.strip()):
                    break
                smallest = min([math.inf, *margins[1:]])  # A label in common may have another duration.
        return float(smallest)


def torch_search(loaded: LoadedRun) -> Search:
    """Return the search over the modules of a recogniser on the CPU, as it transcribes."""
    task: Any = loaded.opened.task
    graphs = graphs_of(task, policy=None)
    return Search(settings(loaded, graphs), {name: _TorchSession(graph) for name, graph in graphs.items()})


def settings(loaded: LoadedRun, graphs: Mapping[str, Graph]) -> dict[str, Any]:
    """Return the content of model.json without the digests."""
    task: Any = loaded.opened.task
    durations = list(task.joint.durations) if "joint" in graphs else []
    kind = "ctc"
    if "joint" in graphs:
        kind = "tdt" if durations else "rnnt"
    states = {}
    if "prediction" in graphs:
        inputs = graphs["prediction"].inputs
        states = {name: list(state.shape) for name, state in inputs.items() if name != "label"}
    return {
        "kind": kind,
        "sample_rate": task.sample_rate,
        "longest_pause": loaded.longest_pause,
        "frame_seconds": task.frame_seconds,
        "labels": task.tokenizer.spelling(),
        "blank": task.tokenizer.blank,
        "durations": durations,
        "states": states,
        "max_symbols_per_step": task.decoder.max_symbols_per_step,
        "max_symbols": task.decoder.max_symbols,
        "features": _features(task.encoder),
    }


_FEATURE_SETTINGS = (
    *("form", "n_fft", "mels", "f_min", "f_max", "preemphasis", "dither", "padding", "log_floor"),
    *("normalise", "splice", "splice_first", "trim_silence_db"),
)
"""The arguments of ``LogMel`` that model.json contains."""


def _features(encoder: Any) -> dict[str, Any]:
    """Return the parameters of the features, or nothing for an encoder that reads the waveform."""
    features = getattr(encoder, "features", None)
    if features is None:
        return {"normalise_audio": encoder.normalise_audio}
    settings = {name: getattr(features, name) for name in _FEATURE_SETTINGS}
    return settings | {"window_samples": features.width, "hop_samples": features.hop}
