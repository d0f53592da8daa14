"""Segments: the graphs of a lazy device, which would otherwise grow with the recording or the network.

Legend: B rows, T frames, F features, H hidden units, k factor of StackTime.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from speechtrain.compute_policy import ComputePolicy
from speechtrain.nn.lstm import LSTM
from speechtrain.nn.stack_time import StackTime, stack_time


class _EndSegment(torch.autograd.Function):
    """Identity of tensors that ends a lazy device's graph in forward and, at the same point, in backward."""

    @staticmethod
    def forward(ctx: Any, mark_step: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.mark_step = mark_step
        ctx.set_materialize_grads(False)
        mark_step()
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.mark_step()
        return (None, *gradients)


def end_segment(policy: ComputePolicy, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors. On a lazy device, the graph ends here."""
    if not policy.is_lazy:
        return tensors
    ended: tuple[Tensor, ...] = _EndSegment.apply(policy.mark_step, *tensors)  # type: ignore[no-untyped-call]
    return ended


def end_encoder(policy: ComputePolicy, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors. If the policy divides an LSTM encoder into segments, the graph ends here."""
    if not policy.lstm_segment:
        return tensors
    return end_segment(policy, *tensors)


def run_stacks(
    first: LSTM, stack: StackTime, second: LSTM, x: Tensor, lengths: Tensor, policy: ComputePolicy
) -> tuple[Tensor, Tensor]:
    """Run an LSTM stack, StackTime and a second LSTM stack on ``x`` (B, T, F).

    Returns the frames (B, ceil(T/k), H) and their lengths (B,).

    If the policy has segments, all layers run over a few frames at a time. All segments of a recording use
    one lazy graph. A graph of all frames has tens of thousands of operations, which take minutes to compile.
    """
    if not policy.lstm_segment:
        x, _ = first(x)
        x, lengths = stack(x, lengths)
        x, _ = second(x)
        return x, lengths
    # The inputs and the zero states are made before the first segment. They would make its graph differ.
    segment_frames = max(1, policy.lstm_segment // stack.factor) * stack.factor
    stacked_frames = -(-x.shape[1] // stack.factor)
    stacked_lengths = stack.lengths(lengths)
    x = F.pad(x, (0, 0, 0, -x.shape[1] % segment_frames))
    # The addition makes a copy, because a view would belong to the graph of the whole tensor.
    segments = [x[:, start : start + segment_frames] + 0 for start in range(0, x.shape[1], segment_frames)]
    frames_left, position = lengths + 0, torch.arange(segment_frames, device=x.device)
    first_state = first.zeros(x, len(x))
    second_state = second.zeros(x, len(x))
    policy.mark_step()
    outputs = []
    for segment in segments:
        is_valid = position < frames_left[:, None]
        frames_left = frames_left - segment_frames
        y, first_state = first(segment, first_state)
        y = stack_time(y * is_valid[:, :, None].to(y.dtype), stack.factor)
        y, second_state = second(y, second_state)
        *states, y = end_segment(policy, *first_state, *second_state, y)
        first_state, second_state = (states[0], states[1]), (states[2], states[3])
        outputs.append(y)
    # The gradient of the concatenation is split into views. The backward of the product by 1 copies all of
    # them before the backward of the last segment, which would otherwise have another graph.
    return torch.cat([y * 1.0 for y in outputs], 1)[:, :stacked_frames], stacked_lengths
