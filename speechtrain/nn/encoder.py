"""Encoders of recognition models: audio in, frames of a fixed width out."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from speechtrain.batch import Batch
from speechtrain.nn.augment import Augment
from speechtrain.nn.features import LogMel
from speechtrain.nn.lstm import LSTM
from speechtrain.nn.norm import MaskedBatchNorm
from speechtrain.nn.stack_time import StackTime


class Encoder(nn.Module, ABC):
    """A front end and a network: (B, S) audio to (B, T, ``width``) frames."""

    width: int
    frozen: bool = False  # while it is, ``encode`` records no graph and the weights stay as they are
    normalise_audio: bool = False  # recordings are to come with zero mean and unit variance

    def encode(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """``forward``, as a recogniser calls it."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            encoded: tuple[Tensor, Tensor] = self(batch)
        return encoded

    @abstractmethod
    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Frames (B, T, width) and their lengths (B,); ``batch.keys`` address evaluation's dither."""

    def advance(self, step: int, seed: int) -> None:
        """The encoder's share of ``Task.advance``."""

    def prepare(self, batch: Batch, seed: int) -> Batch:
        """The encoder's share of ``Task.prepare``: what it draws or counts on the host."""
        return batch

    @abstractmethod
    def frames(self, samples: int) -> int:
        """Frames of ``samples`` samples of audio, on the host."""

    @abstractmethod
    def activation_bytes(self) -> float:
        """Predicted bytes that forward keeps for backward, for each second of a row's audio."""


class LSTMEncoder(Encoder):
    """LSTM stack, StackTime, LSTM stack (MLPerf RNN-T; AIDK's smaller form with its norms).

    ``feature_norm`` is AIDK's BatchNorm on the features, ``layer_norm`` its LayerNorm behind each
    stack. Without features, every size of the family is a configuration.
    """

    shard_units = ("pre_rnn", "post_rnn")  # where ranks share out the parameters, gathered by themselves

    def __init__(
        self,
        features: LogMel,
        augment: Augment,
        hidden: int = 1024,
        pre_layers: int = 2,
        stack_time: int = 2,
        post_layers: int = 3,
        dropout: float = 0.1,
        feature_norm: bool = False,
        layer_norm: bool = False,
        forget_gate_bias: float = 1.0,
        init_scale: float = 0.5,
    ) -> None:
        super().__init__()
        self.features = features
        self.augment = augment
        width = features.features
        self.feature_norm = MaskedBatchNorm(width) if feature_norm else None
        self.pre_rnn = LSTM(width, hidden, pre_layers, dropout, layer_norm, forget_gate_bias, init_scale)
        self.stack_time = StackTime(stack_time)
        self.post_rnn = LSTM(
            hidden * stack_time, hidden, post_layers, dropout, layer_norm, forget_gate_bias, init_scale
        )
        self.width = hidden

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        audio = self.augment.waveform(batch.audio, batch.audio_lengths)
        warp = self.augment.warp(len(audio), audio.device)
        mask = self.augment.spectrogram
        x, lengths = self.features(audio, batch.audio_lengths, keys=batch.keys, warp=warp, mask=mask)
        if self.feature_norm is not None:
            x = self.feature_norm(x, lengths)
        x, _ = self.pre_rnn(x)
        x, lengths = self.stack_time(x, lengths)
        x, _ = self.post_rnn(x)
        return x, lengths

    def frames(self, samples: int) -> int:
        return -(-self.features.frames(samples) // self.stack_time.factor)

    def activation_bytes(self) -> float:
        # measured with oneDNN's LSTM: about 6 values a unit and frame, 6 copies of the features and
        # 8 of the waveform at the peak; within a factor of 2 for the sizes in conf/encoder
        rate = 1 / self.features.frame_seconds
        units = self.pre_rnn.lstm.num_layers + self.post_rnn.lstm.num_layers / self.stack_time.factor
        values = rate * (6 * self.width * units + 6 * self.features.features)
        return 4 * (values + 8 * self.features.sample_rate)
