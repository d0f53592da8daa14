"""Convolutional encoders: ContextNet (Han et al., 2020) and QuartzNet (Kriman et al., 2020), by their blocks.

Legend: B rows, T frames, C channels, k kernel taps, s stride. Frames after a row's end are 0 in every
layer, since the norm writes zeros there and the activations keep them; so no result depends on padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speechtrain.batch import Batch
from speechtrain.compute_policy import PLAIN, ComputePolicy, PolicyAware
from speechtrain.encoders.base import LogMelEncoder
from speechtrain.features.augment import Augment
from speechtrain.features.logmel import LogMel
from speechtrain.nn.full_precision import at_least_fp32, full_precision
from speechtrain.nn.lstm import EndSegment
from speechtrain.nn.norm import MaskedBatchNorm

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"swish": F.silu, "relu": F.relu}


def _tds_uniform(weight: Tensor) -> None:
    """Draw from ±2/√fan-in: ContextNet's initial weights in NeMo, of time-depth separable networks."""
    bound = 2.0 / weight[0].numel() ** 0.5
    nn.init.uniform_(weight, -bound, bound)


INITS: dict[str, Callable[[Tensor], object]] = {
    "tds_uniform": _tds_uniform,
    "xavier_uniform": nn.init.xavier_uniform_,
}

_MOST = {"filters": 2**16, "kernel": 1023, "repeat": 100, "stride": 100, "dilation": 100, "times": 100}
_MOST_CONVOLUTIONS = 1000
_FEW_CHANNELS = 16  # oneDNN of torch 2.13 hangs on up to 16 channels-last ones in bf16 where a kernel is wide
_BLOCKS_OF_A_GRAPH = 4  # 20 convolutions have about 700 operations, and lazy devices compile thousands slowly


class SeparableConv(nn.Module):
    """Depthwise convolution over time (kernel 1: none), pointwise convolution, norm: to (B, T/s, out)."""

    def __init__(self, inputs: int, filters: int, kernel: int, stride: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.stride, self.dilation, self.padding = stride, dilation, dilation * (kernel - 1) // 2
        self.depthwise = None
        if kernel > 1:
            self.depthwise = nn.Conv1d(inputs, inputs, kernel, groups=inputs, bias=False)
        self.pointwise = nn.Linear(inputs, filters, bias=False)
        self.norm = MaskedBatchNorm(filters, momentum=0.1, eps=1e-3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Convolve rows with ``lengths`` (B,) frames in the output."""
        if self.depthwise is None:
            x = x[:, :: self.stride]
        else:
            # as an image of height 1, which Gaudi needs, and whose channels-last layout costs CPUs no copy
            weight, options = self.depthwise.weight[:, :, None], ((1, self.stride), (0, self.padding))
            image = x.transpose(1, 2)[:, :, None]
            if len(weight) <= _FEW_CHANNELS:
                image = image.contiguous()
            image = F.conv2d(image, weight, None, *options, (1, self.dilation), len(weight))
            x = image[:, :, 0].transpose(1, 2)
        y: Tensor = self.norm(self.pointwise(x), lengths)
        return y


class SqueezeExcitation(nn.Module):
    """Scales channels by a function of their means over a row's valid frames, at least in fp32."""

    def __init__(self, channels: int, reduction: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        hidden = max(1, channels // reduction)
        self.reduce = nn.Linear(channels, hidden, bias=False)
        self.expand = nn.Linear(hidden, channels, bias=False)
        self.activation = activation

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Scale (B, T, C), which is 0 after each row's ``lengths`` (B,)."""
        with full_precision(x.device):
            wide = at_least_fp32(x)
            mean = wide.sum(1) / lengths.clamp(min=1)[:, None].to(wide.dtype)
            gate: Tensor = self.expand(self.activation(self.reduce(mean))).sigmoid()
            return (wide * gate[:, None]).to(x.dtype)


class Block(nn.Module):
    """Separable convolutions, the last one with the stride; squeeze and excitation; the residual.

    Activation and dropout follow each convolution; the last time, they follow the residual sum.
    """

    def __init__(self, inputs: int, block: dict[str, Any], activation: str, squeeze: int) -> None:
        super().__init__()
        filters, kernel, stride, repeat = (block[k] for k in ("filters", "kernel", "stride", "repeat"))
        widths, strides = [inputs] + [filters] * (repeat - 1), [1] * (repeat - 1) + [stride]
        self.convs = nn.ModuleList(
            SeparableConv(width, filters, kernel, s, block["dilation"])
            for width, s in zip(widths, strides, strict=True)
        )
        self.activation, self.stride = ACTIVATIONS[activation], int(stride)
        self.squeeze = SqueezeExcitation(filters, squeeze, self.activation) if squeeze else None
        self.residual = SeparableConv(inputs, filters, 1, stride) if block["residual"] else None
        self.dropout = nn.Dropout(block["dropout"])

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        start, frames = x, torch.div(lengths + (self.stride - 1), self.stride, rounding_mode="floor")
        *first, last = self.convs
        for conv in first:
            x = self.dropout(self.activation(conv(x, lengths)))
        x = last(x, frames)
        if self.squeeze is not None:
            x = self.squeeze(x, frames)
        if self.residual is not None:
            x = x + self.residual(start, frames)
        return self.dropout(self.activation(x)), frames

    def values(self, inputs: int, filters: int) -> float:
        """Values that forward keeps for backward, for each frame of the input."""
        return inputs + 4.0 * filters * (len(self.convs) - 1 + 1 / self.stride)


class ConvolutionalEncoder(LogMelEncoder, PolicyAware):
    """Blocks of separable convolutions on log-mel features; every published network is a list of blocks.

    An item of ``blocks`` may have ``filters``, ``kernel`` (odd), ``repeat`` (convolutions), ``residual`` and
    ``dropout``, which replace the parameters of these names, and ``stride``, ``dilation`` and ``times``
    (equal blocks in a row), which are 1 otherwise. ``squeeze`` is the reduction of squeeze and excitation;
    0: none. ``init`` is the distribution of the initial weights: ``tds_uniform`` within 2/sqrt(fan-in)
    (time-depth separable; Hannun et al., 2019), as NeMo's ContextNet has it, or ``xavier_uniform`` (Glorot
    and Bengio, 2010), as NeMo's QuartzNet has it.

    Raises ValueError for a block that cannot be.
    """

    shard_units = ("blocks",)  # sharded runs gather the parameters of one block at a time

    def __init__(
        self,
        features: LogMel,
        augment: Augment,
        blocks: list[dict[str, Any]],
        filters: int | None = None,
        kernel: int = 5,
        repeat: int = 5,
        residual: bool = True,
        dropout: float = 0.1,
        activation: str = "swish",
        squeeze: int = 16,
        init: str = "tds_uniform",
    ) -> None:
        super().__init__(features, augment)
        if init not in INITS:
            raise ValueError(f"init is {init!r}. Choose {' or '.join(INITS)}")
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation is {activation!r}; it must be {' or '.join(ACTIVATIONS)}")
        if squeeze < 0:
            raise ValueError(f"squeeze is {squeeze}; it must be at least 0")
        shared = {"filters": filters, "kernel": kernel, "repeat": repeat, "residual": residual}
        self.blocks, self.width = nn.ModuleList(), features.features
        self._strides: list[int] = []
        self._values, share = 0.0, 1.0  # kept for backward a feature frame; output frames a feature frame
        for block in _complete(blocks, shared | {"dropout": dropout}):
            for _ in range(block["times"]):
                layer = Block(self.width, block, activation, squeeze)
                self._values += share * layer.values(self.width, block["filters"])
                share /= layer.stride
                self.blocks.append(layer)
                self._strides.append(layer.stride)
                self.width = block["filters"]
        self._policy = PLAIN
        for weight in self.parameters():
            if weight.dim() > 1:
                INITS[init](weight)

    def apply_policy(self, policy: ComputePolicy) -> None:
        self._policy = policy

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        x, lengths = self.augmented(batch)
        for index, block in enumerate(self.blocks, 1):
            x, lengths = block(x, lengths)
            if self._policy.static_shapes and index % _BLOCKS_OF_A_GRAPH == 0:
                x = EndSegment.apply(self._policy.mark_step, x)[0]  # type: ignore[no-untyped-call]
        return x, lengths

    def frames(self, samples: int) -> int:
        frames = self.features.frames(samples)
        for stride in self._strides:
            frames = -(-frames // stride)
        return frames

    def activation_bytes(self) -> float:
        # measured as what autograd saves of an update; before the blocks, the front end has 8 copies of the
        # waveform; within a factor of 2 for the networks in conf/encoder
        return 4 * max(self._values / self.features.frame_seconds, 8.0 * self.sample_rate)


def _complete(blocks: list[dict[str, Any]], shared: dict[str, Any]) -> list[dict[str, Any]]:
    """``blocks`` with every key. Raises ValueError, which names the item and its key."""
    known, complete = shared | {"stride": 1, "dilation": 1, "times": 1}, []
    if not blocks:
        raise ValueError("blocks is empty; it must list at least one block")
    for index, block in enumerate(blocks):
        for key in block.keys() - known.keys():
            raise ValueError(f"blocks[{index}].{key}: a block takes no {key!r}; it takes {', '.join(known)}")
        complete.append(found := known | block)
        for key, value in found.items():
            name = f"blocks[{index}].{key}" if key in block or key not in shared else key
            if key == "residual":
                fits, range_ = isinstance(value, bool), "true or false"
            elif key == "dropout":
                fits, range_ = type(value) in (int, float) and 0 <= value < 1, "at least 0 and below 1"
            else:
                fits, range_ = type(value) is int and 1 <= value <= _MOST[key], f"1 to {_MOST[key]}"
                if key == "kernel":
                    fits, range_ = fits and value % 2 == 1, f"odd, {range_}"
            if not fits:
                raise ValueError(f"{name} is {value!r}; it must be {range_}")
    convolutions = sum(block["times"] * block["repeat"] for block in complete)
    if convolutions > _MOST_CONVOLUTIONS:
        raise ValueError(
            f"blocks have {convolutions} convolutions; at most {_MOST_CONVOLUTIONS} are possible"
        )
    return complete
