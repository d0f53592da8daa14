"""Convolutional feature extractor of wav2vec 2.0: raw audio to frames.

Legend: B rows, S samples, T frames, C channels, k kernel taps, s stride.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from speechtrain.compute_policy import ComputePolicy, PolicyAware
from speechtrain.errors import ConfigError
from speechtrain.nn.full_precision import at_least_fp32


class _ScaleGradient(Function):
    """Identity whose gradient is multiplied by a constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


class _StridedMatmul(Function):
    """Strided convolution of rows (B, T, C) by weights (out, k·C), as matmuls over strided views.

    Output frame t depends on k·C consecutive values of its row, which start at value t·s·C. A view with one
    line for each output frame would have overlapping lines if k is above s, and a matmul would copy it.
    Therefore the k taps are divided into ceil(k/s) blocks of at most s taps. The lines of one block do not
    overlap. Forward and both gradients need one matmul for each block of a row, without copies.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, kernel: int, stride: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.kernel, ctx.stride, ctx.has_bias = kernel, stride, bias is not None
        frames = (x.shape[1] - kernel) // stride + 1
        y = x.new_empty(x.shape[0], frames, weight.shape[0])
        for row, output in zip(x, y, strict=True):
            for columns, block in _blocks(row, frames, kernel, stride=stride):
                block_weight = weight[:, columns].t()
                is_first_block = columns.start == 0
                if not is_first_block:
                    output.addmm_(block, block_weight)
                elif bias is None:
                    torch.mm(block, block_weight, out=output)
                else:
                    torch.addmm(bias, block, block_weight, out=output)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        x_gradient = weight_gradient = None
        if ctx.needs_input_grad[0]:
            x_gradient = _StridedMatmul._input_gradient(ctx, gradient, weight, torch.empty_like(x))
        if ctx.needs_input_grad[1]:
            weight_gradient = torch.zeros_like(weight)
            for row, row_gradient in zip(x, gradient, strict=True):
                for columns, block in _blocks(row, gradient.shape[1], ctx.kernel, stride=ctx.stride):
                    weight_gradient[:, columns].addmm_(row_gradient.t(), block)
        bias_gradient = gradient.sum((0, 1)) if ctx.has_bias else None
        return x_gradient, weight_gradient, bias_gradient, None, None

    @staticmethod
    def _input_gradient(ctx: Any, gradient: Tensor, weight: Tensor, x_gradient: Tensor) -> Tensor:
        """Write the gradient of the input (B, T, C) into ``x_gradient`` and return it."""
        frames = gradient.shape[1]
        # If the kernel is at least the stride, the first blocks of all output frames together cover the first
        # input frames without gaps. They are written there, and only the other blocks are added.
        written_frames = frames * ctx.stride if ctx.kernel >= ctx.stride else 0
        x_gradient[:, written_frames:] = 0
        for row, row_gradient in zip(x_gradient, gradient, strict=True):
            for columns, block in _blocks(row, frames, ctx.kernel, stride=ctx.stride):
                is_first_block = columns.start == 0
                if written_frames and is_first_block:
                    torch.mm(row_gradient, weight[:, columns], out=block)
                else:
                    block.addmm_(row_gradient, weight[:, columns])
        return x_gradient


def _blocks(row: Tensor, frames: int, kernel: int, stride: int) -> list[tuple[slice, Tensor]]:
    """Return for each block of taps its columns of the weights (out, k·C), and its view of ``row`` (T, C).

    The view is (``frames``, columns). Its line t contains the values of the block for output frame t.
    """
    channels = row.shape[1]
    blocks = []
    for tap in range(0, kernel, stride):
        columns = slice(tap * channels, min(tap + stride, kernel) * channels)
        shape = (frames, columns.stop - columns.start)
        offset = row.storage_offset() + columns.start
        blocks.append((columns, row.as_strided(shape, (stride * channels, 1), offset)))
    return blocks


Convolution = Callable[[Tensor, Tensor, "Tensor | None", int], Tensor]
"""A function with the parameters and the result of ``conv1d``."""


def conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
    """Convolve (B, T, C) by (out, C, k) to (B, T', out) with torch's one-dimensional convolution."""
    return F.conv1d(x.transpose(1, 2), weight, bias, stride).transpose(1, 2)


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
    """Compute ``conv1d`` by a two-dimensional convolution of height 1, as in the Gaudi port."""
    image = x.transpose(1, 2)[:, :, None]
    return F.conv2d(image, weight[:, :, None], bias, (1, stride))[:, :, 0].transpose(1, 2)


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
    """Compute ``conv1d`` by matmuls over strided views. It has first derivatives only."""
    kernel = weight.shape[2]
    if x.shape[2] == 1:
        # For one channel, a copy of the frames costs less than several matmuls of few columns.
        frames = x[:, :, 0].unfold(1, kernel, stride).contiguous()
        return F.linear(frames, weight[:, 0], bias)
    flat_weight = weight.transpose(1, 2).flatten(1)  # (out, k·C), the order of a frame's values in memory
    y: Tensor = _StridedMatmul.apply(x.contiguous(), flat_weight, bias, kernel, stride)  # type: ignore[no-untyped-call]
    return y


CONVOLUTIONS: dict[str, Convolution] = {"conv1d": conv1d, "conv2d": conv2d, "matmul": matmul}


class _NormOverTime(Function):
    """Instance norm of rows (B, T, C) in this order of memory. Torch's own kernel would transpose them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        wide = at_least_fp32(x)
        variance, mean = torch.var_mean(wide, 1, keepdim=True, correction=0)
        inverse_deviation = (variance + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, inverse_deviation)
        scale = inverse_deviation * weight
        return torch.addcmul(bias - mean * scale, wide, scale).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse_deviation = ctx.saved_tensors
        gradient, wide = at_least_fp32(gradients[0]), at_least_fp32(x)
        scale = inverse_deviation * weight
        row_bias_gradient = gradient.sum(1, keepdim=True)
        weighted_sum = (gradient * wide).sum(1, keepdim=True)
        row_weight_gradient = (weighted_sum - mean * row_bias_gradient) * inverse_deviation
        # With n = (x − mean) · inverse_deviation and g the gradient of the output, the gradient of x is
        # scale · (g − mean(g) − n · mean(g · n)). row_weight_gradient is the sum of g · n over time, and
        # row_bias_gradient is the sum of g. In terms of g and x, this is scale · g + slope · x + shift.
        slope = -scale * inverse_deviation * row_weight_gradient / x.shape[1]
        shift = -scale * row_bias_gradient / x.shape[1] - slope * mean
        x_gradient = torch.addcmul(shift, gradient, scale).addcmul_(wide, slope).to(x.dtype)
        return x_gradient, row_weight_gradient.sum((0, 1)), row_bias_gradient.sum((0, 1)), None


class InstanceNorm(nn.GroupNorm, PolicyAware):
    """GroupNorm with one group for each channel, over the frames of a row (B, T, C), in fp32 or wider.

    It is computed as instance norm, which has the same formula: the biased variance, and one scale and shift
    for each channel. Instance norm is a single operation even on devices that decompose group norm.

    As in upstream, the statistics include the padding of a row.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels)
        self.apply_policy(ComputePolicy())

    def apply_policy(self, policy: ComputePolicy) -> None:
        # These convolutions write the order (B, T, C) of memory. The norm's output does not depend on it.
        self._is_time_major = policy.conv == "matmul"

    def forward(self, x: Tensor) -> Tensor:
        if self._is_time_major:
            y: Tensor = _NormOverTime.apply(x, self.weight, self.bias, self.eps)  # type: ignore[no-untyped-call]
            return y
        channel_major = at_least_fp32(x.transpose(1, 2))
        y = F.instance_norm(channel_major, weight=self.weight, bias=self.bias, eps=self.eps)
        return y.to(x.dtype).transpose(1, 2)


class LayerNorm(nn.LayerNorm):
    """LayerNorm whose output has the input's dtype. Every backend accumulates the statistics in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(x.dtype)


class ConvBlock(nn.Module, PolicyAware):
    """Convolution, then norm, then GELU: (B, T, C) to (B, T', out)."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int, bias: bool, norm: nn.Module
    ) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, kernel, stride, bias=bias)
        nn.init.kaiming_normal_(self.conv.weight)
        self.norm = norm
        self.stride = stride
        self.apply_policy(ComputePolicy())

    def apply_policy(self, policy: ComputePolicy) -> None:
        self._convolve, self._dtype = CONVOLUTIONS[policy.conv], policy.autocast_dtype

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.conv.weight, self.conv.bias
        if self._dtype is not None:  # Autocast does not apply to the matmuls over strided views.
            x, weight = x.to(self._dtype), weight.to(self._dtype)
            bias = None if bias is None else bias.to(self._dtype)
        y: Tensor = self.norm(self._convolve(x, weight, bias, self.stride))
        return F.gelu(y)


class ConvExtractor(nn.Module):
    """Raw audio (B, S) to features (B, T, C) by strided convolutions without padding.

    ``conv_layers`` lists [channels, kernel, stride]. wav2vec 2.0 (Baevski et al., 2020) has
    [512, 10, 5], 4 × [512, 3, 2], 2 × [512, 2, 2]. A frame then comes every 20 ms at 16 kHz and covers 25 ms.
    Each layer is a convolution, a norm and GELU. Weights are initialised Kaiming-normal.

    ``conv_norm`` is one of:

    - ``group``: the first convolution's output is normalised over time for each channel (base models). The
      statistics include padding, so padding changes a row's output, as in upstream.
    - ``layer``: the output of every convolution is normalised over channels (large models). Valid frames do
      not depend on padding.

    ``gradient_scale`` multiplies the gradient that enters the extractor. 0 freezes the extractor: no graph
    is recorded, and the parameters require no gradient.

    The compute policy selects the implementation of the convolution: ``conv1d`` (CUDA), ``conv2d`` (lazy
    devices, which do not have strided views), or ``matmul`` (CPU). The parameters and their names do not
    depend on it.

    Raises ConfigError for values out of range.
    """

    def __init__(
        self,
        conv_layers: list[list[int]],
        conv_bias: bool = False,
        conv_norm: str = "group",
        gradient_scale: float = 1.0,
    ) -> None:
        super().__init__()
        sizes = {len(layer) for layer in conv_layers}
        if sizes != {3} or min(map(min, conv_layers)) < 1:
            needed = "It must list [channels, kernel, stride], all above 0"
            raise ConfigError(f"conv_layers is {conv_layers}. {needed}")
        if conv_norm not in ("group", "layer"):
            raise ConfigError(f"conv_norm is {conv_norm!r}. It must be group or layer")
        if gradient_scale < 0:
            raise ConfigError(f"gradient_scale is {gradient_scale}. It must be 0 or more")
        self.spans = [(int(kernel), int(stride)) for _, kernel, stride in conv_layers]  # of each layer
        self.widths = [int(channels) for channels, _, _ in conv_layers]  # of each layer
        self.channels = self.widths[-1]
        self.gradient_scale = gradient_scale
        self.layers = nn.ModuleList()
        inputs = 1
        for width, (kernel, stride) in zip(self.widths, self.spans, strict=True):
            norm: nn.Module = nn.Identity()
            is_first_layer = len(self.layers) == 0
            if conv_norm == "layer":
                norm = LayerNorm(width)
            elif is_first_layer:
                norm = InstanceNorm(width)
            self.layers.append(ConvBlock(inputs, width, kernel, stride=stride, bias=conv_bias, norm=norm))
            inputs = width
        if gradient_scale == 0:
            self.requires_grad_(False)

    def forward(self, audio: Tensor) -> Tensor:
        """Map audio (B, S) to features (B, T, C), with T = ``frames(S)``."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.gradient_scale > 0):
            x = audio[:, :, None]
            for layer in self.layers:
                x = layer(x)
        if self.gradient_scale in (0.0, 1.0):
            return x
        scaled: Tensor = _ScaleGradient.apply(x, self.gradient_scale)  # type: ignore[no-untyped-call]
        return scaled

    def frames(self, samples: int) -> int:
        """Return the number of frames of ``samples`` samples. In the published model, 16000 have 49."""
        for kernel, stride in self.spans:
            samples = max((samples - kernel) // stride + 1, 0)
        return samples

    def lengths(self, samples: Tensor) -> Tensor:
        """Return the numbers of frames (B,) of rows with ``samples`` (B,). They cover no padding."""
        for kernel, stride in self.spans:
            samples = (torch.div(samples - kernel, stride, rounding_mode="floor") + 1).clamp(min=0)
        return samples
