"""The LSTM encoder of recognition models: audio in, frames of a fixed width out.

Legend: B rows, T feature frames, F features, H hidden units, k factor of StackTime.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from speechtrain.batch import Batch
from speechtrain.compute_policy import PLAIN, ComputePolicy, PolicyAware
from speechtrain.encoders.base import LogMelEncoder
from speechtrain.encoders.stream import FrameStream
from speechtrain.errors import ConfigError
from speechtrain.features.augment import Augment
from speechtrain.features.logmel import LogMel
from speechtrain.features.logmel_stream import LogMelStream
from speechtrain.nn.conformer import Context
from speechtrain.nn.lstm import LSTM
from speechtrain.nn.norm import MaskedBatchNorm
from speechtrain.nn.segments import run_stacks
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
        if self.split_segments:
            pivot = self._pivot(lengths, x.shape[1])
            if pivot and x.shape[1] - pivot >= _SHORTEST_SEGMENT:
                return self._encode_around_pivot(x, lengths, pivot)
        return run_stacks(self.pre_rnn, self.stack_time, self.post_rnn, x, lengths, self._policy)

    def _pivot(self, lengths: Tensor, frames: int) -> int:
        """Return the frame at which the shorter half of the rows has ended, or 0 if there is one row.

        The frame is rounded up to a multiple of StackTime's factor, so that no stacked frame is split. If the
        host may not read the lengths, the frame is not before the end of the ``frames``.
        """
        if len(lengths) < 2:
            return 0
        factor = self.stack_time.factor
        lengths_on_host = self._policy.lengths_on_host(lengths, frames)
        median = sorted(lengths_on_host, reverse=True)[len(lengths) // 2]
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
        return torch.cat((y, all_rows), 1), self.stack_time.lengths(lengths)

    def stream(
        self, context: Context | None = None, rows: int = 1, keys: Tensor | None = None
    ) -> FrameStream:
        if context is not None:
            raise ConfigError(f"context={list(context)}: an LSTM has no attention. Leave the context out")
        return FrameStream(LogMelStream(self.features, rows, keys), _LSTMStream(self, rows))

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


def _select_rows(state: tuple[Tensor, Tensor], rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the state of ``rows`` (N,) of an LSTM: two tensors (layers, N, H) from (layers, B, H)."""
    hidden, cell = state
    return hidden[:, rows], cell[:, rows]


class _LSTMStream:
    """The network of an LSTM encoder. It stores the stacks' states and an incomplete group."""

    def __init__(self, encoder: LSTMEncoder, rows: int) -> None:
        self.encoder = encoder
        log_mel = encoder.features
        self.incomplete = log_mel.window.new_zeros(rows, 0, log_mel.features)  # (B, T, F), T below k
        self.pre_state: tuple[Tensor, Tensor] | None = None
        self.post_state: tuple[Tensor, Tensor] | None = None

    def step(self, x: Tensor) -> Tensor:
        """Append features (B, T, F) and return the frames (B, T', H) of all groups that are now complete."""
        factor = self.encoder.stack_time.factor
        x = torch.cat([self.incomplete, x], dim=1)
        complete = x.shape[1] // factor * factor
        self.incomplete = x[:, complete:].clone()
        return self._encoded(x[:, :complete])

    def finish(self) -> Tensor:
        return self._encoded(self.incomplete)

    def _encoded(self, x: Tensor) -> Tensor:
        """Return the frames (B, ceil(T/k), H) of the next features (B, T, F)."""
        encoder = self.encoder
        rows, frames, _ = x.shape
        if not frames:
            return x.new_zeros(rows, 0, encoder.width)
        if encoder.feature_norm is not None:
            x = encoder.feature_norm(x, torch.full((rows,), frames, device=x.device))
        x, self.pre_state = encoder.pre_rnn(x, self.pre_state)
        x, self.post_state = encoder.post_rnn(stack_time(x, encoder.stack_time.factor), self.post_state)
        return x
