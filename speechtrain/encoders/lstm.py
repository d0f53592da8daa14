"""The LSTM encoder of recognition models: audio in, frames of a fixed width out."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from speechtrain.batch import Batch
from speechtrain.encoders.base import Encoder
from speechtrain.features.augment import Augment
from speechtrain.features.logmel import LogMel
from speechtrain.nn.lstm import LSTM
from speechtrain.nn.norm import MaskedBatchNorm
from speechtrain.nn.stack_time import StackTime


class LSTMEncoder(Encoder):
    """LSTM stack, StackTime, LSTM stack (MLPerf RNN-T, or AIDK's smaller encoder with its norms).

    ``feature_norm`` is AIDK's BatchNorm on the features, ``layer_norm`` its LayerNorm after each
    stack. Every published size of this encoder is a configuration.
    """

    shard_units = ("pre_rnn", "post_rnn")  # sharded runs gather the parameters of one stack at a time

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
        self.sample_rate = features.sample_rate
        self.augment = augment
        width = features.features
        self.feature_norm = MaskedBatchNorm(width) if feature_norm else None
        lstm = partial(LSTM, hidden=hidden, dropout=dropout, layer_norm=layer_norm)
        lstm = partial(lstm, forget_gate_bias=forget_gate_bias, init_scale=init_scale)
        self.pre_rnn = lstm(width, layers=pre_layers)
        self.stack_time = StackTime(stack_time)
        self.post_rnn = lstm(hidden * stack_time, layers=post_layers)
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
        # measured with oneDNN's LSTM: at the peak about 6 values per unit and frame, 6 copies of the
        # features and 8 of the waveform; within a factor of 2 for the sizes in conf/encoder
        rate = 1 / self.features.frame_seconds
        units = self.pre_rnn.lstm.num_layers + self.post_rnn.lstm.num_layers / self.stack_time.factor
        values = rate * (6 * self.width * units + 6 * self.features.features)
        return 4 * (values + 8 * self.features.sample_rate)
