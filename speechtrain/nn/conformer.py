"""The parts of a FastConformer (Rekesh et al., ASRU 2023): subsampling and Conformer layers.

Strided depthwise-separable convolutions over the log-mel frames, then Conformer layers (Gulati et al., 2020)
with relative positions (Dai et al., 2019, section 3.3). The parameters have the names of Hugging Face's
``ParakeetEncoder``, so published weights load without a conversion of names.

Legend: B rows, T frames, M mel bins, D width, H heads, Q queries, K keys, k kernel taps. The distance of a
query and a key is the frame of the query minus the frame of the key.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from speechtrain.compute_policy import PLAIN, ComputePolicy, PolicyAware
from speechtrain.nn.dropout import Dropout
from speechtrain.nn.full_precision import at_least_fp32
from speechtrain.nn.norm import MaskedBatchNorm
from speechtrain.nn.transformer import FORBIDDEN

Context = Sequence[int]
"""[left, chunk, right]: the frames to which a frame attends, as ``in_context`` explains."""

_SLICE_VALUES = 2**22  # values of a slice of rows after the first convolution, which are 16 MB


class Halving(nn.Conv2d):
    """A 3 × 3 convolution that halves frames and bins: (B, ·, T, M) to (B, ·, ceil(T / 2), ceil(M / 2)).

    Output j reads the inputs 2j − 1 to 2j + 1.
    """

    def __init__(self, channels: int, output_channels: int, groups: int = 1) -> None:
        super().__init__(channels, output_channels, 3, stride=2, padding=1, groups=groups)

    def halved(self, size: Any) -> Any:
        """Return the number of outputs for ``size`` inputs, which is an int or a tensor of lengths."""
        return _half(size + 1)


class CausalHalving(Halving):
    """Halves frames and bins to T // 2 + 1 and M // 2 + 1. Output j reads the inputs 2j − 2 to 2j."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (1, 0, 1, 0)))  # One more zero before the first bin and frame.

    def halved(self, size: Any) -> Any:
        return _half(size + 2)


def _half(size: Any) -> Any:
    return torch.div(size, 2, rounding_mode="floor") if isinstance(size, Tensor) else size // 2


class Subsampling(nn.Module, PolicyAware):
    """Strided convolutions over time and frequency: (B, T, M) to (B, T', D), T' about T / factor.

    The first convolution is dense. Each of the others is depthwise, then pointwise. Frames beyond a row's
    length are 0 after each convolution. ``halving`` is the class of the strided convolutions.

    On CPUs, a batch is convolved in slices of rows, and backward computes the values of a slice again. At 256
    channels, storing these values would take more than half of a small model's memory.
    """

    def __init__(
        self, mels: int, factor: int, channels: int, width: int, halving: type[Halving] = Halving
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList([halving(1, channels), nn.ReLU(inplace=True)])
        halvings = factor.bit_length() - 1  # ``factor`` is a power of 2.
        for _ in range(halvings - 1):
            self.layers += [
                halving(channels, channels, groups=channels),
                nn.Conv2d(channels, channels, 1),
                nn.ReLU(inplace=True),
            ]
        self.mels = mels
        self.linear = nn.Linear(channels * self.subsampled(mels), width)
        self.values = channels * mels // 4  # values after the first convolution, for each input frame
        self.apply_policy(PLAIN)

    def apply_policy(self, policy: ComputePolicy) -> None:
        self._is_sliced = policy.feature_frames > 0  # This is the case on CPUs only.

    def subsampled(self, size: int) -> int:
        """Return the number of frames, or of bins, that remain of ``size``."""
        for layer in self.layers:
            if isinstance(layer, Halving):
                size = layer.halved(size)
        return size

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
        """Return the output of the convolutions (B, T', channels · bins) and lengths (B,)."""
        x = x[:, None]
        for layer in self.layers:
            x = layer(x)
            if isinstance(layer, nn.Conv2d):
                if isinstance(layer, Halving):
                    lengths = layer.halved(lengths)
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
        """Return the attention's output (B, T, D) for frames (B, T, D). ``attend`` explains the arguments."""
        return self.attend(*self.project(x), positions, mask)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the query, key and value (B, T, H, D / H) of each frame (B, T, D)."""
        rows, frames, width = x.shape
        shape = (rows, frames, self.heads, width // self.heads)
        q, k, v = (layer(x).view(shape) for layer in (self.q_proj, self.k_proj, self.v_proj))
        return q, k, v

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor, mask: Tensor
    ) -> Tensor:
        """Return the outputs (B, Q, D) of ``queries`` (B, Q, H, ·) for ``keys`` and ``values`` (B, K, H, ·).

        ``positions`` (Q + K − 1, D) are the embeddings of the distances from (last query, first key) to
        (first query, last key). ``mask``, which broadcasts to (B, 1, Q, K), is added to the scores. It is 0
        for keys to which a query may attend.
        """
        rows, frames, heads, head_width = queries.shape
        # ``_distances_to_keys`` needs a first column, whose scores are not used.
        distance_keys = F.pad(self.relative_k_proj(positions), (0, 0, 1, 0))
        distance_keys = distance_keys.view(1, -1, heads, head_width)
        weights = (self._scores(queries, keys, distance_keys) + mask).softmax(-1).to(values.dtype)
        context = torch.matmul(self.dropout(weights), values.transpose(1, 2))
        y: Tensor = self.o_proj(context.transpose(1, 2).reshape(rows, frames, heads * head_width))
        return y

    def _scores(self, queries: Tensor, keys: Tensor, distance_keys: Tensor) -> Tensor:
        """Return the score (B, H, Q, K) of each query with each key, in fp32 or wider."""
        key_scores = _scaled_scores(queries + self.bias_u, keys)
        distance_scores = _scaled_scores(queries + self.bias_v, distance_keys)
        return at_least_fp32(key_scores) + at_least_fp32(_distances_to_keys(distance_scores, keys.shape[1]))


def _scaled_scores(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the scaled dot products (B, H, Q, K) of queries (B, Q, H, ·) and keys (B or 1, K, H, ·)."""
    scaled = queries * queries.shape[-1] ** -0.5
    return torch.matmul(scaled.transpose(1, 2), keys.permute(0, 2, 3, 1))


def _distances_to_keys(scores: Tensor, keys: int) -> Tensor:
    """Convert scores (B, H, Q, Q + K) of distances to scores of ``keys`` K keys: (B, H, Q, K).

    The first column has no meaning. The others have the distances from (last query, first key) to (first
    query, last key). Query i needs K columns from column Q − i on. In the flattened scores without the first
    Q values, rows of Q + K − 1 values begin at these columns. So the result is a view, and nothing is copied.
    """
    rows, heads, queries, columns = scores.shape
    skewed = scores.flatten(2)[..., queries:].view(rows, heads, queries, columns - 1)
    return skewed[..., :keys]


class FeedForward(nn.Module):
    """Two linear layers with SiLU and dropout between them: (…, D) to (…, D)."""

    def __init__(self, width: int, hidden: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(width, hidden, bias=bias), nn.Linear(hidden, width, bias=bias)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear2(self.dropout(F.silu(self.linear1(x))))
        return y


class GatedConvolution(nn.Module, ABC):
    """A Conformer's convolution: gated pointwise, depthwise over k frames, ``norm``, SiLU, pointwise.

    ``padding`` are the zeros at both ends of the depthwise convolution.
    """

    def __init__(self, width: int, kernel: int, bias: bool, padding: int, norm: nn.Module) -> None:
        super().__init__()
        self.pointwise_conv1 = nn.Conv1d(width, 2 * width, 1, bias=bias)
        self.depthwise_conv = nn.Conv1d(width, width, kernel, padding=padding, groups=width, bias=bias)
        self.norm = norm
        self.pointwise_conv2 = nn.Conv1d(width, width, 1, bias=bias)
        self.history = kernel - 1 - padding  # frames that are read before a frame

    def gated(self, x: Tensor) -> Tensor:
        """Return the input (B, T, D) of the depthwise convolution, a gated linear unit of ``x`` (B, T, D)."""
        value, gate = _pointwise(self.pointwise_conv1, x).chunk(2, -1)
        return value * gate.sigmoid()

    @abstractmethod
    def convolved(self, x: Tensor, chunk: int) -> Tensor:
        """Return the output (B, T, D) for gated frames (B, ``history`` + T, D). The first is a chunk's."""


class Convolution(GatedConvolution):
    """The Conformer's convolution, with a BatchNorm.

    The statistics of the BatchNorm count only valid frames. In transformers' model, padding also counts.

    With ``chunk``, the frames are divided into chunks of this length, and the depthwise convolution reads 0
    in place of the frames after the chunk of its frame (dynamic chunk convolution, Li et al., ICASSP 2023).
    So the same weights serve whole recordings and streams.
    """

    def __init__(self, width: int, kernel: int, bias: bool) -> None:
        super().__init__(width, kernel, bias, kernel // 2, MaskedBatchNorm(width))

    def forward(self, x: Tensor, lengths: Tensor, chunk: int | Tensor | None = None) -> Tensor:
        """Convolve frames (B, T, D) of rows with ``lengths`` (B,)."""
        x = self.gated(x) * _valid_frames(x, lengths)
        if chunk is None:
            return self._projected(self.depthwise_conv(x.transpose(1, 2)).transpose(1, 2), lengths)
        return self._projected(self._depthwise(F.pad(x, (0, 0, self.history, 0)), chunk), lengths)

    def convolved(self, x: Tensor, chunk: int) -> Tensor:
        y = self._depthwise(x, chunk)
        lengths = torch.full((1,), y.shape[1], device=y.device)
        return self._projected(y, lengths)

    def _depthwise(self, x: Tensor, chunk: int | Tensor) -> Tensor:
        """Return the depthwise convolution (B, T, D) in chunks of frames ``x`` (B, k // 2 + T, D)."""
        weight, history = self.depthwise_conv.weight, self.history
        frames = x.shape[1] - history
        past = weight[:, :, : history + 1]
        y = F.conv1d(x.transpose(1, 2), past, self.depthwise_conv.bias, groups=len(weight)).transpose(1, 2)
        x = F.pad(x, (0, 0, 0, history))
        frame = torch.arange(frames, device=x.device)
        chunk_of_frame = torch.div(frame, chunk, rounding_mode="floor")
        for distance in range(1, history + 1):
            chunk_of_later = torch.div(frame + distance, chunk, rounding_mode="floor")
            is_in_chunk = (chunk_of_later == chunk_of_frame)[:, None].to(x.dtype)
            tap = history + distance
            y = torch.addcmul(y, x[:, tap : tap + frames], weight[:, 0, tap] * is_in_chunk)
        return y

    def _projected(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Return the module's output (B, T, D) for the output of the depthwise convolution."""
        return _pointwise(self.pointwise_conv2, F.silu(self.norm(at_least_fp32(x), lengths)))


class CausalConvolution(GatedConvolution):
    """The convolution of streaming Conformers: a frame reads the k − 1 frames before it and none after it.

    LayerNorm replaces BatchNorm, as in NeMo's streaming models. Chunks do not matter.
    """

    def __init__(self, width: int, kernel: int, bias: bool) -> None:
        super().__init__(width, kernel, bias, 0, nn.LayerNorm(width))

    def forward(self, x: Tensor, lengths: Tensor, chunk: int | Tensor | None = None) -> Tensor:
        """Convolve frames (B, T, D) of rows with ``lengths`` (B,)."""
        x = self.gated(x) * _valid_frames(x, lengths)
        return self.convolved(F.pad(x, (0, 0, self.history, 0)), chunk)

    def convolved(self, x: Tensor, chunk: int | Tensor | None) -> Tensor:
        x = self.depthwise_conv(x.transpose(1, 2)).transpose(1, 2)
        return _pointwise(self.pointwise_conv2, F.silu(self.norm(x)))


def _valid_frames(x: Tensor, lengths: Tensor) -> Tensor:
    """Return (B, T, 1): 1 for the frames of ``x`` (B, T, D) before ``lengths`` (B,), and 0 for the others."""
    is_valid = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
    return is_valid[..., None].to(x.dtype)


def _pointwise(conv: nn.Conv1d, x: Tensor) -> Tensor:
    """Apply a convolution with a kernel of 1 to ``x`` (B, T, D).

    A matmul computes it, because Conv1d needs the channels before the frames, which costs two copies.
    """
    return F.linear(x, conv.weight[:, :, 0], conv.bias)


class ConformerLayer(nn.Module):
    """Feed-forward, attention, convolution, feed-forward, LayerNorm: (B, T, D) to (B, T, D).

    Each part is a residual branch behind a LayerNorm. The feed-forward branches count half (Gulati et al.).
    ``new_convolution`` makes the convolution, which reads ``chunk``.
    """

    def __init__(
        self,
        width: int,
        feed_forward: int,
        heads: int,
        new_convolution: Callable[[], GatedConvolution],
        dropout: float,
        attention_dropout: float,
        activation_dropout: float,
        attention_bias: bool,
    ) -> None:
        super().__init__()
        arguments = (width, feed_forward, activation_dropout, attention_bias)
        self.feed_forward1, self.feed_forward2 = FeedForward(*arguments), FeedForward(*arguments)
        self.self_attn = RelativeAttention(width, heads, attention_dropout, attention_bias)
        self.conv = new_convolution()
        self.norm_feed_forward1, self.norm_feed_forward2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.norm_self_att, self.norm_conv, self.norm_out = (nn.LayerNorm(width) for _ in range(3))
        self.dropout = Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        lengths: Tensor,
        positions: Tensor,
        mask: Tensor,
        chunk: int | Tensor | None = None,
    ) -> Tensor:
        x = self.before_attention(x)
        x = x + self.dropout(self.self_attn(self.norm_self_att(x), positions, mask))
        x = x + self.dropout(self.conv(self.norm_conv(x), lengths, chunk))
        return self.after_convolution(x)

    def step(
        self,
        x: Tensor,
        keys_values: Tensor,
        gated: Tensor,
        mask: Tensor,
        frames: int,
        chunk: int,
        is_valid: Tensor | float = 1.0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output (B, Q, D) for the first Q ``frames`` of ``x`` (B, T, D), a part of a stream.

        - ``keys_values`` (B, K, 2, H, ·) are the keys and values of frames before ``x``. The second result
          also has the keys and values of ``x``.
        - ``gated`` (B, ·, D) are the inputs of the convolution before ``x``. The third result also has its
          inputs of the Q frames.
        - ``mask`` broadcasts to (B, 1, Q, K + T). The convolution reads ``chunk``.
        - ``is_valid`` (B, Q, 1) is 0 for the frames after a recording, which no convolution may read.
        """
        stored = keys_values.shape[1]
        x = self.before_attention(x)
        queries, *new = self.self_attn.project(self.norm_self_att(x))
        keys_values = torch.cat([keys_values, torch.stack(new, dim=2)], dim=1)
        keys, values = keys_values.unbind(2)
        distances = embedded_distances(stored + frames - 1, 1 - x.shape[1], x)
        x = x[:, :frames] + self.self_attn.attend(queries[:, :frames], keys, values, distances, mask)
        gated = torch.cat([gated, self.conv.gated(self.norm_conv(x)) * is_valid], dim=1)
        y = self.after_convolution(x + self.conv.convolved(gated, chunk))
        return y, keys_values, gated

    def before_attention(self, x: Tensor) -> Tensor:
        """Add the first feed-forward branch to ``x`` (B, T, D)."""
        branch = self.feed_forward1(self.norm_feed_forward1(x))
        y: Tensor = x + 0.5 * self.dropout(branch)
        return y

    def after_convolution(self, x: Tensor) -> Tensor:
        """Add the second feed-forward branch to ``x`` (B, T, D), and normalise the sum."""
        branch = self.feed_forward2(self.norm_feed_forward2(x))
        x = x + 0.5 * self.dropout(branch)
        y: Tensor = self.norm_out(x)
        return y


def in_context(queries: Tensor, keys: Tensor, context: Context | Tensor) -> Tensor:
    """Return whether query frames (Q,) may attend to key frames (K,): (Q, K). Frames are their numbers.

    ``context`` [left, chunk, right] divides the frames into chunks. A frame attends to its chunk, ``left``
    frames before the chunk and ``right`` frames after it. With chunk 1, this is a sliding window.
    """
    left, chunk, right = context
    start = torch.div(queries, chunk, rounding_mode="floor") * chunk
    first_key, end_key = start - left, start + chunk + right
    return (keys >= first_key[:, None]) & (keys < end_key[:, None])


def as_mask(is_allowed: Tensor) -> Tensor:
    """Return what attention adds to its scores: 0 where it ``is_allowed``, else FORBIDDEN."""
    return (1.0 - is_allowed.to(torch.float32)) * FORBIDDEN


def embedded_distances(first: int, last: int, x: Tensor) -> Tensor:
    """Return the embeddings (·, D) of the distances from ``first`` down to ``last``, for frames (B, T, D).

    Sine and cosine alternate, with D / 2 frequencies from 1 to almost 1 / 10000 (Vaswani et al., 2017).
    """
    width = x.shape[2]
    distance = torch.arange(first, last - 1, -1, device=x.device, dtype=torch.float32)
    even_channel = torch.arange(0, width, 2, device=x.device, dtype=torch.float32)
    frequencies = torch.exp(even_channel * (-math.log(10000.0) / width))
    angle = distance[:, None] * frequencies
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(1).to(x.dtype)
