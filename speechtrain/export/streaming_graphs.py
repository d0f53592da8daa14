"""The graph of one step of a causal FastConformer: the log-mel frames of a chunk to the encoder's frames.

The state of the stream is an input and an output, in three tensors with the names of NeMo's exports. All of
them are 0 before the first chunk, and no size depends on the recording.

Legend: B rows, T log-mel frames of a chunk, F features, C frames of a chunk, L layers, A frames of attention
before the chunk, D width, N values that the convolutions store.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from speechtrain.encoders.fastconformer import FastConformer
from speechtrain.encoders.fastconformer_stream import SubsamplingStream
from speechtrain.errors import ConfigError
from speechtrain.export.graphs import Graph, graphs_of
from speechtrain.nn.conformer import Context, as_mask

CACHES = ("cache_last_channel", "cache_last_time", "cache_last_channel_len")


class StreamingEncoder(nn.Module):
    """Maps the log-mel frames of a chunk to frames, and the state before the chunk to the state after it.

    The inputs are:

    - ``features`` (B, T, F)
    - ``length`` (B,): log-mel frames from the first one of the chunk to the end of the recording. It is T or
      more before the end, and 0 or less after it.
    - ``cache_last_channel`` (B, L, A, 2 · D): keys and values of the last A frames
    - ``cache_last_time`` (B, 1, 1, N): the inputs of the convolutions that later frames read
    - ``cache_last_channel_len`` (B,): the number of the A frames that have arrived

    The outputs are frames (B, C, D), the number of them (B,) that are in the recording, and the caches.

    Raises ConfigError for a context with frames after the chunk.
    """

    def __init__(self, encoder: FastConformer, context: Context) -> None:
        super().__init__()
        self.left, self.chunk, right = context
        if right:
            raise ConfigError(
                f"--context {self.left},{self.chunk},{right}: a graph reads no frame after the chunk. "
                f"Export --context {self.left},{self.chunk},0"
            )
        self.encoder = encoder
        self.chunk_features = self.chunk * encoder.factor  # T
        self.subsampling = SubsamplingStream(encoder.subsampling, encoder.scale, rows=1)
        halvings: Any = self.subsampling.halvings.stages
        layers: Any = encoder.layers
        self.halvings = halvings
        self.state_shapes = [halving.inputs.shape[1:] for halving in halvings]
        self.state_shapes += [torch.Size((layer.conv.history, encoder.width)) for layer in layers]
        self.state_sizes = [shape.numel() for shape in self.state_shapes]

    def first_inputs(self, rows: int) -> dict[str, Tensor]:
        """Return the inputs of the first step by their names, with features of 0."""
        encoder = self.encoder
        return {
            "features": torch.zeros(rows, self.chunk_features, encoder.subsampling.mels),
            "length": torch.full((rows,), self.chunk_features),
            "cache_last_channel": torch.zeros(rows, len(encoder.layers), self.left, 2 * encoder.width),
            "cache_last_time": torch.zeros(rows, 1, 1, sum(self.state_sizes)),
            "cache_last_channel_len": torch.zeros(rows, dtype=torch.int64),
        }

    def forward(
        self, features: Tensor, length: Tensor, attention: Tensor, convolutions: Tensor, arrived: Tensor
    ) -> tuple[Tensor, ...]:
        flat_states = torch.split(convolutions.flatten(1), self.state_sizes, dim=1)
        states = []
        for flat_state, shape in zip(flat_states, self.state_shapes, strict=True):
            states.append(flat_state.view(-1, *shape))
        halvings = len(self.halvings)
        next_states = []
        x = features[:, :, None]  # (B, T, channels, bins)
        for halving, stored in zip(self.halvings, states[:halvings], strict=True):
            inputs = torch.cat([stored, x], dim=1)
            next_states.append(inputs[:, -2:])
            x = halving.convolved(inputs[:, :-1])
            length = halving.convolution.halved(length)
            is_valid = torch.arange(x.shape[1]) < length[:, None]
            x = x * is_valid[:, :, None, None]
        x = self.subsampling.project(x)  # (B, C, D), and ``length`` (B,) frames are left of the recording
        key = torch.arange(self.left + self.chunk)
        is_allowed = (key >= self.left - arrived[:, None]) & (key < self.left + length[:, None])
        mask = as_mask(is_allowed[:, None, None])
        is_valid = is_allowed[:, self.left :, None].to(x.dtype)  # (B, C, 1)
        next_attention = []
        layers: Any = zip(self.encoder.layers, attention.unbind(1), states[halvings:], strict=True)
        for layer, stored, gated in layers:
            keys_values = torch.unflatten(stored, 2, (2, layer.self_attn.heads, -1))
            arguments = (keys_values, gated, mask, self.chunk, self.chunk, is_valid)
            x, keys_values, gated = layer.step(x, *arguments)
            next_attention.append(keys_values[:, self.chunk :].flatten(2))
            next_states.append(gated[:, self.chunk :])
        flat_states = tuple(state.flatten(1) for state in next_states)
        next_convolutions = torch.cat(flat_states, dim=1)[:, None, None]
        next_arrived = (arrived + self.chunk).clamp(max=self.left)
        count = length.clamp(0, self.chunk)
        return x, count, torch.stack(next_attention, dim=1), next_convolutions, next_arrived


def stream_context(task: Any, context: Context | None) -> Context | None:
    """Return the context of the stream that an export of ``task`` reads. None: it reads whole recordings.

    By default, it is the context of ``Encoder.stream``. Raises ConfigError for a context that cannot be used.
    """
    if context is None and not getattr(getattr(task, "encoder", None), "causal", False):
        return None
    layer: Any = task.encoder.stream(context).stages[-1]
    used_context: Context = layer.context
    return used_context


def streaming_graphs(task: Any, context: Context) -> dict[str, Graph]:
    """Return the graphs of ``graphs_of``, of which the encoder computes one step of a stream."""
    graphs = graphs_of(task)
    encoder: Any = graphs["encoder"].module
    step = StreamingEncoder(encoder.encoder, context)
    outputs = ("frames", "frame_count", *(f"next_{name}" for name in CACHES))
    graphs["encoder"] = Graph(step, step.first_inputs(rows=1), outputs)
    return graphs


def stream_settings(task: Any, encoder: Graph, context: Context) -> dict[str, Any]:
    """Return sizes in log-mel frames or samples, and the shapes of states, which a program needs.

    A program computes the features of a chunk from ``look_back_features`` frames before it, to
    ``look_ahead_samples`` after the first sample of the next chunk. So the ends of this audio, which the
    front end extends, change no frame of the chunk.
    """
    log_mel = task.encoder.features
    hop = log_mel.hop * log_mel.splice
    return {
        "context": list(context),
        "endpoint_seconds": task.decoder.endpoint_seconds,
        "chunk_features": encoder.inputs["features"].shape[1],
        "hop_samples": hop,
        "look_back_features": math.ceil((log_mel.width + 2) / hop),
        "look_ahead_samples": max(0, log_mel.width - log_mel.front_end.left - log_mel.hop),
        "states": {name: list(encoder.inputs[name].shape) for name in CACHES},
    }
