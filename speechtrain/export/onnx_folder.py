"""Writes the folder of ``--to onnx``: graphs in fp32 and int8, model.json, error_rates.json and recognise.py.

The export is checked on the run's held-out recordings before the folder is written.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from speechtrain.data import voice_activity
from speechtrain.decoding.greedy import Greedy
from speechtrain.errors import ConfigError
from speechtrain.export import held_out
from speechtrain.export.graphs import Graph, graphs_of, write_graph
from speechtrain.export.model_json import settings
from speechtrain.export.recognise import open_export, transcribe
from speechtrain.files import sha256, write_json
from speechtrain.inference.loaded_run import LoadedRun
from speechtrain.models.ctc import CTC
from speechtrain.models.rnnt import RNNT
from speechtrain.run_directory import provenance

PRECISIONS = ("fp32", "int8")


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
    copy_programs(folder, "recognise.py")
    exports = {}
    for precision in PRECISIONS:
        model, sessions = open_export(folder, precision)  # type: ignore[no-untyped-call]
        exports[precision] = partial(transcribe, model, sessions)
    result = held_out.check(loaded, exports)
    write_json(folder / "error_rates.json", result)
    return held_out.lines(result)


def copy_programs(folder: Path, recognise: str) -> None:
    """Copy the program ``recognise``, a file of this package, and its modules into ``folder``."""
    here = Path(__file__).parent
    shutil.copy(here / recognise, folder / "recognise.py")
    shutil.copy(here / "recording.py", folder)
    shutil.copy(voice_activity.__file__, folder)


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
                weight_type=QuantType.QInt8,
                per_channel=True,
            )
        finally:
            logging.root.setLevel(level)


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
