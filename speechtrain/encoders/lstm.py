"""The LSTM encoder of recognition models: audio in, frames of a fixed width out.

Legend: B rows, T feature frames, F features, H hidden units, k factor of StackTime.
"""

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

# With fewer frames after the pivot, a second call of each stack costs more than it saves (NVIDIA's value).
_SHORTEST_SEGMENT = 20


class LSTMEncoder(LogMelEncoder, PolicyAware):
    """LSTM stack, StackTime, LSTM stack (MLPerf RNN-T, or AIDK's smaller encoder with its norms).

    ``feature_norm`` is AIDK's BatchNorm on the features. ``layer_norm`` is AIDK's LayerNorm after each stack.
    ``stack_time`` is the factor k by which StackTime divides the frames.

    With ``split_segments``, the frames beyond the median length are computed for the longer half of the rows
    only, as in NVIDIA's MLPerf entry. This saves time and memory if the lengths of rows differ. It costs a
    read of the lengths by the host. The results are the same without dropout. With dropout they differ,
    because each segment has its own masks. With static shapes, the option has no effect.
    """

    shard_units = ("pre_rnn", "post_rnn")  # Sharded runs gather the parameters of one stack at a time.
    graph_units = ("augmented",)  # The LSTMs compile their recursions.

    def __init__(
        self,
        features: LogMel,
        augment: Augment | None = None,
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
        new_lstm = partial(LSTM, hidden=hidden, dropout=dropout, layer_norm=layer_norm)
        new_lstm = partial(new_lstm, forget_gate_bias=forget_gate_bias, init_scale=init_scale)
        self.pre_rnn = new_lstm(width, layers=pre_layers)
        self.stack_time = StackTime(stack_time)
        self.post_rnn = new_lstm(hidden * stack_time, layers=post_layers)
        self.width = hidden
        # ``units_of`` reads ``uneven_calls``: a rank may call a stack once or twice in a step.
        self.split_segments = self.uneven_calls = split_segments
        self._policy = PLAIN

    def apply_policy(self, policy: ComputePolicy) -> None:
        self._policy = policy

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        x, lengths = self.augmented(batch)
        if self.feature_norm is not None:
            x = self.feature_norm(x, lengths)
        if self._policy.lstm_segment:
            return self._encode_in_segments(x, lengths)
        pivot = 0
        if self.split_segments and not self._policy.static_shapes:
            pivot = self._pivot(lengths)
        if pivot and x.shape[1] - pivot >= _SHORTEST_SEGMENT:
            return self._encode_around_pivot(x, lengths, pivot)
        x, _ = self.pre_rnn(x)
        x, lengths = self.stack_time(x, lengths)
        x, _ = self.post_rnn(x)
        return x, lengths

    def _pivot(self, lengths: Tensor) -> int:
        """Return the frame at which the shorter half of the rows has ended, or 0 if there is one row.

        The frame is rounded up to a multiple of StackTime's factor, so that no stacked frame is split.
        """
        if len(lengths) < 2:
            return 0
        factor = self.stack_time.factor
        median = int(lengths.sort(descending=True).values[len(lengths) // 2])
        stacked_median = -(-median // factor)
        return stacked_median * factor

    def _encode_around_pivot(self, x: Tensor, lengths: Tensor, pivot: int) -> tuple[Tensor, Tensor]:
        """Encode the frames before ``pivot`` of all rows, then the frames after it of the longer half.

        Returns the frames (B, ceil(T/k), H) and their lengths (B,).
        """
        longer_rows = lengths.argsort(descending=True)[: len(lengths) // 2]
        y, pre_state = self.pre_rnn(x[:, :pivot])
        y, _ = self.stack_time(y, lengths.clamp(max=pivot))
        y, post_state = self.post_rnn(y)
        z, _ = self.pre_rnn(x[longer_rows, pivot:], _select_rows(pre_state, longer_rows))
        z, _ = self.stack_time(z, (lengths[longer_rows] - pivot).clamp(min=0))
        z, _ = self.post_rnn(z, _select_rows(post_state, longer_rows))
        all_rows = z.new_zeros(len(x), *z.shape[1:]).index_copy(0, longer_rows, z)
        return torch.cat((y, all_rows), 1), self._stacked_lengths(lengths)

    def _stacked_lengths(self, lengths: Tensor) -> Tensor:
        """Return the lengths (B,) after StackTime: the frames divided by its factor and rounded up."""
        factor = self.stack_time.factor
        return torch.div(lengths + (factor - 1), factor, rounding_mode="floor")

    def _encode_in_segments(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Run all layers over a few frames at a time. All segments of a recording use one lazy graph.

        A graph of all frames has tens of thousands of operations, which take minutes to compile. The inputs
        and the zero states are made before the first segment, because they would make its graph differ.
        Returns the frames (B, ceil(T/k), H) and their lengths (B,).
        """
        factor = self.stack_time.factor
        segment_frames = max(1, self._policy.lstm_segment // factor) * factor
        stacked_frames = -(-x.shape[1] // factor)
        stacked_lengths = self._stacked_lengths(lengths)
        segments = _split_frames(x, segment_frames)
        frames_left, position = lengths + 0, torch.arange(segment_frames, device=x.device)
        states = [*self.pre_rnn.zeros(x, len(x)), *self.post_rnn.zeros(x, len(x))]
        self._policy.mark_step()
        outputs = []
        for segment in segments:
            is_valid = position < frames_left[:, None]
            frames_left = frames_left - segment_frames
            *states, y = self._encode_segment(segment, is_valid, states)
            outputs.append(y)
        # The gradient of the concatenation is split into views. The backward of the product by 1 copies all
        # of them before the backward of the last segment, which would otherwise have another graph.
        return torch.cat([y * 1.0 for y in outputs], 1)[:, :stacked_frames], stacked_lengths

    def _encode_segment(self, x: Tensor, is_valid: Tensor, states: list[Tensor]) -> tuple[Tensor, ...]:
        """Return the states of both stacks after a segment, and the output of the segment.

        ``x`` is (B, frames, F), and ``is_valid`` (B, frames) is False beyond a row's end. The states are four
        tensors: hidden and cell state of the first stack, then of the second stack.
        """
        y, pre_state = self.pre_rnn(x, (states[0], states[1]))
        y = stack_time(y * is_valid[:, :, None].to(y.dtype), self.stack_time.factor)
        y, post_state = self.post_rnn(y, (states[2], states[3]))
        states_and_output: tuple[Tensor, ...] = EndSegment.apply(  # type: ignore[no-untyped-call]
            self._policy.mark_step, *pre_state, *post_state, y
        )
        return states_and_output

    def frames(self, samples: int) -> int:
        return -(-self.features.frames(samples) // self.stack_time.factor)  # rounded up

    def activation_bytes(self) -> float:
        # Measured with oneDNN's LSTM. The peak has about 6 values per unit and frame, 6 copies of the
        # features and 8 of the waveform. For the sizes in conf/encoder, the prediction is within a factor
        # of 2. A value has 4 bytes.
        frame_rate = 1 / self.features.frame_seconds
        # The layers of the second stack have fewer frames.
        layers = self.pre_rnn.lstm.num_layers + self.post_rnn.lstm.num_layers / self.stack_time.factor
        values = frame_rate * (6 * self.width * layers + 6 * self.features.features)
        return 4 * (values + 8 * self.features.sample_rate)


def _split_frames(x: Tensor, size: int) -> list[Tensor]:
    """Return copies of the segments of frames (B, T, ·). The last one is padded to ``size`` frames."""
    x = F.pad(x, (0, 0, 0, -x.shape[1] % size))
    # The addition makes a copy, because a view would belong to the graph of the whole tensor.
    return [x[:, start : start + size] + 0 for start in range(0, x.shape[1], size)]


def _select_rows(state: tuple[Tensor, Tensor], rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the state of ``rows`` (N,) of an LSTM: two tensors (layers, N, H) from (layers, B, H)."""
    hidden, cell = state
    return hidden[:, rows], cell[:, rows]
