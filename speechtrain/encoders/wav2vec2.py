"""wav2vec 2.0's encoder (Baevski et al., 2020): convolutions on raw audio, then a Transformer.

Legend: B rows, S samples, T frames, C extractor channels, D model width, L layers.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from speechtrain.batch import Batch
from speechtrain.counter_rng import EncoderStream, seed_at
from speechtrain.encoders.base import Encoder, layer_drop_factors
from speechtrain.errors import require_shares
from speechtrain.features.augment import Augment
from speechtrain.nn.conv_extractor import ConvBlock, ConvExtractor, LayerNorm
from speechtrain.nn.dropout import Dropout
from speechtrain.nn.masking import SpanMask
from speechtrain.nn.transformer import Transformer, TransformerLayer

_PUBLISHED_CONV_LAYERS = [[512, 10, 5], *[[512, 3, 2]] * 4, *[[512, 2, 2]] * 2]


class Wav2Vec2Encoder(Encoder):
    """Raw audio (B, S) to frames (B, T, ``width``), by convolutions and a Transformer.

    The defaults are the published base model. The large model has ``conv_bias``, ``conv_norm`` layer,
    ``pre_norm``, 24 layers of 1024 units and no dropout. ``ConvExtractor`` and ``Transformer`` explain their
    parameters. If ``conv_layers`` is None, the extractor is the published one.

    - A recogniser calls the encoder with a batch. In training, ``prepare`` draws on the host the frames and
      the channels to mask (``mask`` and ``channel_mask``), independently for each row. It also draws the
      layers to drop, each with probability ``layer_drop``.
    - Pretraining calls ``extract``, draws its own masks, and calls ``contextualise``.
    - ``augment`` adds its noise to the waveform in training. Its other parts are for spectrograms and do
      nothing here.
    - With ``normalise_audio``, the data layer gives whole recordings zero mean and unit variance (eps 1e-5),
      before any crop.

    Raises ConfigError for values out of range.
    """

    _update_seed = 0

    def __init__(
        self,
        conv_layers: list[list[int]] | None = None,
        conv_bias: bool = False,
        conv_norm: str = "group",
        gradient_scale: float = 0.1,
        width: int = 768,
        layers: int = 12,
        feed_forward: int = 3072,
        heads: int = 12,
        pre_norm: bool = False,
        position_kernel: int = 128,
        position_groups: int = 16,
        dropout: float = 0.1,
        attention_dropout: float = 0.1,
        activation_dropout: float = 0.0,
        input_dropout: float = 0.1,
        layer_drop: float = 0.05,
        length_multiple: int = 1,
        normalise_audio: bool = False,
        sample_rate: int = 16000,
        mask: SpanMask | None = None,
        channel_mask: SpanMask | None = None,
        augment: Augment | None = None,
    ) -> None:
        super().__init__()
        require_shares(dropout=dropout, attention_dropout=attention_dropout, layer_drop=layer_drop)
        require_shares(activation_dropout=activation_dropout, input_dropout=input_dropout)
        if conv_layers is None:
            conv_layers = _PUBLISHED_CONV_LAYERS
        self.reads_padding = conv_norm == "group"
        self.extractor = ConvExtractor(conv_layers, conv_bias, conv_norm, gradient_scale=gradient_scale)
        channels = self.extractor.channels
        self.norm = LayerNorm(channels)
        self.projection = nn.Identity() if channels == width else nn.Linear(channels, width)
        self.input_dropout = Dropout(input_dropout)
        self.mask_embedding = nn.Parameter(torch.rand(width))
        self.transformer = Transformer(
            width=width,
            layers=layers,
            feed_forward=feed_forward,
            heads=heads,
            pre_norm=pre_norm,
            dropout=dropout,
            attention_dropout=attention_dropout,
            activation_dropout=activation_dropout,
            position_kernel=position_kernel,
            position_groups=position_groups,
            length_multiple=length_multiple,
        )
        self.width, self.layer_drop = width, layer_drop
        self.normalise_audio, self.sample_rate = normalise_audio, sample_rate
        self.mask, self.channel_mask = mask, channel_mask
        self.augment = augment or Augment()

    def advance(self, step: int, seed: int) -> None:
        self._update_seed = seed

    def extract(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map audio (B, S) of ``lengths`` (B,) to features (B, T, C), their lengths (B,) and a penalty ().

        The features are after their LayerNorm and before the projection. The penalty is the mean square
        of the features before the LayerNorm, in fp32, over all values of the batch. As in the published
        code, the padding counts, and ``gradient_scale`` also applies to the gradient of the penalty.
        """
        x = self.extractor(audio)
        penalty = x.float().square().mean()
        return self.norm(x), self.extractor.lengths(lengths), penalty

    def contextualise(
        self,
        features: Tensor,
        lengths: Tensor,
        mask: Tensor | None = None,
        channel_mask: Tensor | None = None,
        keep: Tensor | None = None,
    ) -> Tensor:
        """Map features (B, T, C) of ``lengths`` (B,) to contextual frames (B, T, D).

        After the projection, frames where ``mask`` (B, T) is true become the mask embedding. Channels where
        ``channel_mask`` (B, D) is true become 0. ``keep`` (L,) is 0 for layers to drop, else 1. The masks are
        boolean, or numbers that are 0 or 1.
        """
        x = self.input_dropout(self.projection(features))
        embedding = self.mask_embedding.to(x.dtype)
        if mask is None:
            # The embedding gets a gradient of zeros, because DDP waits for a gradient of each parameter.
            x = x + 0.0 * embedding
        else:
            is_masked = mask.to(x.dtype)[:, :, None]  # 1 or 0
            x = x * (1 - is_masked) + embedding * is_masked
        if channel_mask is not None:
            x = x * (1 - channel_mask.to(x.dtype))[:, None, :]
        y: Tensor = self.transformer(x, lengths, keep)
        return y

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        audio = self.augment.waveform(batch.audio, batch.audio_lengths)
        features, lengths, _ = self.extract(audio, batch.audio_lengths)
        if not self.training:
            return self.contextualise(features, lengths), lengths
        extra = batch.extra
        frames = self.contextualise(
            features,
            lengths,
            mask=extra.get("mask"),
            channel_mask=extra.get("channel_mask"),
            keep=extra.get("keep"),
        )
        return frames, lengths

    def prepare(self, batch: Batch, seed: int) -> Batch:
        """Return the batch with the arguments of ``contextualise`` in ``extra``, if the encoder is training.

        These are the boolean ``mask`` (B, T) and ``channel_mask`` (B, D), and ``keep`` (L,).
        """
        if not self.training:
            return batch
        extra: dict[str, Tensor] = {}
        rows, samples = batch.audio.shape
        if self.mask is not None:
            row_frames = [self.frames(length) for length in batch.audio_lengths.tolist()]
            frames, frame_seed = self.frames(samples), seed_at(seed, EncoderStream.FRAMES)
            # A very short row may be masked completely, because it still has a transcript.
            mask = self.mask.sample(row_frames, frames, frame_seed, counted=[False] * rows)
            extra["mask"] = torch.from_numpy(mask)
        if self.channel_mask is not None:
            widths, channel_seed = [self.width] * rows, seed_at(seed, EncoderStream.CHANNELS)
            channel_mask = self.channel_mask.sample(widths, self.width, channel_seed)
            extra["channel_mask"] = torch.from_numpy(channel_mask)
        if self.layer_drop:
            extra["keep"] = self.sample_keep()
        return replace(batch, extra=batch.extra | extra)

    def sample_keep(self) -> Tensor:
        """Return random factors (L,) of the layers: 0 with probability ``layer_drop``, else 1."""
        return layer_drop_factors(self._update_seed, len(self.transformer.layers), self.layer_drop)

    def frames(self, samples: int) -> int:
        return self.extractor.frames(samples)

    def activation_bytes(self) -> float:
        # The tensors that autograd stores were counted with saved-tensor hooks. A convolution stores its
        # output and the outputs of GELU and norm. A frame of a Transformer layer stores 13 widths, 2 hidden
        # widths and, with attention dropout, 9 bytes per head and key, here for rows of 15 s. The prediction
        # is within a factor of 2 of the count for the sizes in conf/encoder. A value has 4 bytes.
        frame_rate, values = float(self.sample_rate), 0.0
        blocks = zip(self.extractor.layers, self.extractor.widths, self.extractor.spans, strict=True)
        for block, channels, (_, stride) in blocks:
            assert isinstance(block, ConvBlock)
            frame_rate /= stride
            outputs = 2 if isinstance(block.norm, nn.Identity) else 3
            values += frame_rate * channels * outputs
        layer = self.transformer.layers[0]
        assert isinstance(layer, TransformerLayer)
        layer_values = 13.0 * self.width + 2 * layer.feed_forward_in.out_features
        if layer.attention.dropout.p:
            layer_values += 9 / 4 * layer.attention.heads * 15 * frame_rate
        values += frame_rate * (4 * self.width + len(self.transformer.layers) * layer_values)
        return 4 * values
