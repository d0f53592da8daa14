"""The interface of encoders: audio in, frames of a fixed width out."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor, nn

from speechtrain.batch import Batch
from speechtrain.counter_rng import EncoderStream, uniform_at
from speechtrain.features.augment import Augment
from speechtrain.features.logmel import LogMel


class Encoder(nn.Module, ABC):
    """A front end and a network: (B, S) audio to (B, T, ``width``) frames."""

    width: int
    sample_rate: int  # Hz. The data module converts recordings to this rate.
    frozen: bool = False  # if True, ``encode`` records no graph and the weights do not change
    normalise_audio: bool = False  # the data layer gives recordings zero mean and unit variance
    reads_padding: bool = False  # if True, the frames of a row depend on the padding of its batch

    def encode(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Call ``forward`` for a recogniser, without gradients if ``frozen``."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            encoded: tuple[Tensor, Tensor] = self(batch)
        return encoded

    @abstractmethod
    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return frames (B, T, width) and lengths (B,).

        In evaluation, ``batch.keys`` seed the dither, which is the noise that the front end adds to audio.
        """

    def advance(self, step: int, seed: int) -> None:
        """Prepare for the next update. ``Task.advance`` calls this and explains ``step`` and ``seed``."""

    def prepare(self, batch: Batch, seed: int) -> Batch:
        """Add the draws and counts that ``forward`` needs to the batch, before it moves to the device.

        ``Task.prepare`` calls this and explains ``seed``.
        """
        return batch

    @abstractmethod
    def frames(self, samples: int) -> int:
        """Return the length that ``forward`` returns for ``samples`` samples. The host computes it."""

    @abstractmethod
    def activation_bytes(self) -> float:
        """Return a prediction of the bytes that forward keeps for backward, per second of a row's audio."""


class LogMelEncoder(Encoder):
    """An encoder whose network reads ``features`` of audio that ``augment`` changes in training."""

    def __init__(self, features: LogMel, augment: Augment) -> None:
        super().__init__()
        self.features, self.augment, self.sample_rate = features, augment, features.sample_rate

    def augmented(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the log-mel frames (B, T, M) of the batch and their lengths (B,), augmented in training."""
        audio = self.augment.waveform(batch.audio, batch.audio_lengths)
        warp = self.augment.warp(len(audio), audio.device)
        frames: tuple[Tensor, Tensor] = self.features(
            audio, batch.audio_lengths, keys=batch.keys, warp=warp, mask=self.augment.spectrogram
        )
        return frames


def kept_layers(seed: int, layers: int, probability: float) -> Tensor:
    """Draw the factors (L,) of layer drop for an update: 0 with ``probability``, else 1."""
    draws = uniform_at(seed, EncoderStream.LAYERS, np.arange(layers, dtype=np.int64))
    return torch.from_numpy((draws >= probability).astype(np.float32))


class NoEncoder(Encoder):
    """A placeholder for models that read the audio themselves. It is never called."""

    width, sample_rate = 0, 0

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        raise TypeError("encoder=none: this model needs an encoder. Choose one with encoder=NAME")

    def frames(self, samples: int) -> int:
        return samples

    def activation_bytes(self) -> float:
        return 0.0
