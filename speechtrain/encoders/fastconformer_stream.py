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
        self.inputs = torch.cat([self.inputs, x], dim=1)
        outputs = (self.inputs.shape[1] - 1) // 2
        read = self.inputs[:, : 2 * outputs + 1]
        self.inputs = self.inputs[:, 2 * outputs :].clone()
        if not outputs:
            bins = self.convolution.halved(x.shape[3])
            return x.new_zeros(len(x), 0, self.convolution.out_channels, bins)
        return self.convolved(read)

    def finish(self) -> Tensor:
        """Return the last output, which reads a zero after the last of an even number of inputs.

        Two of their values are stored, and one of an odd number of inputs.
        """
        rows, stored, channels, bins = self.inputs.shape
        return self.step(self.inputs.new_zeros(rows, stored - 1, channels, bins))

    def convolved(self, x: Tensor) -> Tensor:
        """Return the outputs (B, T, ·, ·) of the layers for inputs (B, 2 · T + 1, C, M)."""
        convolution: Any = self.convolution
        x = F.pad(x.transpose(1, 2), (2, 1))  # the bins
        y = F.conv2d(x, convolution.weight, convolution.bias, stride=2, groups=convolution.groups)
        for layer in self.following:
            y = layer(y)
        return y.transpose(1, 2)


class LayerStream:
    """A Conformer layer whose attention and convolution are limited to ``context``.

    Frames wait until all that their chunk reads have arrived, because each step of a layer costs time. So a
    stream of L layers reads L · right frames beyond the end of a chunk.
    """

    def __init__(self, layer: nn.Module, context: Context, rows: int) -> None:
        assert isinstance(layer, ConformerLayer)
        self.layer, self.context = layer, context
        weight = layer.norm_out.weight
        width, heads = len(weight), layer.self_attn.heads
        self.waiting = weight.new_zeros(rows, 0, width)  # (B, T, D). The first one begins a chunk.
        # (B, T, 2, H, ·): the keys and values of the last ``left`` frames before ``waiting``
        self.keys_values = weight.new_zeros(rows, 0, 2, heads, width // heads)
        self.gated = weight.new_zeros(rows, layer.conv.history, width)  # the convolution's last inputs

    def step(self, x: Tensor) -> Tensor:
        """Append frames (B, T, D) and return the frames (B, T', D) of all chunks that are now complete."""
        self.waiting = torch.cat([self.waiting, x], dim=1)
        _, chunk, right = self.context
        complete_chunks = max(0, self.waiting.shape[1] - right) // chunk
        return self._compute(complete_chunks * chunk)

    def finish(self) -> Tensor:
        return self._compute(self.waiting.shape[1])

    def _compute(self, count: int) -> Tensor:
        """Return the output for the first ``count`` waiting frames, and store what later frames read.

        The copies free the memory of the dropped frames. The keys of the ``right`` frames after a chunk are
        computed again with these frames.
        """
        if not count:
            return self.waiting[:, :0]
        left, chunk, right = self.context
        x = self.waiting[:, : count + right]
        self.waiting = self.waiting[:, count:].clone()
        stored = self.keys_values.shape[1]
        query_frames = torch.arange(count, device=x.device)
        key_frames = torch.arange(-stored, x.shape[1], device=x.device)
        mask = as_mask(in_context(query_frames, key_frames, self.context))
        y, keys_values, gated = self.layer.step(x, self.keys_values, self.gated, mask, count, chunk)
        end = stored + count
        self.keys_values = keys_values[:, max(0, end - left) : end].clone()
        self.gated = gated[:, count:].clone()
        return y
