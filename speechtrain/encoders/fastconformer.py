"""FastConformer (Rekesh et al., ASRU 2023) in the form of Hugging Face's ``ParakeetEncoder``.

Strided depthwise-separable convolutions over the log-mel frames, then Conformer layers (Gulati et al., 2020)
with relative positions (Dai et al., 2019, section 3.3). The parameters have the names of ``ParakeetEncoder``,
so published weights load without a conversion of names.

Legend: B rows, T frames, M mel bins, D width, H heads, K keys, L layers, k kernel taps. The distance of a
query and a key is the frame of the query minus the frame of the key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from speechtrain.batch import Batch
from speechtrain.compute_policy import PLAIN, ComputePolicy, PolicyAware
from speechtrain.encoders.base import LogMelEncoder, layer_drop_factors
from speechtrain.errors import require_least, require_shares
from speechtrain.features.augment import Augment
from speechtrain.features.logmel import LogMel
from speechtrain.nn.dropout import Dropout
from speechtrain.nn.full_precision import at_least_fp32
from speechtrain.nn.norm import MaskedBatchNorm
from speechtrain.nn.transformer import FORBIDDEN

_SLICE_VALUES = 2**22  # values of a slice of rows after the first convolution, which are 16 MB


class Subsampling(nn.Module, PolicyAware):
    """Strided convolutions over time and frequency: (B, T, M) to (B, ceil(T / factor), D).

    The first convolution is dense. Each of the others is depthwise, then pointwise. Frames beyond a row's
    length are 0 after each convolution.

    On CPUs, a batch is convolved in slices of rows, and backward computes the values of a slice again. At 256
    channels, storing these values would take more than half of a small model's memory.
    """

    def __init__(self, mels: int, factor: int, channels: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(1, channels, 3, stride=2, padding=1), nn.ReLU(inplace=True)])
        halvings = factor.bit_length() - 1  # ``factor`` is a power of 2.
        for _ in range(halvings - 1):
            self.layers += [
                nn.Conv2d(channels, channels, 3, stride=2, padding=1, groups=channels),
                nn.Conv2d(channels, channels, 1),
                nn.ReLU(inplace=True),
            ]
        self.linear = nn.Linear(channels * (mels // factor), width)
        self.values = channels * mels // 4  # values after the first convolution, for each input frame
        self.apply_policy(PLAIN)

    def apply_policy(self, policy: ComputePolicy) -> None:
        self._is_sliced = policy.feature_frames > 0  # This is the case on CPUs only.

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Map log-mel frames (B, T, M) and lengths (B,) to subsampled frames and their lengths (B,)."""
        convolve = self._convolve
        if not self._is_sliced:
            frames, frame_lengths = convolve(x, lengths)
            return self.linear(frames), frame_lengths
        row_values = self.values * x.shape[1]
        slice_rows = max(1, _SLICE_VALUES // row_values)
        if slice_rows < len(x) and torch.is_grad_enabled():
            convolve = partial(checkpoint, convolve, use_reentrant=False, preserve_rng_state=False)
        slices = map(convolve, torch.split(x, slice_rows), torch.split(lengths, slice_rows))
        frames, frame_lengths = (torch.cat(parts) for parts in zip(*slices, strict=True))
        return self.linear(frames), frame_lengths

    def _convolve(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output of the convolutions (B, ceil(T / factor), channels · bins) and lengths (B,)."""
        x = x[:, None]
        for layer in self.layers:
            x = layer(x)
            if isinstance(layer, nn.Conv2d):
                if layer.stride[0] == 2:
                    lengths = torch.div(lengths + 1, 2, rounding_mode="floor")
                    is_valid = torch.arange(x.shape[2], device=x.device) < lengths[:, None]
                # The product and ReLU write into ``x``, because a copy of the first output would need much
                # memory: it has ``channels`` / 4 times the values of the input.
                x = x.mul_(is_valid[:, None, :, None].to(x.dtype))
        return x.transpose(1, 2).flatten(2), lengths


class RelativeAttention(nn.Module):
    """Self-attention whose scores also depend on the distance of query and key."""

    def __init__(self, width: int, heads: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width, bias=bias) for _ in range(3))
        self.o_proj = nn.Linear(width, width, bias=bias)
        self.relative_k_proj = nn.Linear(width, width, bias=False)
        # u and v of the paper are added to the query for the scores of keys and of distances.
        self.bias_u = nn.Parameter(torch.zeros(heads, width // heads))
        self.bias_v = nn.Parameter(torch.zeros(heads, width // heads))
        self.heads = heads
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Return the attention's output (B, T, D) for frames (B, T, D).

        ``positions`` (2T − 1, D) are the embeddings of the distances T − 1 to 1 − T. ``mask`` (B, 1, T, T) or
        (B, 1, 1, T) is added to the scores. It is 0 for keys to which a query may attend.
        """
        rows, frames, width = x.shape
        shape = (rows, frames, self.heads, width // self.heads)
        q, k, v = (layer(x).view(shape) for layer in (self.q_proj, self.k_proj, self.v_proj))
        # ``_distances_to_keys`` needs a first column, whose scores are not used.
        distance_keys = F.pad(self.relative_k_proj(positions), (0, 0, 1, 0)).view(1, 2 * frames, *shape[2:])
        weights = (self._scores(q, k, distance_keys) + mask).softmax(-1).to(v.dtype)
        context = torch.matmul(self.dropout(weights), v.transpose(1, 2))
        y: Tensor = self.o_proj(context.transpose(1, 2).reshape(rows, frames, width))
        return y

    def _scores(self, queries: Tensor, keys: Tensor, distance_keys: Tensor) -> Tensor:
        """Return the score (B, H, T, T) of each query with each key, in fp32 or wider."""
        key_scores = _scaled_scores(queries + self.bias_u, keys)
        distance_scores = _scaled_scores(queries + self.bias_v, distance_keys)
        return at_least_fp32(key_scores) + at_least_fp32(_distances_to_keys(distance_scores))


def _scaled_scores(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the scaled dot products (B, H, T, K) of queries (B, T, H, ·) and keys (B or 1, K, H, ·)."""
    scaled = queries * queries.shape[-1] ** -0.5
    return torch.matmul(scaled.transpose(1, 2), keys.permute(0, 2, 3, 1))


def _distances_to_keys(scores: Tensor) -> Tensor:
    """Convert scores (B, H, T, 2T) of the distances T − 1 to 1 − T to scores of the keys (B, H, T, T).

    The first column has no meaning. Query t needs the distances t to t − T + 1, which are T columns from
    column T − t on. In the flattened scores without the first T values, rows of 2T − 1 values begin at these
    columns. So the result is a view, and nothing is copied.
    """
    rows, heads, frames, columns = scores.shape
    skewed = scores.flatten(2)[..., frames:].view(rows, heads, frames, columns - 1)
    return skewed[..., :frames]


class FeedForward(nn.Module):
    """Two linear layers with SiLU and dropout between them: (…, D) to (…, D)."""

    def __init__(self, width: int, hidden: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(width, hidden, bias=bias), nn.Linear(hidden, width, bias=bias)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear2(self.dropout(F.silu(self.linear1(x))))
        return y


class Convolution(nn.Module):
    """The Conformer's convolution: gated pointwise, depthwise over k frames, BatchNorm, SiLU, pointwise.

    The statistics of the BatchNorm count only valid frames. In transformers' model, padding also counts.
    """

    def __init__(self, width: int, kernel: int, bias: bool) -> None:
        super().__init__()
        self.pointwise_conv1 = nn.Conv1d(width, 2 * width, 1, bias=bias)
        self.depthwise_conv = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width, bias=bias)
        self.norm = MaskedBatchNorm(width)
        self.pointwise_conv2 = nn.Conv1d(width, width, 1, bias=bias)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Convolve frames (B, T, D) of rows with ``lengths`` (B,)."""
        value, gate = _pointwise(self.pointwise_conv1, x).chunk(2, -1)
        is_valid = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
        x = value * gate.sigmoid() * is_valid[..., None].to(value.dtype)
        x = self.depthwise_conv(x.transpose(1, 2)).transpose(1, 2)
        return _pointwise(self.pointwise_conv2, F.silu(self.norm(at_least_fp32(x), lengths)))


def _pointwise(conv: nn.Conv1d, x: Tensor) -> Tensor:
    """Apply a convolution with a kernel of 1 to ``x`` (B, T, D).

    A matmul computes it, because Conv1d needs the channels before the frames, which costs two copies.
    """
    return F.linear(x, conv.weight[:, :, 0], conv.bias)


class ConformerLayer(nn.Module):
    """Feed-forward, attention, convolution, feed-forward, LayerNorm: (B, T, D) to (B, T, D).

    Each part is a residual branch behind a LayerNorm. The feed-forward branches count half (Gulati et al.).
    """

    def __init__(
        self,
        width: int,
        feed_forward: int,
        heads: int,
        kernel: int,
        dropout: float,
        attention_dropout: float,
        activation_dropout: float,
        attention_bias: bool,
        convolution_bias: bool,
    ) -> None:
        super().__init__()
        arguments = (width, feed_forward, activation_dropout, attention_bias)
        self.feed_forward1, self.feed_forward2 = FeedForward(*arguments), FeedForward(*arguments)
        self.self_attn = RelativeAttention(width, heads, attention_dropout, attention_bias)
        self.conv = Convolution(width, kernel, convolution_bias)
        self.norm_feed_forward1, self.norm_feed_forward2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.norm_self_att, self.norm_conv, self.norm_out = (nn.LayerNorm(width) for _ in range(3))
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, lengths: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        branch = self.feed_forward1(self.norm_feed_forward1(x))
        x = x + 0.5 * self.dropout(branch)
        x = x + self.dropout(self.self_attn(self.norm_self_att(x), positions, mask))
        x = x + self.dropout(self.conv(self.norm_conv(x), lengths))
        branch = self.feed_forward2(self.norm_feed_forward2(x))
        x = x + 0.5 * self.dropout(branch)
        y: Tensor = self.norm_out(x)
        return y


class FastConformer(LogMelEncoder):
    """Log-mel frames, subsampled by ``subsampling`` (a power of 2), then ``layers`` Conformer layers.

    - ``kernel`` is the number of frames of a layer's depthwise convolution. ``channels`` is the number of
      channels of the subsampling.
    - ``dropout`` follows the subsampling, and ``position_dropout`` applies to the relative positions.
    - ``residual_dropout`` applies to each branch of a layer. NeMo has it, transformers does not.
    - ``layer_drop`` is the probability with which an update skips a layer, as in ``Transformer``.
    - ``scale_input`` multiplies the subsampled frames by the square root of ``width``.
    - ``context`` [left, right] limits attention to this number of frames on each side, and null allows all
      frames.

    Raises ValueError for values out of range.
    """

    shard_units = ("subsampling", "layers")  # Sharded runs gather the parameters of one layer at a time.
    _update_seed = 0

    def __init__(
        self,
        features: LogMel,
        augment: Augment | None = None,
        width: int = 1024,
        layers: int = 24,
        feed_forward: int = 4096,
        heads: int = 8,
        kernel: int = 9,
        subsampling: int = 8,
        channels: int = 256,
        dropout: float = 0.1,
        position_dropout: float = 0.0,
        attention_dropout: float = 0.1,
        activation_dropout: float = 0.1,
        residual_dropout: float = 0.0,
        layer_drop: float = 0.0,
        scale_input: bool = True,
        attention_bias: bool = True,
        convolution_bias: bool = True,
        context: Sequence[int] | None = None,
    ) -> None:
        super().__init__(features, augment)
        require_shares(dropout=dropout, position_dropout=position_dropout, layer_drop=layer_drop)
        require_shares(attention_dropout=attention_dropout, activation_dropout=activation_dropout)
        require_shares(residual_dropout=residual_dropout)
        require_least(1, width=width, layers=layers, feed_forward=feed_forward)
        require_least(1, heads=heads, channels=channels)
        if width % heads or width % 2:
            raise ValueError(f"width is {width}: it must be even and a multiple of heads, {heads}")
        _check_frame_settings(kernel, subsampling, features.features, context)
        self.subsampling = Subsampling(features.features, subsampling, channels, width)
        new_layer = partial(ConformerLayer, width, feed_forward, heads, kernel, residual_dropout)
        new_layer = partial(
            new_layer, attention_dropout, activation_dropout, attention_bias, convolution_bias
        )
        self.layers = nn.ModuleList(new_layer() for _ in range(layers))
        self.dropout, self.position_dropout = Dropout(dropout), Dropout(position_dropout)
        self.width, self.factor, self.context = width, subsampling, context
        self.scale = math.sqrt(width) if scale_input else 1.0
        self.layer_drop = layer_drop

    def advance(self, step: int, seed: int) -> None:
        self._update_seed = seed

    def prepare(self, batch: Batch, seed: int) -> Batch:
        """Return the batch with ``keep`` (L,), the factors of layer drop, in ``extra``. Only for training."""
        if not (self.training and self.layer_drop):
            return batch
        keep = layer_drop_factors(self._update_seed, len(self.layers), self.layer_drop)
        return replace(batch, extra=batch.extra | {"keep": keep})

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        x, lengths = self.augmented(batch)
        keep = batch.extra.get("keep") if self.training else None
        return self.contextualise(x, lengths, keep)

    def contextualise(
        self, features: Tensor, lengths: Tensor, keep: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Map log-mel features (B, T', M) of ``lengths`` (B,) to frames (B, T, D) and their lengths (B,).

        T is ceil(T' / subsampling). ``keep`` (L,) is 0 for layers to drop, else 1.
        """
        x, lengths = self.subsampling(features, lengths)
        x = self.dropout(x * self.scale)
        positions = self.position_dropout(_positions(x))
        mask = self._attention_mask(lengths, x.shape[1])
        for index, layer in enumerate(self.layers):
            y = layer(x, lengths, positions, mask)
            if keep is not None:
                factor = keep[index].to(x.dtype)
                y = y * factor + x * (1 - factor)
            x = y
        return x, lengths

    def _attention_mask(self, lengths: Tensor, frames: int) -> Tensor:
        """Return the mask of attention: (B, 1, T, T), or (B, 1, 1, T) if all queries attend to the same keys.

        It is 0 for keys to which a query may attend. ``lengths`` (B,) are the frames of each row, and
        ``frames`` is T.
        """
        frame = torch.arange(frames, device=lengths.device)
        # A row without any valid frame attends to its first frame, because softmax over no key is NaN.
        is_allowed = (frame < lengths.clamp(min=1)[:, None])[:, None]
        if self.context is not None:
            left, right = self.context
            offset = frame - frame[:, None]  # (T, T) the frame of the key minus the frame of the query
            is_near = (offset >= -left) & (offset <= right)
            # A frame attends to itself, because a frame beyond the row's end may have no other key.
            is_allowed = (is_allowed & is_near) | (offset == 0)
        allowed = is_allowed[:, None].to(torch.float32)
        return (1.0 - allowed) * FORBIDDEN

    def frames(self, samples: int) -> int:
        return -(-self.features.frames(samples) // self.factor)  # rounded up

    def activation_bytes(self) -> float:
        # The tensors that autograd stores were counted with saved-tensor hooks for rows of 15 s. A frame of a
        # layer stores 24 widths, 3 hidden widths of each feed-forward, and 14 bytes per head and key. A value
        # has 4 bytes.
        feature_rate = 1 / self.features.frame_seconds  # log-mel frames per second
        channels = self.subsampling.linear.in_features
        front_end_values = feature_rate * (6 * self.features.features + channels * self.factor * 0.75)
        layer = self.layers[0]
        assert isinstance(layer, ConformerLayer)
        layer_values = 24.0 * self.width + 6 * layer.feed_forward1.linear1.out_features
        key_values = 14 / 4 * layer.self_attn.heads
        layer_values += key_values * 15 * feature_rate / self.factor
        all_layer_values = feature_rate / self.factor * len(self.layers) * layer_values
        return 4 * (front_end_values + all_layer_values)


def _check_frame_settings(kernel: int, subsampling: int, mels: int, context: Sequence[int] | None) -> None:
    """Raise ValueError for a kernel, a subsampling factor or an attention context that is not valid."""
    if kernel < 1 or kernel % 2 == 0:
        raise ValueError(f"kernel is {kernel}: it must be odd")
    if subsampling < 2 or subsampling.bit_count() > 1 or mels % subsampling:
        raise ValueError(
            f"subsampling is {subsampling}: it must be a power of 2 that divides the {mels} features"
        )
    if context is not None and (len(context) != 2 or min(context) < 0):
        raise ValueError(f"context is {list(context)}: it must be two numbers of frames, or null")


def _positions(x: Tensor) -> Tensor:
    """Return the embeddings (2T − 1, D) of the distances T − 1 to 1 − T for frames ``x`` (B, T, D).

    Sine and cosine alternate, with D / 2 frequencies from 1 to almost 1 / 10000 (Vaswani et al., 2017).
    """
    frames, width = x.shape[1:]
    distance = torch.arange(frames - 1, -frames, -1, device=x.device, dtype=torch.float32)
    even_channel = torch.arange(0, width, 2, device=x.device, dtype=torch.float32)
    frequencies = torch.exp(even_channel * (-math.log(10000.0) / width))
    angle = distance[:, None] * frequencies
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(1).to(x.dtype)
