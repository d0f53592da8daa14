"""Writes the folder of ``--to onnx``: graphs in fp32 and int8, model.json, error_rates.json and recognise.py.

The export is checked on the run's held-out recordings before the folder is written.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speechtrain.decoding.greedy import Greedy
from speechtrain.errors import MachineError
from speechtrain.export.graphs import Graph, graphs_of, write_graph
from speechtrain.files import sha256, write_json
from speechtrain.inference.loaded_run import LoadedRun
from speechtrain.text.vocabulary import Characters

PRECISIONS = ("fp32", "int8")


def write(loaded: LoadedRun, folder: Path, has_features: bool) -> list[str]:
    """Write the export of a run into the empty ``folder``. Return lines for the user.

    With ``has_features``, the graph of the encoder reads the waveform. Otherwise the features have a graph of
    their own. Raises DataError if a text in fp32 differs from PyTorch's text, ConfigError for a model
    that has no form in ONNX, and MachineError without the packages.
    """
    task: Any = loaded.opened.task
    if not isinstance(getattr(task, "decoder", None), Greedy):
        task.decoder = Greedy()
    _require_packages()
    from speechtrain.export import held_out

    graphs = graphs_of(task)
    for name, graph in graphs.items():
        write_graph(graph, folder / f"{name}.fp32.onnx")
    _quantise(graphs, folder)
    if has_features and "features" in graphs:
        _merge_features(folder)
    write_json(folder / "model.json", _settings(task, graphs, folder))
    shutil.copy(Path(__file__).with_name("recognise.py"), folder / "recognise.py")
    result = held_out.check(loaded, folder, PRECISIONS)
    write_json(folder / "error_rates.json", result)
    return held_out.lines(result)


def _require_packages() -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
    except ImportError as error:
        raise MachineError(f"--to onnx: {error}. Install it: pip install -e '.[export]'") from None


def _quantise(graphs: Mapping[str, Graph], folder: Path) -> None:
    """Write each graph with weights of 8 bits. The features stay in fp32, because they are not learnt."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    for name in graphs:
        source, target = folder / f"{name}.fp32.onnx", folder / f"{name}.int8.onnx"
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
        names = [(name, name) for name in (value.name for value in features.graph.output)]
        onnx.save(onnx.compose.merge_models(features, encoder, names), encoder_file)
        features_file.unlink()


def _settings(task: Any, graphs: Mapping[str, Graph], folder: Path) -> dict[str, Any]:
    """Return the content of model.json."""
    durations = list(task.joint.durations) if "joint" in graphs else []
    kind = "ctc"
    if "joint" in graphs:
        kind = "tdt" if durations else "rnnt"
    states = {}
    if "prediction" in graphs:
        inputs = graphs["prediction"].inputs
        states = {name: list(state.shape) for name, state in inputs.items() if name != "label"}
    digests: dict[str, dict[str, str]] = {}
    for precision in PRECISIONS:
        digests[precision] = {}
        for path in sorted(folder.glob(f"*.{precision}.onnx")):
            name = path.name.partition(".")[0]
            digests[precision][name] = sha256(path)
    return {
        "kind": kind,
        "sample_rate": task.sample_rate,
        "frame_seconds": task.frame_seconds,
        "labels": task.tokenizer.spelling(),
        "blank": task.tokenizer.blank,
        "strip": not isinstance(task.tokenizer, Characters),
        "durations": durations,
        "states": states,
        "max_symbols_per_step": task.decoder.max_symbols_per_step,
        "max_symbols": task.decoder.max_symbols,
        "features": _features(task.encoder),
        "sha256": digests,
    }


def _features(encoder: Any) -> dict[str, Any]:
    """Return the parameters of the features, or nothing for an encoder that reads the waveform."""
    features = getattr(encoder, "features", None)
    if features is None:
        return {"normalise_audio": encoder.normalise_audio}
    names: tuple[str, ...] = (
        "form",
        "n_fft",
        "mels",
        "f_min",
        "f_max",
        "preemphasis",
        "dither",
        "padding",
        "log_floor",
    )
    names += ("normalise", "splice", "splice_first", "trim_silence_db")
    settings = {name: getattr(features, name) for name in names}
    return settings | {"window_samples": features.width, "hop_samples": features.hop}
