"""FastConformer (Rekesh et al., ASRU 2023) in the form of Hugging Face's ``ParakeetEncoder``.

A causal FastConformer (Noroozi et al., ICASSP 2024) can encode a stream (``fastconformer_stream.py``).

Legend: B rows, T frames, M mel bins, D width, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from speechtrain.batch import Batch
from speechtrain.counter_rng import EncoderStream, uniform_at
from speechtrain.encoders.base import LogMelEncoder, layer_drop_factors
from speechtrain.encoders.fastconformer_stream import LayerStream, SubsamplingStream
from speechtrain.encoders.stream import FrameStream, StreamTiming
from speechtrain.errors import ConfigError, NeedsWholeRecordings, require_least, require_shares
from speechtrain.features.augment import Augment
from speechtrain.features.logmel import LogMel
from speechtrain.features.logmel_stream import LogMelStream
from speechtrain.nn.conformer import (
    CausalConvolution,
    CausalHalving,
    ConformerLayer,
    Context,
    Convolution,
    GatedConvolution,
    Halving,
    Subsampling,
    as_mask,
    embedded_distances,
    in_context,
)
from speechtrain.nn.dropout import Dropout

_CAUSAL_CONVOLUTIONS: dict[str, Callable[..., GatedConvolution]] = {
    "past": CausalConvolution,
    "chunk": Convolution,
}
_ALL_FRAMES = (0, 2**30, 0)  # a context without limits, because all frames are in one chunk


class FastConformer(LogMelEncoder):
    """Log-mel frames, subsampled by ``subsampling`` (a power of 2), then ``layers`` Conformer layers.

    - ``kernel`` is the number of frames of a layer's depthwise convolution. ``channels`` is the number of
      channels of the subsampling.
    - ``dropout`` follows the subsampling, and ``position_dropout`` applies to the relative positions.
    - ``residual_dropout`` applies to each branch of a layer. NeMo has it, transformers does not.
    - ``layer_drop`` is the probability with which an update skips a layer, as in ``Transformer``.
    - ``middle_ctc`` is the weight of a recogniser's CTC loss on the frames after half of the layers
      (intermediate CTC, Lee and Watanabe, 2021).
    - ``scale_input`` multiplies the subsampled frames by the square root of ``width``.
    - ``causal``: subsampling reads no later frame, and convolutions as ``causal_convolution`` says. A stream
      needs this.
    - ``causal_convolution`` is ``past`` or ``chunk``. ``past`` convolutions read no later frame and have a
      LayerNorm (``CausalConvolution``). ``chunk`` convolutions read the later frames of their chunk and have
      a BatchNorm (``Convolution``).
    - ``context`` [left, chunk, right] limits attention, as ``in_context`` explains. Null allows all frames.
    - ``contexts``: a micro-batch of training draws its context from this list, in which null is all frames.
      ``context`` then serves evaluation only. If ``causal``, an evaluation also measures the limited contexts
      of the list, and among contexts of the same look-ahead the first.

    Raises ValueError for values out of range, and ConfigError for features that need whole recordings if an
    evaluation measures contexts.
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
        middle_ctc: float = 0.0,
        scale_input: bool = True,
        attention_bias: bool = True,
        convolution_bias: bool = True,
        causal: bool = False,
        causal_convolution: str = "past",
        context: Context | None = None,
        contexts: Sequence[Context | None] | None = None,
    ) -> None:
        super().__init__(features, augment)
        require_shares(dropout=dropout, position_dropout=position_dropout, layer_drop=layer_drop)
        require_shares(attention_dropout=attention_dropout, activation_dropout=activation_dropout)
        require_shares(residual_dropout=residual_dropout)
        require_least(1, width=width, layers=layers, feed_forward=feed_forward)
        require_least(1, heads=heads, channels=channels)
        require_least(0, middle_ctc=middle_ctc)
        if width % heads or width % 2:
            raise ValueError(f"width is {width}: it must be even and a multiple of heads, {heads}")
        _check_frame_settings(kernel, subsampling, features.features)
        if causal_convolution not in _CAUSAL_CONVOLUTIONS:
            raise ValueError(f"causal_convolution is {causal_convolution}: it must be past or chunk")
        for each in (context, *(contexts or ())):
            _check_context(each)
        halving = CausalHalving if causal else Halving
        convolution = _CAUSAL_CONVOLUTIONS[causal_convolution] if causal else Convolution
        self.subsampling = Subsampling(features.features, subsampling, channels, width, halving)
        new_convolution = partial(convolution, width, kernel, convolution_bias)
        new_layer = partial(ConformerLayer, width, feed_forward, heads, new_convolution, residual_dropout)
        new_layer = partial(new_layer, attention_dropout, activation_dropout, attention_bias)
        self.layers = nn.ModuleList(new_layer() for _ in range(layers))
        self.dropout, self.position_dropout = Dropout(dropout), Dropout(position_dropout)
        self.width, self.factor = width, subsampling
        self.causal, self.context, self.contexts = causal, context, contexts
        self.scale = math.sqrt(width) if scale_input else 1.0
        self.layer_drop, self.middle_ctc = layer_drop, middle_ctc
        timings = dict[int, StreamTiming]()
        if causal:
            for limited in filter(None, contexts or ()):
                timing = StreamTiming(limited, layers, features.frame_seconds * subsampling)
                timings.setdefault(timing.milliseconds, timing)
        if timings:
            LogMelStream(features)  # It refuses features for which a stream cannot be opened.
        self.timings = tuple(timings.values())

    def advance(self, step: int, seed: int) -> None:
        self._update_seed = seed

    def prepare(self, batch: Batch, seed: int) -> Batch:
        """Return the batch with the random choices of training in ``extra``.

        ``keep`` (L,) are the factors of layer drop, and ``context`` (3,) is the drawn context.
        """
        extra = dict(batch.extra)
        if self.training and self.layer_drop:
            extra["keep"] = layer_drop_factors(self._update_seed, len(self.layers), self.layer_drop)
        if self.training and self.contexts:
            share = float(uniform_at(seed, EncoderStream.CONTEXT))
            drawn = self.contexts[int(share * len(self.contexts))]
            extra["context"] = torch.tensor(drawn or _ALL_FRAMES)
        return replace(batch, extra=extra)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        x, lengths = self.augmented(batch)
        return self.contextualise(x, lengths, batch.extra.get("keep"), batch.extra.get("context"))

    def encode_with_middle(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            features, lengths = self.augmented(batch)
            keep, context = batch.extra.get("keep"), batch.extra.get("context")
            return self._contextualise(features, lengths, keep, context)

    def contextualise(
        self,
        features: Tensor,
        lengths: Tensor,
        keep: Tensor | None = None,
        context: Context | Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Map log-mel features (B, T', M) of ``lengths`` (B,) to frames (B, T, D) and their lengths (B,).

        ``keep`` (L,) is 0 for layers to drop, else 1. ``context`` replaces the context of the constructor.
        """
        frames, frame_lengths, _ = self._contextualise(features, lengths, keep, context)
        return frames, frame_lengths

    def _contextualise(
        self, features: Tensor, lengths: Tensor, keep: Tensor | None, context: Context | Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the two tensors of ``contextualise``, and the frames (B, T, D) after half of the layers."""
        x, lengths = self.subsampling(features, lengths)
        x = self.dropout(x * self.scale)
        frames = x.shape[1]
        positions = self.position_dropout(embedded_distances(frames - 1, 1 - frames, x))
        context = self.context if context is None else context
        mask = self._attention_mask(lengths, frames, context)
        # Without ``causal``, only attention is limited, as in published models.
        chunk = context[1] if self.causal and context is not None else None
        middle = x
        for index, layer in enumerate(self.layers):
            y = layer(x, lengths, positions, mask, chunk)
            if keep is not None:
                factor = keep[index].to(x.dtype)
                y = y * factor + x * (1 - factor)
            x = y
            if index == len(self.layers) // 2:
                middle = x
        return x, lengths, middle

    def _attention_mask(self, lengths: Tensor, frames: int, context: Context | Tensor | None) -> Tensor:
        """Return the mask of attention: (B, 1, T, T), or (B, 1, 1, T) if all queries attend to the same keys.

        It is 0 for keys to which a query may attend. ``lengths`` (B,) are the frames of each row, and
        ``frames`` is T.
        """
        frame = torch.arange(frames, device=lengths.device)
        # A row without any valid frame attends to its first frame, because softmax over no key is NaN.
        is_allowed = (frame < lengths.clamp(min=1)[:, None])[:, None]
        if context is not None:
            # A frame attends to itself, because a frame beyond the row's end may have no other key.
            is_allowed = (is_allowed & in_context(frame, frame, context)) | (frame == frame[:, None])
        return as_mask(is_allowed[:, None])

    def stream(
        self, context: Context | None = None, rows: int = 1, keys: Tensor | None = None
    ) -> FrameStream:
        if not self.causal:
            raise NeedsWholeRecordings(
                "encoder.causal=false: this encoder reads whole recordings. For a stream, train with "
                "encoder.causal=true"
            )
        context = self.context if context is None else context
        if context is None and self.timings:
            context = max(self.timings, key=lambda timing: timing.milliseconds).context
        if context is None:
            raise NeedsWholeRecordings("encoder.context=null: a stream needs a context, such as [120,9,0]")
        _check_context(context)
        layers = [LayerStream(layer, context, rows) for layer in self.layers]
        subsampling = SubsamplingStream(self.subsampling, self.scale, rows)
        return FrameStream(LogMelStream(self.features, rows, keys), subsampling, *layers)

    def frames(self, samples: int) -> int:
        return self.subsampling.subsampled(self.features.frames(samples))

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


def _check_frame_settings(kernel: int, subsampling: int, mels: int) -> None:
    """Raise ValueError for a kernel or a subsampling factor that is not valid."""
    if kernel < 1 or kernel % 2 == 0:
        raise ValueError(f"kernel is {kernel}: it must be odd")
    if subsampling < 2 or subsampling.bit_count() > 1 or mels % subsampling:
        raise ValueError(
            f"subsampling is {subsampling}: it must be a power of 2 that divides the {mels} features"
        )


def _check_context(context: Context | None) -> None:
    """Raise ConfigError for an attention context that is not valid."""
    if context is None:
        return
    if len(context) != 3 or min(context) < 0 or context[1] < 1:
        raise ConfigError(
            f"context is {list(context)}: it must be null or [left, chunk, right] in frames, chunk at least 1"
        )
