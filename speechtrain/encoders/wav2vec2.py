"""wav2vec 2.0's encoder (Baevski et al., 2020): convolutions on raw audio, then a Transformer.

Legend: B rows, S samples, T frames, C extractor channels, D model width, L layers.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from speechtrain.batch import Batch
from speechtrain.counter_rng import EncoderStream, seed_at
from speechtrain.encoders.base import Encoder, kept_layers
from speechtrain.errors import require_shares
from speechtrain.features.augment import Augment
from speechtrain.nn.conv_extractor import ConvBlock, ConvExtractor, LayerNorm
from speechtrain.nn.masking import SpanMask
from speechtrain.nn.transformer import Transformer, TransformerLayer


class Wav2Vec2Encoder(Encoder):
    """Raw audio (B, S) to frames (B, T, ``width``), by convolutions and a Transformer.

    The defaults are the published base model. The large model has ``conv_bias``, ``conv_norm`` layer,
    ``pre_norm``, 24 layers of 1024 units, no dropout. See ``ConvExtractor`` and ``Transformer`` for
    the parts. ``conv_layers`` None is the published extractor.

    A recogniser calls the encoder with a batch. In training, ``prepare`` draws on the host the frames and
    channels to mask (``mask``, ``channel_mask``; independently for each row) and the layers to drop (each
    with probability ``layer_drop``). Pretraining calls ``extract``, draws its own masks, and calls
    ``contextualise``. ``augment`` adds its noise to the waveform in training; its other parts apply to
    spectrograms and do nothing here. ``normalise_audio`` is an attribute for the data layer: it gives whole
    recordings zero mean and unit variance (eps 1e-5), before any crop.

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
            conv_layers = [[512, 10, 5], *[[512, 3, 2]] * 4, *[[512, 2, 2]] * 2]
        self.reads_padding = conv_norm == "group"
        self.extractor = ConvExtractor(conv_layers, conv_bias, conv_norm, gradient_scale=gradient_scale)
        channels = self.extractor.channels
        self.norm = LayerNorm(channels)
        self.projection = nn.Identity() if channels == width else nn.Linear(channels, width)
        self.input_dropout = nn.Dropout(input_dropout)
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
        """Map audio (B, S) and samples (B,) to features (B, T, C), frames (B,) and the feature penalty ().

        The features are after their LayerNorm and before the projection. The penalty is the mean square
        of the features before the LayerNorm, in fp32, over all values of the batch with the padding (as
        in upstream); ``gradient_scale`` applies to its gradient, too.
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
        """Map features (B, T, C) and frames (B,) to contextual frames (B, T, D).

        After the projection, frames where ``mask`` (B, T) is true become the mask embedding, and channels
        where ``channel_mask`` (B, D) is true become 0; ``keep`` (L,) of zeros and ones drops layers. The
        masks may be boolean or 0/1 numbers.
        """
        x = self.input_dropout(self.projection(features))
        embedding = self.mask_embedding.to(x.dtype)
        if mask is None:
            # the embedding gets a gradient of zeros, since data-parallel training waits for one
            x = x + 0.0 * embedding
        else:
            hidden = mask.to(x.dtype)[:, :, None]
            x = x * (1 - hidden) + embedding * hidden
        if channel_mask is not None:
            x = x * (1 - channel_mask.to(x.dtype))[:, None, :]
        y: Tensor = self.transformer(x, lengths, keep)
        return y

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        audio = self.augment.waveform(batch.audio, batch.audio_lengths)
        features, lengths, _ = self.extract(audio, batch.audio_lengths)
        drawn = batch.extra if self.training else {}
        masks = (drawn.get(name) for name in ("mask", "channel_mask", "keep"))
        return self.contextualise(features, lengths, *masks), lengths

    def prepare(self, batch: Batch, seed: int) -> Batch:
        """Add mask (B, T) and channel_mask (B, D), boolean, and keep (L,) to ``extra``, in training only."""
        if not self.training:
            return batch
        extra: dict[str, Tensor] = {}
        rows, samples = batch.audio.shape
        if self.mask is not None:
            frames = [self.frames(length) for length in batch.audio_lengths.tolist()]
            # a very short row may be masked completely: it still has a transcript
            drawn = self.mask.draw(
                frames, self.frames(samples), seed_at(seed, EncoderStream.FRAMES), counted=[False] * rows
            )
            extra["mask"] = torch.from_numpy(drawn)
        if self.channel_mask is not None:
            widths = [self.width] * rows
            drawn = self.channel_mask.draw(widths, self.width, seed_at(seed, EncoderStream.CHANNELS))
            extra["channel_mask"] = torch.from_numpy(drawn)
        if self.layer_drop:
            extra["keep"] = self.draw_keep()
        return replace(batch, extra=batch.extra | extra)

    def draw_keep(self) -> Tensor:
        """Draw the layers' factors (L,) for this update: 0 with probability ``layer_drop``, else 1."""
        return kept_layers(self._update_seed, len(self.transformer.layers), self.layer_drop)

    def frames(self, samples: int) -> int:
        return self.extractor.frames(samples)

    def activation_bytes(self) -> float:
        # tensors that autograd keeps, counted with saved-tensor hooks. A convolution keeps its output and
        # those of GELU and norm. A frame of a Transformer layer keeps 13 widths, 2 hidden widths and, with
        # attention dropout, 9 bytes per head and key, here for rows of 15 s. Within a factor of 2 of the
        # count for the sizes in conf/encoder
        rate, values = float(self.sample_rate), 0.0
        blocks = zip(self.extractor.layers, self.extractor.widths, self.extractor.spans, strict=True)
        for layer, channels, (_, stride) in blocks:
            assert isinstance(layer, ConvBlock)
            rate /= stride
            values += rate * channels * (2 if isinstance(layer.norm, nn.Identity) else 3)
        block = self.transformer.layers[0]
        assert isinstance(block, TransformerLayer)
        unit = 13.0 * self.width + 2 * block.feed_forward_in.out_features
        if block.attention.dropout:
            unit += 9 / 4 * block.attention.heads * 15 * rate
        return 4 * (values + rate * (4 * self.width + len(self.transformer.layers) * unit))
