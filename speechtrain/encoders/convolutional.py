"""Convolutional encoders, as lists of blocks: ContextNet (Han et al., 2020), QuartzNet (Kriman et al., 2020).

Legend: B rows, T frames, C channels, k kernel taps, s stride. Frames after a row's end are 0 in every
layer, because the norm writes zeros there and the activations keep them. So no result depends on padding.
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
from speechtrain.errors import require_least
from speechtrain.features.augment import Augment
from speechtrain.features.logmel import LogMel
from speechtrain.nn.full_precision import at_least_fp32, full_precision
from speechtrain.nn.lstm import EndSegment
from speechtrain.nn.norm import MaskedBatchNorm

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"swish": F.silu, "relu": F.relu}


def _tds_uniform(weight: Tensor) -> None:
    """Draw a weight within ±2/√fan-in, as time-depth separable networks and NeMo's ContextNet do."""
    bound = 2.0 / weight[0].numel() ** 0.5
    nn.init.uniform_(weight, -bound, bound)


INITS: dict[str, Callable[[Tensor], object]] = {
    "tds_uniform": _tds_uniform,
    "xavier_uniform": nn.init.xavier_uniform_,
}

_MOST = {"filters": 2**16, "kernel": 1023, "repeat": 100, "stride": 100, "dilation": 100, "times": 100}
_MOST_CONVOLUTIONS = 1000
# With up to 16 channels-last channels in bf16 and a wide kernel, oneDNN of torch 2.13 hangs.
_FEW_CHANNELS = 16
# The 20 convolutions of 4 blocks have about 700 operations. Lazy devices compile thousands slowly.
_BLOCKS_OF_A_GRAPH = 4


class SeparableConv(nn.Module):
    """Depthwise convolution over time, pointwise convolution and norm: to (B, T/s, out).

    With a kernel of 1, the depthwise convolution is omitted.
    """

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
            # Gaudi needs an image, here of height 1. Its channels-last layout costs CPUs no copy.
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
        """Scale frames (B, T, C) that are 0 after each row's ``lengths`` (B,)."""
        with full_precision(x.device):
            wide = at_least_fp32(x)
            mean = wide.sum(1) / lengths.clamp(min=1)[:, None].to(wide.dtype)
            gate: Tensor = self.expand(self.activation(self.reduce(mean))).sigmoid()
            return (wide * gate[:, None]).to(x.dtype)


class Block(nn.Module):
    """Separable convolutions, then squeeze and excitation, then the residual sum.

    The last convolution has the stride. Activation and dropout follow each of the other convolutions and the
    residual sum.
    """

    def __init__(self, inputs: int, block: dict[str, Any], activation: str, squeeze: int) -> None:
        super().__init__()
        filters, kernel, stride, repeat = (block[k] for k in ("filters", "kernel", "stride", "repeat"))
        self.convs, width = nn.ModuleList(), inputs
        for conv_stride in [1] * (repeat - 1) + [stride]:
            self.convs.append(SeparableConv(width, filters, kernel, conv_stride, block["dilation"]))
            width = filters
        self.activation, self.stride = ACTIVATIONS[activation], int(stride)
        self.squeeze = SqueezeExcitation(filters, squeeze, self.activation) if squeeze else None
        self.residual = SeparableConv(inputs, filters, 1, stride) if block["residual"] else None
        self.dropout = nn.Dropout(block["dropout"])

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        inputs = x
        frames = torch.div(lengths + (self.stride - 1), self.stride, rounding_mode="floor")
        *convs, strided_conv = self.convs
        for conv in convs:
            x = self.dropout(self.activation(conv(x, lengths)))
        x = strided_conv(x, frames)
        if self.squeeze is not None:
            x = self.squeeze(x, frames)
        if self.residual is not None:
            x = x + self.residual(inputs, frames)
        return self.dropout(self.activation(x)), frames

    def values(self, inputs: int, filters: int) -> float:
        """Return the number of values that forward keeps for backward, for each frame of the input."""
        input_convs = len(self.convs) - 1
        return inputs + 4.0 * filters * (input_convs + 1 / self.stride)


class ConvolutionalEncoder(LogMelEncoder, PolicyAware):
    """Blocks of separable convolutions on log-mel features. Every published network is a list of blocks.

    An item of ``blocks`` has two kinds of optional keys:

    - ``filters``, ``kernel`` (odd), ``repeat`` (convolutions), ``residual`` and ``dropout`` replace the
      parameters of these names.
    - ``stride``, ``dilation`` and ``times`` (equal blocks in a row) are 1 by default.

    ``squeeze`` is the reduction of squeeze and excitation, and 0 omits both. ``init`` is the distribution of
    the initial weights: ``tds_uniform`` within 2/sqrt(fan-in) (Hannun et al., 2019), as in NeMo's ContextNet,
    or ``xavier_uniform`` (Glorot and Bengio, 2010), as in NeMo's QuartzNet.

    Raises ValueError for a block with an unknown key or a value out of range.
    """

    shard_units = ("blocks",)  # Sharded runs gather the parameters of one block at a time.
    _policy: ComputePolicy = PLAIN
    _values = 0.0  # that forward keeps for backward, for each feature frame
    _output_share = 1.0  # output frames for each feature frame

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
        _check(init, activation, squeeze)
        defaults: dict[str, Any] = {"filters": filters, "kernel": kernel, "repeat": repeat}
        defaults |= {"residual": residual, "dropout": dropout}
        self.blocks, self.width = nn.ModuleList(), features.features
        self._strides: list[int] = []
        for block in _complete(blocks, defaults):
            for _ in range(block["times"]):
                self._append(Block(self.width, block, activation, squeeze), block["filters"])
        for weight in self.parameters():
            if weight.dim() > 1:
                INITS[init](weight)

    def _append(self, block: Block, filters: int) -> None:
        self._values += self._output_share * block.values(self.width, filters)
        self._output_share /= block.stride
        self.blocks.append(block)
        self._strides.append(block.stride)
        self.width = filters

    def apply_policy(self, policy: ComputePolicy) -> None:
        self._policy = policy

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        x, lengths = self.augmented(batch)
        for index, block in enumerate(self.blocks, 1):
            x, lengths = block(x, lengths)
            is_lazy = self._policy.static_shapes and not self._policy.compiler
            if is_lazy and index % _BLOCKS_OF_A_GRAPH == 0:
                x = EndSegment.apply(self._policy.mark_step, x)[0]  # type: ignore[no-untyped-call]
        return x, lengths

    def frames(self, samples: int) -> int:
        frames = self.features.frames(samples)
        for stride in self._strides:
            frames = -(-frames // stride)
        return frames

    def activation_bytes(self) -> float:
        # The values are measured as the tensors that autograd saves in an update. Before the blocks, the
        # front end has 8 copies of the waveform. The prediction is within a factor of 2 for the networks in
        # conf/encoder.
        return 4 * max(self._values / self.features.frame_seconds, 8.0 * self.sample_rate)


def _check(init: str, activation: str, squeeze: int) -> None:
    if init not in INITS:
        raise ValueError(f"init is {init!r}. Choose {' or '.join(INITS)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}. Choose {' or '.join(ACTIVATIONS)}")
    require_least(0, squeeze=squeeze)


def _complete(blocks: list[dict[str, Any]], defaults: dict[str, Any]) -> list[dict[str, Any]]:
    """Return ``blocks`` with every key. Raises ValueError, which names the item and its key."""
    if not blocks:
        raise ValueError("blocks is empty: it must list at least one block")
    all_defaults = defaults | {"stride": 1, "dilation": 1, "times": 1}
    complete, convolutions = [], 0
    for index, block in enumerate(blocks):
        for key in block.keys() - all_defaults.keys():
            keys = ", ".join(all_defaults)
            raise ValueError(f"blocks[{index}].{key}: a block takes no {key!r}, but only {keys}")
        complete_block = all_defaults | block
        for key, setting in complete_block.items():
            name = key
            if key in block or key not in defaults:
                name = f"blocks[{index}].{key}"
            _check_setting(name, key, setting)
        complete.append(complete_block)
        convolutions += complete_block["times"] * complete_block["repeat"]
    if convolutions > _MOST_CONVOLUTIONS:
        raise ValueError(
            f"blocks have {convolutions} convolutions, but at most {_MOST_CONVOLUTIONS} are possible"
        )
    return complete


def _check_setting(name: str, key: str, setting: Any) -> None:
    """Raise ValueError if the setting of a block's ``key`` is out of range."""
    if key == "residual":
        is_valid, valid = isinstance(setting, bool), "true or false"
    elif key == "dropout":
        is_valid, valid = type(setting) in (int, float) and 0 <= setting < 1, "at least 0 and below 1"
    else:
        is_valid, valid = type(setting) is int and 1 <= setting <= _MOST[key], f"1 to {_MOST[key]}"
        if key == "kernel":
            is_valid, valid = is_valid and setting % 2 == 1, f"odd, {valid}"
    if not is_valid:
        raise ValueError(f"{name} is {setting!r}: it must be {valid}")
