"""The stages of a causal FastConformer's stream: subsampling, then one stage for each layer.

Legend: B rows, T frames, M mel bins, C channels, D width, H heads, k kernel taps.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speechtrain.encoders.stream import FrameStream
from speechtrain.nn.conformer import (
    ConformerLayer,
    Context,
    Halving,
    Subsampling,
    as_mask,
    embedded_distances,
    in_context,
)


class SubsamplingStream:
    """Subsamples the log-mel frames of ``rows`` recordings, and multiplies the result by ``scale``."""

    def __init__(self, subsampling: Subsampling, scale: float, rows: int) -> None:
        self.linear, self.scale = subsampling.linear, scale
        halvings = list[HalvingStream]()
        bins = subsampling.mels
        for layer in subsampling.layers:
            if isinstance(layer, Halving):
                halvings.append(HalvingStream(layer, rows, bins))
                bins = layer.halved(bins)
            else:
                halvings[-1].following.append(layer)
        self.halvings = FrameStream(*halvings)

    def step(self, x: Tensor) -> Tensor:
        """Map log-mel frames (B, T, M) to the new subsampled frames (B, T', D)."""
        return self.project(self.halvings.step(x[..., None, :]))

    def finish(self) -> Tensor:
        return self.project(self.halvings.finish())

    def project(self, x: Tensor) -> Tensor:
        """Map the convolutions' outputs (B, T, C, M') to frames (B, T, D)."""
        y: Tensor = self.linear(x.flatten(2)) * self.scale
        return y


class HalvingStream:
    """A causal halving convolution of frames (B, T, C, M), and the layers ``following`` it.

    The stored inputs begin with two zeros. Output j reads the inputs 2j − 2 to 2j.
    """

    def __init__(self, convolution: Halving, rows: int, bins: int) -> None:
        self.convolution, self.following = convolution, list[nn.Module]()
        weight = convolution.weight
        channels = convolution.in_channels
        self.inputs = weight.new_zeros(rows, 2, channels, bins)  # the inputs that later outputs read

    def step(self, x: Tensor) -> Tensor:
        self.inputs = torch.cat([self.inputs, x.to(self.inputs.dtype)], dim=1)
        outputs = max(0, (self.inputs.shape[1] - 1) // 2)
        read = self.inputs[:, : 2 * outputs + 1]
        self.inputs = self.inputs[:, 2 * outputs :].clone()
        if not outputs:
            bins = self.convolution.halved(x.shape[3])
            return x.new_zeros(len(x), 0, self.convolution.out_channels, bins)
        return self.convolved(read)

    def finish(self) -> Tensor:
        """Return the last output, which reads a zero after the last of an even number of inputs."""
        rows, stored, channels, bins = self.inputs.shape
        is_even = stored == 2
        return self.step(self.inputs.new_zeros(rows, int(is_even), channels, bins))

    def convolved(self, x: Tensor) -> Tensor:
        """Return the outputs (B, T, ·, ·) of the layers for inputs (B, 2 · T + 1, C, M)."""
        convolution: Any = self.convolution
        x = F.pad(x.transpose(1, 2), (2, 1))  # the bins
        y = F.conv2d(x, convolution.weight, convolution.bias, stride=2, groups=convolution.groups)
        for layer in self.following:
            y = layer(y)
        return y.transpose(1, 2)


class ChunkStream:
    """Keeps frames (B, T, D) until the layers can compute a chunk. Each step of a layer costs time."""

    def __init__(self, context: Context, no_frames: Tensor) -> None:
        self.context = context
        self.frames = no_frames  # (B, T, D) the frames that have not left
        self.departed = 0

    def step(self, x: Tensor) -> Tensor:
        self.frames = torch.cat([self.frames, x], dim=1)
        _, chunk, right = self.context
        received = self.departed + self.frames.shape[1]
        needed = max(0, received - right) // chunk * chunk + right
        return self._depart(max(0, needed - self.departed))

    def finish(self) -> Tensor:
        return self._depart(self.frames.shape[1])

    def _depart(self, count: int) -> Tensor:
        departing = self.frames[:, :count]
        self.frames = self.frames[:, count:].clone()
        self.departed += departing.shape[1]
        return departing


class LayerStream:
    """A Conformer layer whose attention and convolution are limited to ``context``.

    A chunk is computed when the ``right`` frames after it have arrived. So a stream of L layers reads
    L · right frames beyond the end of a chunk.
    """

    def __init__(self, layer: nn.Module, context: Context, rows: int) -> None:
        assert isinstance(layer, ConformerLayer)
        self.layer, self.context = layer, context
        self.received = 0  # frames that have arrived
        self.computed = 0  # frames that have left
        self.first_key = 0  # the frame of the first stored key
        weight = layer.norm_out.weight
        width, heads = len(weight), layer.self_attn.heads
        empty = weight.new_zeros(rows, 0, heads, width // heads)
        self.waiting = weight.new_zeros(rows, 0, width)  # (B, T, D) the frames that have not left
        self.queries, self.keys, self.values = empty, empty, empty
        convolution: Any = layer.conv
        self.convolution = convolution
        self.gated = weight.new_zeros(rows, convolution.history, width)  # the convolution's last inputs

    def step(self, x: Tensor) -> Tensor:
        """Append frames (B, T, D) and return the frames (B, T', D) of all chunks that are now complete."""
        if not x.shape[1]:
            return x
        x = self.layer.before_attention(x)
        queries, keys, values = self.layer.self_attn.project(self.layer.norm_self_att(x))
        self.waiting = torch.cat([self.waiting, x], dim=1)
        self.queries = torch.cat([self.queries, queries], dim=1)
        self.keys = torch.cat([self.keys, keys], dim=1)
        self.values = torch.cat([self.values, values], dim=1)
        self.received += x.shape[1]
        _, chunk, right = self.context
        complete = max(0, self.received - right) // chunk * chunk
        return self._compute(max(complete, self.computed))

    def finish(self) -> Tensor:
        return self._compute(self.received)

    def _compute(self, end: int) -> Tensor:
        """Return the frames from the first one that has not left to before frame ``end``."""
        count = end - self.computed
        if not count:
            return self.waiting[:, :0]
        x = self.waiting[:, :count]
        device = x.device
        query_frames = torch.arange(self.computed, end, device=device)
        key_frames = torch.arange(self.first_key, self.received, device=device)
        mask = as_mask(in_context(query_frames, key_frames, self.context))
        distances = embedded_distances(end - 1 - self.first_key, self.computed - self.received + 1, x)
        queries = self.queries[:, :count]
        x = x + self.layer.self_attn.attend(queries, self.keys, self.values, distances, mask)
        self._drop(count)
        inputs = torch.cat([self.gated, self.convolution.gated(self.layer.norm_conv(x))], dim=1)
        self.gated = inputs[:, count:].clone()
        return self.layer.after_convolution(x + self.convolution.convolved(inputs, self.context[1]))

    def _drop(self, count: int) -> None:
        """Drop the first ``count`` waiting frames, and the keys that no later chunk reads.

        The copies free the memory of the dropped frames.
        """
        self.computed += count
        self.waiting = self.waiting[:, count:].clone()
        self.queries = self.queries[:, count:].clone()
        first_key = max(self.first_key, self.computed - self.context[0])
        dropped_keys = first_key - self.first_key
        self.keys = self.keys[:, dropped_keys:].clone()
        self.values = self.values[:, dropped_keys:].clone()
        self.first_key = first_key
