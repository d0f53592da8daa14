"""Writes the folder of ``--to sherpa`` for a causal run: an online transducer in the layout of NeMo's models.

sherpa-onnx takes the caches of the encoder for tensors that are 0 at first and come back. NeMo stores the
inputs of attention in them, and log-mel frames before a chunk belong to its input. Here the keys and values
are stored, which saves their computation in each chunk. The inputs of all causal convolutions are stored,
too, so the first frames are exact, and the input is the chunk alone.

Legend: B rows, T log-mel frames of a chunk, F features, C frames of a chunk, W encoder width.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from speechtrain.errors import ConfigError
from speechtrain.export import held_out
from speechtrain.export.graphs import Graph
from speechtrain.export.onnx_folder import greedy_task
from speechtrain.export.recognise_sherpa import decode, open_recogniser
from speechtrain.export.sherpa_folder import (
    require_fit,
    sherpa_features,
    transducer_metadata,
    transducer_parts,
    write_model,
)
from speechtrain.export.streaming_graphs import CACHES, streaming_graphs
from speechtrain.inference.loaded_run import LoadedRun
from speechtrain.nn.conformer import Context

_ONLINE_FEATURES = {"sample_rate": 16000, "form": "kaldi_online", "log_floor": 2.0**-23}
"""The arguments of LogMel in which sherpa-onnx's features of a stream differ from those for CTC.

The upper edge of its bands is 8000 Hz for every sample rate. Source: ``features.cc`` and
``online-recognizer-transducer-nemo-impl.h``, and the features of 2.0.1.
"""


class _OnlineEncoder(nn.Module):
    """Log-mel columns (B, F, T) and the other inputs of ``StreamingEncoder`` to its outputs.

    The frames are (B, W, C). The columns are normalised here, because sherpa-onnx has no constants for it.
    """

    def __init__(self, log_mel: nn.Module, step: nn.Module) -> None:
        super().__init__()
        self.log_mel: Any = log_mel
        self.step = step

    def forward(
        self, columns: Tensor, length: Tensor, attention: Tensor, convolutions: Tensor, arrived: Tensor
    ) -> tuple[Tensor, ...]:
        features = self.log_mel.normalised_columns(columns.transpose(1, 2))
        frames, *others = self.step(features, length, attention, convolutions, arrived)
        return frames.transpose(1, 2), *others


def write(loaded: LoadedRun, folder: Path, context: Context) -> list[str]:
    """Write the export of a causal run into the empty ``folder``. Return lines for the user.

    Raises ConfigError for a model that sherpa-onnx cannot run, and DataError if the texts in fp32 differ from
    PyTorch's texts.
    """
    task = greedy_task(loaded, "--to sherpa")
    if not hasattr(task, "joint") or task.joint.durations:
        raise ConfigError(
            "--to sherpa writes a stream of model=rnnt with model.joint.durations=[]. Train such a run, or "
            "use --to onnx"
        )
    features = sherpa_features(16000, has_joint=False) | _ONLINE_FEATURES
    del features["normalise"]  # of whole recordings
    require_fit(task, features)
    # sherpa-onnx computes a chunk when one more log-mel frame has arrived.
    silence = (context[1] * task.encoder.factor + 1) * task.encoder.features.hop
    settings = {"stream": {"context": list(context), "silence_samples": silence}}
    write_model(loaded, folder, online_graphs(task, context), settings)
    text_of = partial(_text_before_silence, loaded, context, silence)
    return held_out.write_check(loaded, folder, text_of, open_recogniser, decode)


def _text_before_silence(loaded: LoadedRun, context: Context, silence: int, samples: np.ndarray) -> str:
    """Return PyTorch's text of samples (S,) and ``silence`` in the chunks that sherpa-onnx computes."""
    encoder: Any = loaded.opened.task.encoder
    chunk = context[1]
    samples = np.pad(samples, (0, silence))
    chunks = (encoder.features.frames(len(samples)) - 1) // (chunk * encoder.factor)
    return held_out.text_in_context(loaded, context, samples, most_frames=chunk * chunks)


def online_graphs(task: Any, context: Context) -> dict[str, Graph]:
    """Return the graphs with the inputs, outputs and metadata of an online transducer."""
    graphs = streaming_graphs(task, context)
    step: Any = graphs["encoder"].module
    parts = transducer_parts(graphs)
    # An example of two rows, because torch takes an axis of size 1 for a constant.
    features, *others = step.first_inputs(rows=2).values()
    inputs = {"audio_signal": features.transpose(1, 2)}
    inputs |= dict(zip(("length", *CACHES), others, strict=True))
    chunk_features = step.chunk_features
    metadata = {
        "normalize_type": "NA",
        "window_size": chunk_features,
        "chunk_shift": chunk_features,
        "chunk_size_ms": round(1000 * chunk_features * task.encoder.features.frame_seconds),
        **transducer_metadata(task, parts["decoder"]),
    }
    for name in CACHES[:2]:
        for axis, size in enumerate(inputs[name].shape[1:], 1):
            metadata[f"{name}_dim{axis}"] = size
    encoder = Graph(
        _OnlineEncoder(task.encoder.features, step),
        inputs,
        ("outputs", "encoded_lengths", *(f"{name}_next" for name in CACHES)),
        dict.fromkeys(inputs, (0,)),
        {key: str(value) for key, value in metadata.items()},
    )
    return {"encoder": encoder, **parts}
