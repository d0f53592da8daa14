"""The content of model.json: what ``recognise.py`` needs to know of a model beside its graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speechtrain.export.graphs import Graph
from speechtrain.inference.loaded_run import LoadedRun

_FEATURE_SETTINGS = (
    *("form", "n_fft", "mels", "f_min", "f_max", "preemphasis", "dither", "padding", "log_floor"),
    *("normalise", "splice", "splice_first", "trim_silence_db"),
)
"""The arguments of ``LogMel`` that model.json contains."""


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
    log_mel = getattr(task.encoder, "features", None)
    if log_mel is None:  # The encoder reads the waveform.
        features = {"normalise_audio": task.encoder.normalise_audio}
    else:
        features = {name: getattr(log_mel, name) for name in _FEATURE_SETTINGS}
        features |= {"window_samples": log_mel.width, "hop_samples": log_mel.hop}
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
        "max_symbols": None if kind == "ctc" else task.decoder.max_symbols,
        "features": features,
    }
