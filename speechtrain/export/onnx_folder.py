"""Writes the folder of ``--to onnx``: graphs in fp32 and int8, model.json, error_rates.json and recognise.py.

The export is checked on the run's held-out recordings before the folder is written.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from speechtrain.data import voice_activity
from speechtrain.decoding.greedy import Greedy
from speechtrain.errors import ConfigError
from speechtrain.export import held_out
from speechtrain.export.graphs import Graph, graphs_of, write_graph
from speechtrain.export.greedy_search import open_sessions
from speechtrain.export.held_out import PRECISIONS
from speechtrain.export.model_json import settings
from speechtrain.export.recognise import open_export, transcribe
from speechtrain.export.recognise_stream import texts_of
from speechtrain.export.streaming_graphs import stream_settings, streaming_graphs
from speechtrain.files import sha256, write_json
from speechtrain.inference.loaded_run import LoadedRun
from speechtrain.models.ctc import CTC
from speechtrain.models.rnnt import RNNT
from speechtrain.nn.conformer import Context
from speechtrain.run_directory import provenance

_PIECE_SAMPLES = 1000  # of a recording in the check of a stream


def write(loaded: LoadedRun, folder: Path, has_features: bool) -> list[str]:
    """Write the export of a run into the empty ``folder``. Return lines for the user.

    With ``has_features``, the graph of the encoder reads the waveform. Otherwise the features have a graph of
    their own. Raises DataError if the texts in fp32 differ from PyTorch's texts, ConfigError for a model
    that has no form in ONNX, and MachineError without the packages.
    """
    task = greedy_task(loaded, "--to onnx")
    graphs = graphs_of(task)
    write_graphs(graphs, folder)
    if has_features and "features" in graphs:
        _merge_features(folder)
    content = settings(loaded, graphs) | {"sha256": digests(folder)}
    write_json(folder / "model.json", content | provenance(loaded.opened.run.run_dir))
    copy_programs(folder, "recognise.py", "recording.py", "greedy_search.py", voice_activity.__file__)
    text_of = partial(held_out.text_of, loaded)
    return held_out.write_check(loaded, folder, text_of, open_export, transcribe)


def write_stream(loaded: LoadedRun, folder: Path, context: Context) -> list[str]:
    """Write the export of a causal run, which recognises a stream with ``context``. ``write`` has the rest.

    The features have a graph of their own, because only some of them are new when a chunk arrives.
    """
    task = greedy_task(loaded, "--to onnx")
    graphs = streaming_graphs(task, context)
    write_graphs(graphs, folder)
    content = settings(loaded, graphs) | {"stream": stream_settings(task, graphs["encoder"], context)}
    content |= {"sha256": digests(folder)} | provenance(loaded.opened.run.run_dir)
    write_json(folder / "model.json", content)
    copy_programs(folder, "recognise_stream.py", "greedy_search.py")
    text_of = partial(held_out.text_in_context, loaded, context)
    return held_out.write_check(loaded, folder, text_of, open_sessions, _streamed_text)


def _streamed_text(model: Any, sessions: Any, samples: np.ndarray) -> str:
    """Return the text of a recording that arrives in pieces."""
    model["stream"]["endpoint_seconds"] = None  # A recording is one text.
    pieces = np.array_split(samples, math.ceil(len(samples) / _PIECE_SAMPLES))
    *_, (text, _) = texts_of(model, sessions, pieces)  # type: ignore[no-untyped-call]
    return str(text)


def copy_programs(folder: Path, program: str, *modules: str) -> None:
    """Copy a program of this package as recognise.py into ``folder``, and its modules."""
    here = Path(__file__).parent
    shutil.copy(here / program, folder / "recognise.py")
    for module in modules:
        shutil.copy(here / module, folder)


def greedy_task(loaded: LoadedRun, option: str) -> Any:
    """Return the model of the run with a greedy decoder.

    Raises ConfigError if the run has no recording for the check, or no model with a search.
    """
    task: Any = loaded.opened.task
    if not isinstance(task, CTC | RNNT):
        name = type(task).__name__
        raise ConfigError(f"{option} writes model=ctc and model=rnnt, and the model of the run is {name}")
    if next(held_out.utterances(loaded), None) is None:
        raise ConfigError(
            f"{option} needs recordings for its check. Set data.valid or data.hold_out in a run"
        )
    if not isinstance(task.decoder, Greedy):
        task.decoder = Greedy()
    return task


def write_graphs(graphs: Mapping[str, Graph], folder: Path) -> None:
    """Write each graph in fp32, and with weights of 8 bits. Raises ConfigError if torch cannot write it.

    The features have no weights that are learnt, so they stay in fp32.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    for name, graph in graphs.items():
        source, target = folder / f"{name}.fp32.onnx", folder / f"{name}.int8.onnx"
        write_graph(graph, source)
        if name == "features":
            shutil.copy(source, target)
            continue
        level = logging.root.level
        logging.root.setLevel(logging.ERROR)  # The library recommends a step that changes nothing here.
        try:
            quantize_dynamic(
                source,
                target,
                op_types_to_quantize=["MatMul", "Gemm", "LSTM"],
                nodes_to_exclude=_products_with_tensors(source),
                weight_type=QuantType.QInt8,
                per_channel=True,
            )
        finally:
            logging.root.setLevel(level)


def _products_with_tensors(file: Path) -> list[str]:
    """Return the products of a graph with a constant of more than two axes, which has no form of 8 bits."""
    import onnx

    graph = onnx.load(file).graph
    tensors = {constant.name for constant in graph.initializer if len(constant.dims) > 2}
    return [node.name for node in graph.node if node.op_type == "MatMul" and tensors & set(node.input)]


def _merge_features(folder: Path) -> None:
    """Put the graph of the features into the graph of the encoder, for each precision."""
    import onnx

    for precision in PRECISIONS:
        features_file = folder / f"features.{precision}.onnx"
        encoder_file = folder / f"encoder.{precision}.onnx"
        features = onnx.compose.add_prefix(
            onnx.load(features_file), "features/", rename_inputs=False, rename_outputs=False
        )
        encoder = onnx.load(encoder_file)
        features.ir_version = encoder.ir_version
        connections = [(output.name, output.name) for output in features.graph.output]
        onnx.save(onnx.compose.merge_models(features, encoder, connections), encoder_file)
        features_file.unlink()


def digests(folder: Path) -> dict[str, dict[str, str]]:
    """Return the SHA-256 of each graph in ``folder``, by precision and name."""
    sums: dict[str, dict[str, str]] = {}
    for precision in PRECISIONS:
        sums[precision] = {}
        for path in sorted(folder.glob(f"*.{precision}.onnx")):
            sums[precision][path.name.partition(".")[0]] = sha256(path)
    return sums
