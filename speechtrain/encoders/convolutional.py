"""Convolutional encoders, as lists of blocks: ContextNet (Han et al., 2020), QuartzNet (Kriman et al., 2020).

Legend: B rows, T frames, C channels, s stride.

The output of every layer is 0 in the frames after a row's end: the norm writes zeros there, and each
activation maps 0 to 0. So no result depends on the padding of a batch.
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
from speechtrain.nn.norm import MaskedBatchNorm
from speechtrain.nn.segments import end_segment

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"swish": F.silu, "relu": F.relu}


def _tds_uniform(weight: Tensor) -> None:
    """Draw a weight within ±2/√fan-in, as time-depth separable networks and NeMo's ContextNet do."""
    fan_in = weight[0].numel()
    bound = 2.0 / fan_in**0.5
    nn.init.uniform_(weight, -bound, bound)


INITS: dict[str, Callable[[Tensor], object]] = {
    "tds_uniform": _tds_uniform,
    "xavier_uniform": nn.init.xavier_uniform_,
}

# The largest valid values of a block's settings.
_LARGEST = {"filters": 2**16, "kernel": 1023, "repeat": 100, "stride": 100, "dilation": 100, "times": 100}
_MOST_CONVOLUTIONS = 1000  # in a whole network
# The bf16 convolution of oneDNN in torch 2.13 hangs with a wide kernel and a channels-last input of at most
# this number of channels.
_MOST_HANGING_CHANNELS = 16
# A lazy device compiles the graph of this number of blocks at once. With 20 convolutions they have about 700
# operations, and graphs of thousands of operations take long to compile.
_BLOCKS_PER_GRAPH = 4


class SeparableConv(nn.Module):
    """Depthwise convolution over time, pointwise convolution and BatchNorm.

    Maps (B, T, inputs) to (B, ceil(T/s), filters). With a kernel of 1, there is only the pointwise
    convolution.
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
        """Convolve ``x`` (B, T, inputs). ``lengths`` (B,) are the frames of each row after the stride."""
        if self.depthwise is None:
            x = x[:, :: self.stride]
        else:
            x = self._convolve_channels(x, self.depthwise.weight)
        y: Tensor = self.norm(self.pointwise(x), lengths)
        return y

    def _convolve_channels(self, x: Tensor, weight: Tensor) -> Tensor:
        """Convolve each channel of ``x`` (B, T, inputs) over time by its ``weight`` (inputs, 1, kernel)."""
        channels = len(weight)
        # Gaudi needs an image, whose height is 1 here. The transposed view has the channels-last layout,
        # which CPUs convolve without a copy.
        image = x.transpose(1, 2)[:, :, None]
        if channels <= _MOST_HANGING_CHANNELS:
            image = image.contiguous()  # the channels-first layout, in which oneDNN does not hang
        image = F.conv2d(
            image,
            weight[:, :, None],
            stride=(1, self.stride),
            padding=(0, self.padding),
            dilation=(1, self.dilation),
            groups=channels,
        )
        return image[:, :, 0].transpose(1, 2)


class SqueezeExcitation(nn.Module):
    """Multiplies each channel by a gate, which depends on the means of all channels over the row's frames.

    It computes in fp32 or wider, because a mean over many frames is inexact in bf16.
    """

    def __init__(self, channels: int, reduction: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        hidden = max(1, channels // reduction)
        self.reduce = nn.Linear(channels, hidden, bias=False)
        self.expand = nn.Linear(hidden, channels, bias=False)
        self.activation = activation

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Scale frames (B, T, C), which must be 0 after the ``lengths`` (B,) of the rows."""
        with full_precision(x.device):
            wide = at_least_fp32(x)
            mean = wide.sum(1) / lengths.clamp(min=1)[:, None].to(wide.dtype)
            gate: Tensor = self.expand(self.activation(self.reduce(mean))).sigmoid()
            return (wide * gate[:, None]).to(x.dtype)


class Block(nn.Module):
    """Separable convolutions, then squeeze and excitation, then the residual sum.

    Only the last convolution has the stride. Activation and dropout follow each of the other convolutions and
    the residual sum. ``settings`` is an item of ``ConvolutionalEncoder.blocks`` with all its keys.
    """

    def __init__(self, inputs: int, settings: dict[str, Any], activation: str, squeeze: int) -> None:
        super().__init__()
        filters, kernel, stride = settings["filters"], settings["kernel"], settings["stride"]
        strides = [1] * (settings["repeat"] - 1) + [stride]
        self.convs = nn.ModuleList()
        width = inputs
        for conv_stride in strides:
            self.convs.append(SeparableConv(width, filters, kernel, conv_stride, settings["dilation"]))
            width = filters
        self.activation, self.stride = ACTIVATIONS[activation], int(stride)
        self.squeeze = SqueezeExcitation(filters, squeeze, self.activation) if squeeze else None
        self.residual = SeparableConv(inputs, filters, 1, stride) if settings["residual"] else None
        self.dropout = nn.Dropout(settings["dropout"])

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Map frames (B, T, inputs) of ``lengths`` (B,) to (B, ceil(T/s), filters) and their lengths (B,)."""
        inputs = x
        strided_lengths = torch.div(lengths + (self.stride - 1), self.stride, rounding_mode="floor")
        *convs, strided_conv = self.convs
        for conv in convs:
            x = self.dropout(self.activation(conv(x, lengths)))
        x = strided_conv(x, strided_lengths)
        if self.squeeze is not None:
            x = self.squeeze(x, strided_lengths)
        if self.residual is not None:
            x = x + self.residual(inputs, strided_lengths)
        return self.dropout(self.activation(x)), strided_lengths

    def stored_values(self, inputs: int, filters: int) -> float:
        """Return the number of values that forward stores for backward, for each frame of the input.

        A convolution stores 4 values for each filter and frame. Only the last one has fewer frames.
        """
        unstrided_convs = len(self.convs) - 1
        return inputs + 4.0 * filters * (unstrided_convs + 1 / self.stride)


class ConvolutionalEncoder(LogMelEncoder, PolicyAware):
    """Blocks of separable convolutions on log-mel features. Every published network is a list of blocks.

    An item of ``blocks`` is a mapping with two kinds of optional keys:

    - ``filters`` (output channels), ``kernel`` (odd, in frames), ``repeat`` (number of convolutions),
      ``residual`` and ``dropout`` replace the parameters of these names.
    - ``stride`` (frames), ``dilation`` (frames) and ``times`` (equal blocks in a row) are 1 by default.

    ``squeeze`` is the number by which squeeze and excitation divides the channels, and 0 omits it. ``init``
    is the distribution of the initial weights: ``tds_uniform`` within 2/sqrt(fan-in) (Hannun et al., 2019),
    as in NeMo's ContextNet, or ``xavier_uniform`` (Glorot and Bengio, 2010), as in NeMo's QuartzNet.

    Raises ValueError for a block with an unknown key or a value out of range.
    """

    shard_units = ("blocks",)  # Sharded runs gather the parameters of one block at a time.
    _policy: ComputePolicy = PLAIN
    _stored_values = 0.0  # values that forward stores for backward, for each feature frame
    _output_frames = 1.0  # output frames for each feature frame

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
        squeeze: int = 8,
        init: str = "tds_uniform",
    ) -> None:
        super().__init__(features, augment)
        _check(init, activation, squeeze)
        defaults: dict[str, Any] = {"filters": filters, "kernel": kernel, "repeat": repeat}
        defaults |= {"residual": residual, "dropout": dropout}
        self.blocks, self.width = nn.ModuleList(), features.features
        self._strides: list[int] = []
        for settings in _complete_blocks(blocks, defaults):
            for _ in range(settings["times"]):
                self._append_block(Block(self.width, settings, activation, squeeze), settings["filters"])
        for parameter in self.parameters():
            is_weight = parameter.dim() > 1  # The parameters of the norms have one dimension.
            if is_weight:
                INITS[init](parameter)

    def _append_block(self, block: Block, filters: int) -> None:
        self._stored_values += self._output_frames * block.stored_values(self.width, filters)
        self._output_frames /= block.stride
        self.blocks.append(block)
        self._strides.append(block.stride)
        self.width = filters

    def apply_policy(self, policy: ComputePolicy) -> None:
        self._policy = policy

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        x, lengths = self.augmented(batch)
        for number, block in enumerate(self.blocks, 1):
            x, lengths = block(x, lengths)
            if number % _BLOCKS_PER_GRAPH == 0:
                (x,) = end_segment(self._policy, x)
        return x, lengths

    def frames(self, samples: int) -> int:
        frames = self.features.frames(samples)
        for stride in self._strides:
            frames = -(-frames // stride)  # rounded up
        return frames

    def activation_bytes(self) -> float:
        # ``_stored_values`` follows a count of the tensors that autograd saves for backward. For the networks
        # in conf/encoder, the prediction is within a factor of 2 of the counted bytes. Before the blocks run,
        # the front end has 8 copies of the waveform in memory, which can be more. A value has 4 bytes.
        block_values = self._stored_values / self.features.frame_seconds
        front_end_values = 8.0 * self.sample_rate
        return 4 * max(block_values, front_end_values)


def _check(init: str, activation: str, squeeze: int) -> None:
    if init not in INITS:
        raise ValueError(f"init is {init!r}. Choose {' or '.join(INITS)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}. Choose {' or '.join(ACTIVATIONS)}")
    require_least(0, squeeze=squeeze)


def _complete_blocks(blocks: list[dict[str, Any]], defaults: dict[str, Any]) -> list[dict[str, Any]]:
    """Return ``blocks`` with every key. ``defaults`` are the encoder's parameters that a block may replace.

    Raises ValueError for an unknown key, for a value out of range and for too many convolutions. The message
    begins with the item and its key, or with the parameter whose default is out of range.
    """
    if not blocks:
        raise ValueError("blocks is empty: it must list at least one block")
    all_defaults = defaults | {"stride": 1, "dilation": 1, "times": 1}
    complete_blocks, convolutions = [], 0
    for index, block in enumerate(blocks):
        for key in block.keys() - all_defaults.keys():
            keys = ", ".join(all_defaults)
            raise ValueError(f"blocks[{index}].{key}: a block takes no {key!r}, but only {keys}")
        settings = all_defaults | block
        for key, setting in settings.items():
            is_parameter = key in defaults and key not in block
            name = key if is_parameter else f"blocks[{index}].{key}"
            _check_setting(name, key, setting)
        complete_blocks.append(settings)
        convolutions += settings["times"] * settings["repeat"]
    if convolutions > _MOST_CONVOLUTIONS:
        raise ValueError(
            f"blocks have {convolutions} convolutions, but at most {_MOST_CONVOLUTIONS} are possible"
        )
    return complete_blocks


def _check_setting(name: str, key: str, setting: Any) -> None:
    """Raise ValueError if the ``setting`` of a block's ``key`` is out of range.

    The message begins with ``name``.
    """
    if key == "residual":
        valid_range = "true or false"
        is_valid = isinstance(setting, bool)
    elif key == "dropout":
        valid_range = "at least 0 and below 1"
        is_valid = type(setting) in (int, float) and 0 <= setting < 1
    else:
        largest = _LARGEST[key]
        valid_range = f"1 to {largest}"
        is_valid = type(setting) is int and 1 <= setting <= largest
        if key == "kernel":
            valid_range = f"odd, {valid_range}"
            is_valid = is_valid and setting % 2 == 1
    if not is_valid:
        raise ValueError(f"{name} is {setting!r}: it must be {valid_range}")
