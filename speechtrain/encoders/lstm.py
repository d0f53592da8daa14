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

_SHORTEST_SEGMENT = 20  # frames after the pivot that are worth two calls of each stack (NVIDIA's value)


class LSTMEncoder(LogMelEncoder, PolicyAware):
    """LSTM stack, StackTime, LSTM stack (MLPerf RNN-T, or AIDK's smaller encoder with its norms).

    ``feature_norm`` is AIDK's BatchNorm on the features. ``layer_norm`` is AIDK's LayerNorm after each stack.
    Every published size of this encoder is a configuration.

    With ``split_segments``, the frames beyond the median length are computed for the longer half of the rows
    only, as in NVIDIA's MLPerf entry. This saves time and memory if the lengths of rows differ. The host then
    reads the lengths. The results are the same without dropout, whose masks are drawn for each segment. With
    static shapes, the option has no effect.
    """

    shard_units = ("pre_rnn", "post_rnn")  # Sharded runs gather the parameters of one stack at a time.
    graph_units = ("augmented",)  # The LSTMs compile their recursions.

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
        """Return the frame at which the shorter half of the rows has ended, or 0 if there is one row.

        The frame is a multiple of StackTime's factor.
        """
        if len(lengths) < 2:
            return 0
        factor = self.stack_time.factor
        median = int(lengths.sort(descending=True).values[len(lengths) // 2])
        return -(-median // factor) * factor

    def _stacked_lengths(self, lengths: Tensor) -> Tensor:
        factor = self.stack_time.factor
        return torch.div(lengths + (factor - 1), factor, rounding_mode="floor")

    def _in_halves(self, x: Tensor, lengths: Tensor, pivot: int) -> tuple[Tensor, Tensor]:
        """Encode the frames before ``pivot`` of all rows, then the frames after it of the longer half."""
        longer = lengths.argsort(descending=True)[: len(lengths) // 2]
        y, pre_state = self.pre_rnn(x[:, :pivot])
        y, _ = self.stack_time(y, lengths.clamp(max=pivot))
        y, post_state = self.post_rnn(y)
        z, _ = self.pre_rnn(x[longer, pivot:], _select_rows(pre_state, longer))
        z, _ = self.stack_time(z, (lengths[longer] - pivot).clamp(min=0))
        z, _ = self.post_rnn(z, _select_rows(post_state, longer))
        padded = z.new_zeros(len(x), *z.shape[1:]).index_copy(0, longer, z)
        return torch.cat((y, padded), 1), self._stacked_lengths(lengths)

    def _in_segments(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Run all layers over a few frames at a time. One graph serves all segments of a recording.

        A graph of all frames has tens of thousands of operations, which take minutes to compile. The inputs
        and the zero states are made before the first segment, because they would make its graph differ.
        """
        factor = self.stack_time.factor
        size = max(1, self._policy.lstm_segment // factor) * factor
        frames = -(-x.shape[1] // factor)
        stacked_lengths = self._stacked_lengths(lengths)
        segments = _cut(x, size)
        frames_left, position = lengths + 0, torch.arange(size, device=x.device)
        states = self._zero_states(x)
        self._policy.mark_step()
        outputs = []
        for segment in segments:
            is_valid = position < frames_left[:, None]
            frames_left = frames_left - size
            *states, y = self._segment(segment, is_valid, states)
            outputs.append(y)
        # The backward of these products copies all slices of the gradient before the last segment's backward.
        return torch.cat([y * 1.0 for y in outputs], 1)[:, :frames], stacked_lengths

    def _zero_states(self, x: Tensor) -> list[Tensor]:
        return [*self.pre_rnn.zeros(x, len(x)), *self.post_rnn.zeros(x, len(x))]

    def _segment(self, x: Tensor, is_valid: Tensor, states: list[Tensor]) -> tuple[Tensor, ...]:
        """Return the states of both stacks after a segment, and the output of the segment."""
        y, pre_state = self.pre_rnn(x, (states[0], states[1]))
        y = stack_time(y * is_valid[:, :, None].to(y.dtype), self.stack_time.factor)
        y, post_state = self.post_rnn(y, (states[2], states[3]))
        segment: tuple[Tensor, ...] = EndSegment.apply(  # type: ignore[no-untyped-call]
            self._policy.mark_step, *pre_state, *post_state, y
        )
        return segment

    def frames(self, samples: int) -> int:
        return -(-self.features.frames(samples) // self.stack_time.factor)

    def activation_bytes(self) -> float:
        # Measured with oneDNN's LSTM. The peak has about 6 values per unit and frame, 6 copies of the
        # features and 8 of the waveform. For the sizes in conf/encoder, the prediction is within a factor
        # of 2.
        rate = 1 / self.features.frame_seconds
        units = self.pre_rnn.lstm.num_layers + self.post_rnn.lstm.num_layers / self.stack_time.factor
        values = rate * (6 * self.width * units + 6 * self.features.features)
        return 4 * (values + 8 * self.features.sample_rate)


def _cut(x: Tensor, size: int) -> list[Tensor]:
    """Return copies of the segments of frames (B, T, ·). The last one is padded to ``size`` frames."""
    x = F.pad(x, (0, 0, 0, -x.shape[1] % size))
    return [x[:, start : start + size] + 0 for start in range(0, x.shape[1], size)]


def _select_rows(state: tuple[Tensor, Tensor], rows: Tensor) -> tuple[Tensor, Tensor]:
    hidden, cell = state
    return hidden[:, rows], cell[:, rows]
