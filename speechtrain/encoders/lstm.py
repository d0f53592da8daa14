"""The LSTM encoder of recognition models: audio in, frames of a fixed width out."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from speechtrain.batch import Batch
from speechtrain.compute_policy import PLAIN, ComputePolicy, PolicyAware
from speechtrain.encoders.base import LogMelEncoder
from speechtrain.features.augment import Augment
from speechtrain.features.logmel import LogMel
from speechtrain.nn.lstm import LSTM, EndSegment
from speechtrain.nn.norm import MaskedBatchNorm
from speechtrain.nn.stack_time import StackTime, stack_time

_SHORTEST_SEGMENT = 20  # frames after the pivot that are worth two calls of each stack (NVIDIA's)


class LSTMEncoder(LogMelEncoder, PolicyAware):
    """LSTM stack, StackTime, LSTM stack (MLPerf RNN-T, or AIDK's smaller encoder with its norms).

    ``feature_norm`` is AIDK's BatchNorm on the features, ``layer_norm`` its LayerNorm after each
    stack. Every published size of this encoder is a configuration.

    ``split_segments`` computes the frames beyond the median length for the longer half of the rows only, as
    in NVIDIA's MLPerf entry: less time and memory for rows of unequal lengths, with the same results without
    dropout, whose masks are drawn for each segment. The host then reads the lengths; static shapes ignore it.
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
        split_segments: bool = False,
    ) -> None:
        super().__init__(features, augment)
        width = features.features
        self.feature_norm = MaskedBatchNorm(width) if feature_norm else None
        lstm = partial(LSTM, hidden=hidden, dropout=dropout, layer_norm=layer_norm)
        lstm = partial(lstm, forget_gate_bias=forget_gate_bias, init_scale=init_scale)
        self.pre_rnn = lstm(width, layers=pre_layers)
        self.stack_time = StackTime(stack_time)
        self.post_rnn = lstm(hidden * stack_time, layers=post_layers)
        self.width = hidden
        self.split_segments = self.uneven_calls = split_segments
        self._policy = PLAIN

    def apply_policy(self, policy: ComputePolicy) -> None:
        self._policy = policy

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        x, lengths = self.augmented(batch)
        if self.feature_norm is not None:
            x = self.feature_norm(x, lengths)
        if self._policy.lstm_segment:
            return self._in_segments(x, lengths)
        pivot = self._pivot(lengths) if self.split_segments and not self._policy.static_shapes else 0
        if pivot and x.shape[1] - pivot >= _SHORTEST_SEGMENT:
            return self._in_halves(x, lengths, pivot)
        x, _ = self.pre_rnn(x)
        x, lengths = self.stack_time(x, lengths)
        x, _ = self.post_rnn(x)
        return x, lengths

    def _pivot(self, lengths: Tensor) -> int:
        """The frame at which the shorter half of the rows has ended, on StackTime's grid; 0 for one row."""
        if len(lengths) < 2:
            return 0
        median, factor = int(lengths.sort(descending=True).values[len(lengths) // 2]), self.stack_time.factor
        return -(-median // factor) * factor

    def _in_halves(self, x: Tensor, lengths: Tensor, pivot: int) -> tuple[Tensor, Tensor]:
        """The frames before ``pivot`` of all rows, then those after it of the longer half."""
        longer = lengths.argsort(descending=True)[: len(lengths) // 2]
        y, (hidden, cell) = self.pre_rnn(x[:, :pivot])
        y, _ = self.stack_time(y, lengths.clamp(max=pivot))
        y, (deep, deep_cell) = self.post_rnn(y)
        z, _ = self.pre_rnn(x[longer, pivot:], (hidden[:, longer], cell[:, longer]))
        z, _ = self.stack_time(z, (lengths[longer] - pivot).clamp(min=0))
        z, _ = self.post_rnn(z, (deep[:, longer], deep_cell[:, longer]))
        factor = self.stack_time.factor
        stacked = torch.div(lengths + (factor - 1), factor, rounding_mode="floor")
        rest = z.new_zeros(len(x), *z.shape[1:]).index_copy(0, longer, z)
        return torch.cat((y, rest), 1), stacked

    def _in_segments(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """All layers over a few frames at a time, a graph for each: one graph serves the whole recording.

        A graph of all frames has tens of thousands of operations, which take minutes to compile. What
        would tell the segments apart is made before the first one: their inputs, and the zero states.
        """
        mark_step, factor = self._policy.mark_step, self.stack_time.factor
        size = max(1, self._policy.lstm_segment // factor) * factor
        stacked = torch.div(lengths + (factor - 1), factor, rounding_mode="floor")
        frames = -(-x.shape[1] // factor)
        x = F.pad(x, (0, 0, 0, -x.shape[1] % size))
        left, position = lengths + 0, torch.arange(size, device=x.device)
        pieces = [x[:, start : start + size] + 0 for start in range(0, x.shape[1], size)]
        states = [*self.pre_rnn.zeros(x, len(x)), *self.post_rnn.zeros(x, len(x))]
        mark_step()
        outputs = []
        for piece in pieces:
            y, before = self.pre_rnn(piece, (states[0], states[1]))
            y = stack_time(y * (position < left[:, None])[:, :, None].to(y.dtype), factor)
            y, after = self.post_rnn(y, (states[2], states[3]))
            left = left - size
            *states, y = EndSegment.apply(mark_step, *before, *after, y)  # type: ignore[no-untyped-call]
            outputs.append(y)
        # the products' backward copies the slices of the gradient, all before the first segment's
        return torch.cat([y * 1.0 for y in outputs], 1)[:, :frames], stacked

    def frames(self, samples: int) -> int:
        return -(-self.features.frames(samples) // self.stack_time.factor)

    def activation_bytes(self) -> float:
        # measured with oneDNN's LSTM: at the peak about 6 values per unit and frame, 6 copies of the
        # features and 8 of the waveform; within a factor of 2 for the sizes in conf/encoder
        rate = 1 / self.features.frame_seconds
        units = self.pre_rnn.lstm.num_layers + self.post_rnn.lstm.num_layers / self.stack_time.factor
        values = rate * (6 * self.width * units + 6 * self.features.features)
        return 4 * (values + 8 * self.features.sample_rate)
