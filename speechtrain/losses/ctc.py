"""CTC loss (Graves et al., 2006): torch's own, or in static shapes for devices that record graphs.

Legend: B rows, T frames, V classes, U labels, S = 2 U + 1 states: the labels with blanks around each.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from speechtrain.compute_policy import PLAIN, ComputePolicy

_NEVER = -1e30  # log-probability of the impossible; finite, since an infinite one times 0 is NaN


def ctc_loss(
    scores: Tensor,
    labels: Tensor,
    frames: Tensor,
    symbols: Tensor,
    blank: int,
    policy: ComputePolicy = PLAIN,
) -> Tensor:
    """Negative log-likelihood (B,) of ``labels`` (B, U), of which ``symbols`` (B,) count, in ``frames`` (B,).

    ``scores`` (B, T, V) are log-probabilities. A row whose labels do not fit into its frames has loss 0
    and no gradient. ``policy.ctc`` selects the kernel; ``static`` computes the same without any value read
    by the host: rows of every length take T steps forward and T steps backward. It also replaces a vendor's
    kernel where that is not loaded.
    """
    kernel = None if policy.ctc == "static" else policy.ctc_kernel
    if policy.ctc != "torch" and kernel is None:
        loss: Tensor = _StaticLoss.apply(scores, labels, frames, symbols, blank)  # type: ignore[no-untyped-call]
        return loss
    by_time = scores.transpose(0, 1)
    if kernel is not None:
        return kernel(by_time, labels, frames, symbols, blank, "none", True)
    return F.ctc_loss(by_time, labels, frames, symbols, blank, reduction="none", zero_infinity=True)


class _StaticLoss(torch.autograd.Function):
    """Forward and backward recursions in the log domain; the gradient is minus the states' posteriors."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, labels: Tensor, frames: Tensor, symbols: Tensor, blank: int
    ) -> Tensor:
        rows, length, classes = scores.shape
        around = torch.full_like(labels[:, :1], blank)
        padded = torch.cat([labels, around], 1)
        states = torch.stack([torch.full_like(padded, blank), padded], 2).view(rows, -1)[:, :-1]
        width = states.shape[1]
        emitted = scores.gather(2, states[:, None].expand(-1, length, -1))
        position = torch.arange(width, device=scores.device)
        # transitions from two states before: over a blank, between different labels
        before = torch.cat([around, around, states[:, :-2]], 1)[:, :width]
        may_skip = (position % 2 == 1) & (position > 1) & (states != before)
        nothing = torch.zeros_like(states, dtype=scores.dtype)
        skip = nothing.masked_fill(~may_skip, _NEVER)
        ends = (position == 2 * symbols[:, None]) | (position == 2 * symbols[:, None] - 1)
        end = nothing.masked_fill(~ends, _NEVER)
        begin = nothing.masked_fill(position >= 2, _NEVER)

        log_chance = begin + emitted[:, 0]
        alphas = [log_chance[:, None]]
        for t in range(1, length):
            reached = _either(log_chance, _shifted(log_chance, 1))
            reached = _either(reached, _shifted(log_chance, 2) + skip) + emitted[:, t]
            log_chance = torch.where((frames > t)[:, None], reached, log_chance)
            alphas.append(log_chance[:, None])
        last = log_chance + end
        top = last.max(1).values
        total = top + (last - top[:, None]).exp().sum(1).log()
        possible = ((total > _NEVER / 2) & (frames > 0)).to(scores.dtype)
        ctx.save_for_backward(torch.cat(alphas, 1), emitted, states, skip, end, frames, total, possible)
        ctx.classes = classes
        return -total * possible

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        alphas, emitted, states, skip, end, frames, total, possible = ctx.saved_tensors
        length = alphas.shape[1]
        log_chance = torch.full_like(end, _NEVER)
        betas = [log_chance[:, None]] * length
        for t in range(length - 1, -1, -1):
            reached = log_chance
            if t + 1 < length:
                onward = log_chance + emitted[:, t + 1]
                reached = _either(onward, _shifted(onward, -1))
                reached = _either(reached, _shifted(onward + skip, -2))
            log_chance = torch.where((frames == t + 1)[:, None], end, reached)
            betas[t] = log_chance[:, None]
        position = torch.arange(length, device=frames.device)
        weight = (position < frames[:, None]).to(end.dtype) * (possible * upstream)[:, None]
        # at most 1, except in impossible rows, whose weight is 0
        posteriors = (alphas + torch.cat(betas, 1) - total[:, None, None]).clamp(max=0.0).exp()
        which = (states[:, :, None] == torch.arange(ctx.classes, device=states.device)).to(end.dtype)
        return -torch.matmul(posteriors * weight[:, :, None], which), None, None, None, None


def _either(a: Tensor, b: Tensor) -> Tensor:
    """The logarithm of exp a + exp b."""
    # a + softplus(b - a) would lose b where a is _NEVER; logaddexp would leave a lazy graph
    return torch.maximum(a, b) + F.softplus(-(a - b).abs())


def _shifted(x: Tensor, states: int) -> Tensor:
    """``x`` (B, S) shifted by ``states``, to the right where positive, and filled with ``_NEVER``."""
    width = x.shape[1]
    count = min(abs(states), width)
    nothing = torch.full_like(x[:, :count], _NEVER)
    parts = [nothing, x[:, : width - count]] if states > 0 else [x[:, count:], nothing]
    return torch.cat(parts, 1)
