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


class _StridedProduct(Function):
    """Strided convolution of (B, T, C) rows by weights (out, k·C), as products over strided views.

    The input of frame t is k·C consecutive values from t·s·C on. The taps are divided into blocks of s.
    Block j of all frames is a matrix whose rows do not overlap, so a product reads it in place. Forward
    and both gradients take ceil(k/s) products a row, without copies.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, kernel: int, stride: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.kernel, ctx.stride, ctx.biased = kernel, stride, bias is not None
        frames = (x.shape[1] - kernel) // stride + 1
        y = x.new_empty(x.shape[0], frames, weight.shape[0])
        for row, output in zip(x, y, strict=True):
            for columns, block in _blocks(row, frames, kernel, stride=stride):
                part = weight[:, columns].t()
                if columns.start:
                    output.addmm_(block, part)
                elif bias is None:
                    torch.mm(block, part, out=output)
                else:
                    torch.addmm(bias, block, part, out=output)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        frames = gradient.shape[1]
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        to_x = torch.empty_like(x) if needs_x else None
        to_weight = torch.zeros_like(weight) if needs_weight else None
        # the first blocks are adjacent and are written; later blocks overlap them and are added
        written = frames * ctx.stride if ctx.kernel >= ctx.stride else 0
        for index in range(x.shape[0]):
            if to_x is not None:
                to_x[index, written:] = 0
                for columns, block in _blocks(to_x[index], frames, ctx.kernel, stride=ctx.stride):
                    if written and not columns.start:
                        torch.mm(gradient[index], weight[:, columns], out=block)
                    else:
                        block.addmm_(gradient[index], weight[:, columns])
            if to_weight is not None:
                for columns, block in _blocks(x[index], frames, ctx.kernel, stride=ctx.stride):
                    to_weight[:, columns].addmm_(gradient[index].t(), block)
        to_bias = gradient.sum((0, 1)) if ctx.biased else None
        return to_x, to_weight, to_bias, None, None


def _blocks(row: Tensor, frames: int, kernel: int, stride: int) -> list[tuple[slice, Tensor]]:
    """Pairs of weight columns and the (frames, columns) view of a contiguous row (T, C) they multiply."""
    channels = row.shape[1]
    blocks = []
    for tap in range(0, kernel, stride):
        columns = slice(tap * channels, min(tap + stride, kernel) * channels)
        shape = (frames, columns.stop - columns.start)
        offset = row.storage_offset() + columns.start
        blocks.append((columns, row.as_strided(shape, (stride * channels, 1), offset)))
    return blocks


Convolution = Callable[[Tensor, Tensor, "Tensor | None", int], Tensor]


def conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
    """Convolve (B, T, C) by (out, C, k) to (B, T', out) with torch's one-dimensional convolution."""
    return F.conv1d(x.transpose(1, 2), weight, bias, stride).transpose(1, 2)


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
    """``conv1d`` by a two-dimensional convolution of height 1, as in the Gaudi port."""
    image = x.transpose(1, 2)[:, :, None]
    return F.conv2d(image, weight[:, :, None], bias, (1, stride))[:, :, 0].transpose(1, 2)


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
    """``conv1d`` by matrix products over strided views of time-major rows; first derivatives only."""
    if x.shape[2] == 1:
        # one channel: a copy of the frames costs less than several products of so few columns
        return F.linear(x[:, :, 0].unfold(1, weight.shape[2], stride).contiguous(), weight[:, 0], bias)
    flat = weight.transpose(1, 2).flatten(1)  # (out, k·C), the order of a frame's values in memory
    y: Tensor = _StridedProduct.apply(x.contiguous(), flat, bias, weight.shape[2], stride)  # type: ignore[no-untyped-call]
    return y


CONVOLUTIONS: dict[str, Convolution] = {"conv1d": conv1d, "conv2d": conv2d, "matmul": matmul}


class _NormOverTime(Function):
    """Instance norm of (B, T, C) rows in time-major memory; torch's own would transpose them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        wide = at_least_fp32(x)
        variance, mean = torch.var_mean(wide, 1, keepdim=True, correction=0)
        inverse = (variance + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, inverse)
        scale = inverse * weight
        return torch.addcmul(bias - mean * scale, wide, scale).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse = ctx.saved_tensors
        gradient, wide = at_least_fp32(gradients[0]), at_least_fp32(x)
        scale = inverse * weight
        to_bias = gradient.sum(1, keepdim=True)
        to_weight = ((gradient * wide).sum(1, keepdim=True) - mean * to_bias) * inverse
        # scale · (gradient − its mean − normalised · mean of gradient · normalised), as a·gradient + b·x + c
        slope = -scale * inverse * to_weight / x.shape[1]
        shift = -scale * to_bias / x.shape[1] - slope * mean
        to_x = torch.addcmul(shift, gradient, scale).addcmul_(wide, slope).to(x.dtype)
        return to_x, to_weight.sum((0, 1)), to_bias.sum((0, 1)), None


class InstanceNorm(nn.GroupNorm):
    """GroupNorm with one group a channel, computed as instance norm: (B, T, C) over T, at least in fp32.

    The two have the same formula (biased variance, one scale and shift a channel). Instance norm is a
    single operation also on devices that decompose group norm. ``time_major`` is the memory layout of the
    input; the result does not depend on it. As in upstream, the statistics cover a row's padding, too.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels)
        self.time_major = False

    def forward(self, x: Tensor) -> Tensor:
        if self.time_major:
            y: Tensor = _NormOverTime.apply(x, self.weight, self.bias, self.eps)  # type: ignore[no-untyped-call]
            return y
        across = at_least_fp32(x.transpose(1, 2))
        y = F.instance_norm(across, weight=self.weight, bias=self.bias, eps=self.eps)
        return y.to(x.dtype).transpose(1, 2)


class LayerNorm(nn.LayerNorm):
    """LayerNorm with output in the input's dtype; every backend accumulates its statistics in fp32."""

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
        if isinstance(self.norm, InstanceNorm):
            self.norm.time_major = policy.conv == "matmul"

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.conv.weight, self.conv.bias
        if self._dtype is not None:  # autocast does not reach the products over strided views
            x, weight = x.to(self._dtype), weight.to(self._dtype)
            bias = None if bias is None else bias.to(self._dtype)
        y: Tensor = self.norm(self._convolve(x, weight, bias, self.stride))
        return F.gelu(y)


class ConvExtractor(nn.Module):
    """Raw audio (B, S) to features (B, T, C) by strided convolutions without padding.

    ``conv_layers`` lists [channels, kernel, stride]. wav2vec 2.0 (Baevski et al., 2020) has
    [512, 10, 5], 4 × [512, 3, 2], 2 × [512, 2, 2]: 20 ms a frame at 16 kHz, each seeing 25 ms.
    ``conv_norm`` ``group`` normalises each channel over time after the first convolution (base models);
    its statistics cover padding too, so padding changes a row's result, as in upstream.
    ``layer`` normalises over channels after every convolution (large models); valid frames then do
    not depend on padding. Order: convolution, norm, GELU. Weights are initialised Kaiming-normal.

    ``gradient_scale`` multiplies the gradient that enters the extractor; 0 freezes it (no graph is
    recorded, and its parameters require no gradient). The policy selects how a convolution is computed:
    ``conv1d``, ``conv2d``, or ``matmul``, which is matrix products over strided views of memory (CPU and
    CUDA; lazy devices have no strided views). The parameters and their names do not depend on it.

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
        if not conv_layers or any(len(layer) != 3 or min(layer) < 1 for layer in conv_layers):
            raise ConfigError(
                f"conv_layers is {conv_layers}; it must list [channels, kernel, stride], all above 0"
            )
        if conv_norm not in ("group", "layer"):
            raise ConfigError(f"conv_norm is {conv_norm!r}; it must be group or layer")
        if gradient_scale < 0:
            raise ConfigError(f"gradient_scale is {gradient_scale}; it must be 0 or more")
        self.spans = [(int(kernel), int(stride)) for _, kernel, stride in conv_layers]
        self.widths = [int(channels) for channels, _, _ in conv_layers]
        self.channels = self.widths[-1]
        self.gradient_scale = gradient_scale
        self.layers = nn.ModuleList()
        inputs = 1
        for index, (width, (kernel, stride)) in enumerate(zip(self.widths, self.spans, strict=True)):
            norm: nn.Module = LayerNorm(width) if conv_norm == "layer" else nn.Identity()
            if conv_norm == "group" and index == 0:
                norm = InstanceNorm(width)
            self.layers.append(ConvBlock(inputs, width, kernel, stride=stride, bias=conv_bias, norm=norm))
            inputs = width
        if gradient_scale == 0:
            self.requires_grad_(False)

    def forward(self, audio: Tensor) -> Tensor:
        """Map audio (B, S) to features (B, T, C), T = ``frames(S)``."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.gradient_scale > 0):
            x = audio[:, :, None]
            for layer in self.layers:
                x = layer(x)
        if self.gradient_scale in (0.0, 1.0):
            return x
        scaled: Tensor = _ScaleGradient.apply(x, self.gradient_scale)  # type: ignore[no-untyped-call]
        return scaled

    def frames(self, samples: int) -> int:
        """Frames of ``samples`` samples, on the host: 16000 give 49 in the published configuration."""
        for kernel, stride in self.spans:
            samples = max((samples - kernel) // stride + 1, 0)
        return samples

    def lengths(self, samples: Tensor) -> Tensor:
        """The numbers of frames (B,) that cover valid samples only, for rows of ``samples`` (B,)."""
        for kernel, stride in self.spans:
            samples = (torch.div(samples - kernel, stride, rounding_mode="floor") + 1).clamp(min=0)
        return samples
