"""Transformer encoder with a convolutional positional embedding (wav2vec 2.0).

Legend: B rows, T frames, D model width, k kernel taps, L layers.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speechtrain.compute_policy import ComputePolicy, PolicyAware
from speechtrain.errors import ConfigError, require_least
from speechtrain.nn.dropout import Dropout
from speechtrain.nn.full_precision import at_least_fp32

# The score of a key that a query may not attend to. Its softmax is exactly 0. Unlike −inf, it does not cause
# NaN in a row without any key.
FORBIDDEN = -(2.0**30)


class PositionalConv(nn.Module):
    """Relative positional embedding: a grouped convolution over time, then GELU, (B, T, D) to (B, T, D).

    The weight is ``weight_g · weight_v / ||weight_v||``, with one norm per kernel tap, over both channel
    dimensions. It is computed here, without torch's parametrization, so the parameters keep the names of the
    published checkpoints, and saving needs no extra steps. The convolution pads k // 2 frames on both
    sides. If k is even, the last output is dropped.
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
        """Return the normalised weight (D, D / groups, k)."""
        norm = self.weight_v.square().sum((0, 1), keepdim=True).sqrt()
        return self.weight_v * (self.weight_g / norm)

    def forward(self, x: Tensor) -> Tensor:
        padding = self.kernel // 2
        y = F.conv1d(x.transpose(1, 2), self.weight(), self.bias, padding=padding, groups=self.groups)
        return F.gelu(y[:, :, : x.shape[1]]).transpose(1, 2)


class Attention(nn.Module, PolicyAware):
    """Multi-head self-attention with separate projections.

    With ``fused``, torch's own operation computes the attention. The other implementation consists of
    operations that a lazy device records without a graph break, and its softmax is fp32 or wider.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.heads = heads
        self.dropout = Dropout(dropout)
        self.scale = (width // heads) ** -0.5
        self.fused = True

    def apply_policy(self, policy: ComputePolicy) -> None:
        self.fused = policy.attention == "sdpa"

    def forward(self, x: Tensor, is_key: Tensor) -> Tensor:
        """Return the attention's output (B, T, D) for frames (B, T, D), over keys where ``is_key`` (B, T)."""
        rows, frames, width = x.shape
        shape = (rows, frames, self.heads, width // self.heads)
        projections = [self.query(x), self.key(x), self.value(x)]
        q, k, v = (projection.view(shape).transpose(1, 2) for projection in projections)
        # On a CPU, torch's operation with dropout is not fused, and draws a mask slowly.
        draws_words = self.training and self.dropout.p > 0 and self.dropout.uses_words
        is_key = is_key[:, None, None, :]
        if self.fused and not draws_words:
            dropout = self.dropout.p if self.training else 0.0
            context = F.scaled_dot_product_attention(q, k, v, attn_mask=is_key, dropout_p=dropout)
        else:
            scores = at_least_fp32(torch.matmul(q * self.scale, k.transpose(2, 3)))
            weights = scores.masked_fill(~is_key, FORBIDDEN).softmax(-1)
            context = torch.matmul(self.dropout(weights).to(v.dtype), v)
        y: Tensor = self.output(context.transpose(1, 2).reshape(rows, frames, width))
        return y


class LayerNorm(nn.LayerNorm):
    """LayerNorm in the type of its input, even if sharding gathers the weights in a narrower type."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class TransformerLayer(nn.Module):
    """Self-attention and feed-forward with residuals, (B, T, D) to (B, T, D).

    With ``pre_norm``, a LayerNorm precedes each branch. Otherwise a LayerNorm follows each residual sum.
    ``attention_norm`` belongs to the attention, and ``norm`` to the feed-forward branch.
    """

    # Sharding may gather the weights in a narrower type, because only matmuls under autocast and the layer
    # norms use them.
    computes_narrow = True

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
        self.dropout = Dropout(dropout)
        self.activation_dropout = Dropout(activation_dropout)
        self.pre_norm = pre_norm

    def forward(self, x: Tensor, is_key: Tensor) -> Tensor:
        if self.pre_norm:
            x = x + self.dropout(self.attention(self.attention_norm(x), is_key))
            return x + self._feed_forward(self.norm(x))
        x = self.attention_norm(x + self.dropout(self.attention(x, is_key)))
        y: Tensor = self.norm(x + self._feed_forward(x))
        return y

    def _feed_forward(self, x: Tensor) -> Tensor:
        hidden = self.activation_dropout(F.gelu(self.feed_forward_in(x)))
        y: Tensor = self.dropout(self.feed_forward_out(hidden))
        return y


class Transformer(nn.Module):
    """Positional convolution and L layers: (B, T, D) and lengths (B,) to (B, T, D).

    Frames beyond a row's length are set to 0 before the positional convolution and are never keys. Their
    output has no meaning. With ``pre_norm`` (large models), a LayerNorm follows the last layer. Otherwise
    (base models) it follows the positional convolution. Linear weights start as normal(0, 0.02), biases as 0.

    Layer drop: with ``keep`` (L,) of zeros and ones, layer i returns ``keep[i] · layer(x) + (1 − keep[i]) ·
    x``, which is exactly ``layer(x)`` or ``x``. So the graph is the same for every ``keep``, as static
    devices need, and every parameter has a gradient in each step, as data-parallel wrappers need. Upstream
    skips the layer instead. There are two differences:

    - A dropped layer still costs its compute.
    - The gradients of a dropped layer are zeros instead of missing, so Adam's moments and weight decay still
      apply in that step. Upstream's optimizer does not update a layer that the whole update dropped.

    Inside the layers, T is padded to a multiple of ``length_multiple`` with masked frames.

    Raises ConfigError for values out of range.
    """

    shard_units = ("layers",)  # Sharded runs gather the parameters of one layer at a time.

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
        require_least(1, width=width, layers=layers, feed_forward=feed_forward)
        require_least(1, heads=heads, position_groups=position_groups)
        require_least(1, position_kernel=position_kernel, length_multiple=length_multiple)
        for name, divisor in {"heads": heads, "position_groups": position_groups}.items():
            if width % divisor:
                raise ConfigError(f"{name} is {divisor}. It must divide width, {width}")
        self.position = PositionalConv(width, position_kernel, position_groups)
        self.norm = nn.LayerNorm(width)
        self.dropout = Dropout(dropout)
        dropouts = {"dropout": dropout, "attention_dropout": attention_dropout}
        dropouts["activation_dropout"] = activation_dropout
        self.layers = nn.ModuleList()
        for _ in range(layers):
            self.layers.append(TransformerLayer(width, feed_forward, heads, pre_norm, **dropouts))
        self.pre_norm = pre_norm
        self.length_multiple = length_multiple
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor, lengths: Tensor, keep: Tensor | None = None) -> Tensor:
        """Encode frames (B, T, D) of ``lengths`` (B,). ``keep`` (L,) are layer-drop factors, None for 1."""
        frames = x.shape[1]
        padding = -frames % self.length_multiple
        position = torch.arange(frames + padding, device=x.device)
        # A row without any valid frame attends to its first frame, because softmax over no key is NaN.
        is_key = position < lengths.clamp(min=1)[:, None]
        is_valid = position[:frames] < lengths[:, None]
        x = x * is_valid.to(x.dtype)[:, :, None]
        x = x + self.position(x)
        if not self.pre_norm:
            x = self.norm(x)
        x = self.dropout(x)
        if padding:
            x = F.pad(x, (0, 0, 0, padding))
        for index, layer in enumerate(self.layers):
            y = layer(x, is_key)
            if keep is not None:
                factor = keep[index].to(x.dtype)
                y = y * factor + x * (1 - factor)
            x = y
        x = x[:, :frames]
        return self.norm(x) if self.pre_norm else x
