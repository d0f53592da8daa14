"""Transformer encoder with a convolutional positional embedding (wav2vec 2.0).

Legend: B rows, T frames, D model width, H heads, k kernel taps, L layers.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speechtrain.compute_policy import ComputePolicy, PolicyAware
from speechtrain.errors import ConfigError, require_least
from speechtrain.nn.full_precision import at_least_fp32

FORBIDDEN = -(2.0**30)  # softmax turns this score into exactly 0, and stays finite where a row has no key


class PositionalConv(nn.Module):
    """Relative positional embedding: a grouped convolution over time, then GELU, (B, T, D) to (B, T, D).

    The weight is ``weight_g · weight_v / ||weight_v||``; the norm is per kernel tap, over both channel
    dimensions. It is computed here, without torch's parametrization: the parameters keep the names of the
    published checkpoints, and saving needs no extra steps. The convolution pads k // 2 frames on both
    sides and drops the last output where k is even.
    """

    def __init__(self, width: int, kernel: int, groups: int) -> None:
        super().__init__()
        self.kernel, self.groups = kernel, groups
        weight = torch.empty(width, width // groups, kernel)
        nn.init.normal_(weight, std=math.sqrt(4.0 / (kernel * width)))
        self.weight_g = nn.Parameter(weight.square().sum((0, 1), keepdim=True).sqrt())
        self.weight_v = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.zeros(width))

    def weight(self) -> Tensor:
        """The normalised weight (D, D / groups, k)."""
        norm = self.weight_v.square().sum((0, 1), keepdim=True).sqrt()
        return self.weight_v * (self.weight_g / norm)

    def forward(self, x: Tensor) -> Tensor:
        padding = self.kernel // 2
        y = F.conv1d(x.transpose(1, 2), self.weight(), self.bias, padding=padding, groups=self.groups)
        return F.gelu(y[:, :, : x.shape[1]]).transpose(1, 2)


class Attention(nn.Module, PolicyAware):
    """Multi-head self-attention with separate projections; ``valid`` (B, T) selects the keys.

    ``fused`` is torch's own operation. The other implementation computes the same by operations that a
    lazy device records without a graph break, and its softmax is fp32 or wider.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.heads, self.dropout = heads, dropout
        self.scale = (width // heads) ** -0.5
        self.fused = True

    def apply_policy(self, policy: ComputePolicy) -> None:
        self.fused = policy.attention == "sdpa"

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        rows, frames, width = x.shape
        split = (rows, frames, self.heads, width // self.heads)
        q, k, v = (part(x).view(split).transpose(1, 2) for part in (self.query, self.key, self.value))
        attend = self._fused if self.fused else self._written
        y = attend(q, k, v, valid[:, None, None, :])
        attended: Tensor = self.output(y.transpose(1, 2).reshape(rows, frames, width))
        return attended

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, attn_mask=valid, dropout_p=dropout)

    def _written(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor) -> Tensor:
        scores = at_least_fp32(torch.matmul(q * self.scale, k.transpose(2, 3)))
        weights = scores.masked_fill(~valid, FORBIDDEN).softmax(-1)
        return torch.matmul(F.dropout(weights, self.dropout, self.training).to(v.dtype), v)


class LayerNorm(nn.LayerNorm):
    """In the input's dtype, also where the weights are gathered in a narrower one."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class TransformerLayer(nn.Module):
    """Self-attention and feed-forward with residuals, (B, T, D) to (B, T, D).

    Post-norm normalises after each residual sum, pre-norm before each branch; ``norm`` is the feed-forward's.
    """

    computes_narrow = True  # its weights are used by autocast's products, or by layer norms, alone

    def __init__(
        self,
        width: int,
        feed_forward: int,
        heads: int,
        pre_norm: bool,
        dropout: float,
        attention_dropout: float,
        activation_dropout: float,
    ) -> None:
        super().__init__()
        self.attention = Attention(width, heads, attention_dropout)
        self.attention_norm = LayerNorm(width)
        self.feed_forward_in = nn.Linear(width, feed_forward)
        self.feed_forward_out = nn.Linear(feed_forward, width)
        self.norm = LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.activation_dropout = nn.Dropout(activation_dropout)
        self.pre_norm = pre_norm

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        if self.pre_norm:
            x = x + self.dropout(self.attention(self.attention_norm(x), valid))
            return x + self._feed_forward(self.norm(x))
        x = self.attention_norm(x + self.dropout(self.attention(x, valid)))
        y: Tensor = self.norm(x + self._feed_forward(x))
        return y

    def _feed_forward(self, x: Tensor) -> Tensor:
        hidden = self.activation_dropout(F.gelu(self.feed_forward_in(x)))
        y: Tensor = self.dropout(self.feed_forward_out(hidden))
        return y


class Transformer(nn.Module):
    """Positional convolution and L layers: (B, T, D) and lengths (B,) to (B, T, D).

    Frames beyond a row's length are set to 0 before the positional convolution and are never keys;
    their output has no meaning. Post-norm (base models) normalises after the positional convolution,
    ``pre_norm`` (large models) after the last layer. Linear weights start as normal(0, 0.02), biases as 0.

    Layer drop multiplies a layer by a factor: with ``keep`` (L,) of zeros and ones, layer i returns
    ``keep[i] · layer(x) + (1 − keep[i]) · x``, exactly one of the two. One graph serves every draw, and
    every parameter has a gradient in each step, as static devices and data-parallel wrappers need.
    Upstream skips the layer instead. The difference: here a dropped layer still costs its compute, and
    its gradients are zeros instead of missing, so Adam's moments and weight decay still apply in that
    step. Upstream's optimizer does not update a layer that the whole update dropped.

    ``length_multiple`` pads T to a multiple inside the layers (masked) and removes the surplus after them.
    Raises ConfigError for values out of range.
    """

    shard_units = ("layers",)  # sharded runs gather the parameters of one layer at a time

    def __init__(
        self,
        width: int,
        layers: int,
        feed_forward: int,
        heads: int,
        pre_norm: bool = False,
        dropout: float = 0.1,
        attention_dropout: float = 0.1,
        activation_dropout: float = 0.0,
        position_kernel: int = 128,
        position_groups: int = 16,
        length_multiple: int = 1,
    ) -> None:
        super().__init__()
        sizes = {"width": width, "layers": layers, "feed_forward": feed_forward, "heads": heads}
        sizes |= {"position_kernel": position_kernel, "position_groups": position_groups}
        require_least(1, **sizes, length_multiple=length_multiple)
        for name in ("heads", "position_groups"):
            if width % sizes[name]:
                raise ConfigError(f"{name} is {sizes[name]}; it must divide width, {width}")
        self.position = PositionalConv(width, position_kernel, position_groups)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        layer = partial(TransformerLayer, width, feed_forward, heads, pre_norm=pre_norm, dropout=dropout)
        layer = partial(layer, attention_dropout=attention_dropout, activation_dropout=activation_dropout)
        self.layers = nn.ModuleList(layer() for _ in range(layers))
        self.pre_norm = pre_norm
        self.length_multiple = length_multiple
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor, lengths: Tensor, keep: Tensor | None = None) -> Tensor:
        """Encode frames (B, T, D) of lengths (B,); ``keep`` (L,) are layer-drop factors, None keeps all."""
        frames = x.shape[1]
        surplus = -frames % self.length_multiple
        position = torch.arange(frames + surplus, device=x.device)
        # a row without any valid frame attends to its first one: softmax over no key is NaN
        valid = position < lengths.clamp(min=1)[:, None]
        x = x * (position[:frames] < lengths[:, None]).to(x.dtype)[:, :, None]
        x = x + self.position(x)
        x = self.dropout(x if self.pre_norm else self.norm(x))
        x = F.pad(x, (0, 0, 0, surplus)) if surplus else x
        for index, layer in enumerate(self.layers):
            y = layer(x, valid)
            if keep is not None:
                kept = keep[index].to(x.dtype)
                y = y * kept + x * (1 - kept)
            x = y
        x = x[:, :frames]
        return self.norm(x) if self.pre_norm else x
