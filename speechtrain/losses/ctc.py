"""CTC loss (Graves et al., 2006): torch's kernel, or static shapes for devices that record graphs.

Legend: B rows, T frames, V classes, U labels, S = 2 U + 1 alignment states: a blank, then each label with a
blank after it. All scores are natural log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from speechtrain.compute_policy import PLAIN, ComputePolicy

_NEVER = -1e30  # Log-probability of an impossible path. It is finite because −inf times 0 is NaN.


def ctc_loss(
    scores: Tensor,
    labels: Tensor,
    frames: Tensor,
    label_counts: Tensor,
    blank: int,
    policy: ComputePolicy = PLAIN,
    host_lengths: tuple[list[int], list[int]] | None = None,
) -> Tensor:
    """Return the negative log-likelihood (B,) of the first ``label_counts`` (B,) of ``labels`` (B, U).

    ``scores`` (B, T, V) are log-probabilities, of which the first ``frames`` (B,) count. A row whose labels
    do not fit into its frames has the loss 0 and no gradient.

    ``policy.ctc`` selects the kernel. ``static`` computes the same loss in shapes that do not depend on data,
    with T steps forward and T steps backward for every row. The host does not read any value. ``static``
    also replaces a vendor's kernel that is not loaded.

    ``host_lengths`` are the values of ``frames`` and ``label_counts``. Torch's kernel needs these values on
    the host. Without ``host_lengths`` it reads them from the device.
    """
    vendor_kernel = None if policy.ctc == "static" else policy.ctc_kernel
    if policy.ctc != "torch" and vendor_kernel is None:
        loss: Tensor = _StaticLoss.apply(scores, labels, frames, label_counts, blank)  # type: ignore[no-untyped-call]
        return loss
    if vendor_kernel is not None:
        return _vendor_loss(vendor_kernel, scores, labels, frames, label_counts, blank)
    time_major = scores.transpose(0, 1)
    lengths: tuple[Any, Any] = host_lengths or (frames, label_counts)
    return F.ctc_loss(time_major, labels, *lengths, blank, reduction="none", zero_infinity=True)


def view_divergence(scores: Tensor, frames: Tensor) -> Tensor:
    """Return the divergence (2 B,) of each row from the other view of its recording (Yao et al., 2025).

    ``scores`` (2 B, T, V) are the log-probabilities of the first views of all recordings, then of their
    second views. The divergence is KL(other view ‖ row), summed over the ``frames`` (2 B,) of the row. The
    other view has no gradient.
    """
    recordings, targets = len(scores) // 2, scores.detach()
    targets = torch.cat([targets[recordings:], targets[:recordings]])
    divergences = (targets.exp() * (targets - scores)).sum(2)
    is_valid = torch.arange(scores.shape[1], device=frames.device) < frames[:, None]
    return (divergences * is_valid.to(scores.dtype)).sum(1)


def _vendor_loss(
    kernel: Callable[..., Tensor],
    scores: Tensor,
    labels: Tensor,
    frames: Tensor,
    label_counts: Tensor,
    blank: int,
) -> Tensor:
    """Return the loss (B,), by the vendor's ``kernel`` for rows with labels.

    A row without labels has only one path, the blanks, whose loss is computed here. Such rows are all rows of
    a warm-up batch and the padding of a last batch. Vendors do not test their kernels with such rows, and the
    weight 0 of the rows would not remove a NaN.
    """
    has_labels = (label_counts > 0) & (frames > 0)
    kernel_scores = scores.masked_fill(~has_labels[:, None, None], 0.0)
    label_counts = label_counts.clamp(min=min(1, labels.shape[1]))
    losses = kernel(
        kernel_scores.transpose(0, 1), labels, frames.clamp(min=1), label_counts, blank, "none", True
    )
    is_valid = torch.arange(scores.shape[1], device=frames.device) < frames[:, None]
    blank_losses = -(scores[:, :, blank] * is_valid.to(scores.dtype)).sum(1)
    return losses.masked_fill(~has_labels, 0.0) + blank_losses.masked_fill(has_labels, 0.0)


class _StaticLoss(torch.autograd.Function):
    """The loss by forward and backward recursions over log-probabilities.

    An emission is the score of a state's symbol in a frame. The gradient over it is minus the posterior
    probability of the state in that frame.
    """

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, labels: Tensor, frames: Tensor, label_counts: Tensor, blank: int
    ) -> Tensor:
        states = _states(labels, blank)
        emissions = scores.gather(2, states[:, None].expand(-1, scores.shape[1], -1))
        skip, end, begin = _transitions(states, label_counts, blank, scores.dtype)
        alphas = _forward_variables(emissions, begin, skip, frames)
        # The log-likelihood is the logsumexp of the final states.
        final_scores = alphas[-1][:, 0] + end
        highest = final_scores.max(1).values
        relative = final_scores - highest[:, None]
        log_likelihood = highest + relative.exp().sum(1).log()
        is_possible = ((log_likelihood > _NEVER / 2) & (frames > 0)).to(scores.dtype)
        ctx.save_for_backward(
            torch.cat(alphas, 1), emissions, states, skip, end, frames, log_likelihood, is_possible
        )
        ctx.classes = scores.shape[2]
        return -log_likelihood * is_possible

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        alphas, emissions, states, skip, end, frames, log_likelihood, is_possible = ctx.saved_tensors
        betas = _backward_variables(emissions, skip, end, frames)
        frame = torch.arange(alphas.shape[1], device=frames.device)
        weight = (frame < frames[:, None]).to(end.dtype) * (is_possible * upstream)[:, None]
        # The clamp matters only for rows without a path. The weight of these rows is 0.
        log_posteriors = alphas + torch.cat(betas, 1) - log_likelihood[:, None, None]
        posteriors = log_posteriors.clamp(max=0.0).exp()
        symbol = torch.arange(ctx.classes, device=states.device)
        has_symbol = (states[:, :, None] == symbol).to(end.dtype)
        return -torch.matmul(posteriors * weight[:, :, None], has_symbol), None, None, None, None


def _states(labels: Tensor, blank: int) -> Tensor:
    """Return the symbol (B, S) of each state: the labels with a blank before, between and after them."""
    padded = F.pad(labels, (0, 1), value=blank)  # A batch without any label has one state.
    blanks = torch.full_like(padded, blank)
    return torch.stack([blanks, padded], 2).view(len(labels), -1)[:, :-1]


def _transitions(
    states: Tensor, label_counts: Tensor, blank: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores of skips into each state, of path ends and of path beginnings in each state.

    Each is (B, S), 0 where it is allowed and ``_NEVER`` where it is not. A skip leads over a blank from one
    label to a different label.
    """
    width = states.shape[1]
    position = torch.arange(width, device=states.device)
    blanks = torch.full_like(states[:, :1], blank)
    two_before = torch.cat([blanks, blanks, states[:, :-2]], 1)[:, :width]
    may_skip = (position % 2 == 1) & (position > 1) & (states != two_before)
    last_blank = 2 * label_counts[:, None]
    is_final = (position == last_blank) | (position == last_blank - 1)
    zeros = torch.zeros_like(states, dtype=dtype)
    skip = zeros.masked_fill(~may_skip, _NEVER)
    end = zeros.masked_fill(~is_final, _NEVER)
    begin = zeros.masked_fill(position >= 2, _NEVER)
    return skip, end, begin


def _forward_variables(emissions: Tensor, begin: Tensor, skip: Tensor, frames: Tensor) -> list[Tensor]:
    """Return for each frame the log-probability (B, 1, S) of all path beginnings that lead to a state there.

    After a row's last frame, its variables are repeated.
    """
    alpha = begin + emissions[:, 0]
    alphas = [alpha[:, None]]
    for t in range(1, emissions.shape[1]):
        next_alpha = _log_sum(alpha, _shifted(alpha, 1))
        next_alpha = _log_sum(next_alpha, _shifted(alpha, 2) + skip) + emissions[:, t]
        alpha = torch.where((frames > t)[:, None], next_alpha, alpha)
        alphas.append(alpha[:, None])
    return alphas


def _backward_variables(emissions: Tensor, skip: Tensor, end: Tensor, frames: Tensor) -> list[Tensor]:
    """Return for each frame the log-probability (B, 1, S) of all path endings that follow a state there."""
    length = emissions.shape[1]
    beta = torch.full_like(end, _NEVER)
    betas = [beta[:, None]] * length
    for t in range(length - 1, -1, -1):
        previous_beta = beta
        if t + 1 < length:
            onward = beta + emissions[:, t + 1]
            previous_beta = _log_sum(onward, _shifted(onward, -1))
            previous_beta = _log_sum(previous_beta, _shifted(onward + skip, -2))
        is_last_frame = (frames == t + 1)[:, None]
        beta = torch.where(is_last_frame, end, previous_beta)
        betas[t] = beta[:, None]
    return betas


def _log_sum(a: Tensor, b: Tensor) -> Tensor:
    """Return log(exp(a) + exp(b)).

    ``logaddexp`` would leave a lazy graph, and a + softplus(b − a) would lose ``b`` if ``a`` is ``_NEVER``.
    """
    return torch.maximum(a, b) + F.softplus(-(a - b).abs())


def _shifted(x: Tensor, states: int) -> Tensor:
    """Return ``x`` (B, S) shifted by ``states``, to the right if positive, and filled with ``_NEVER``."""
    width = x.shape[1]
    count = min(abs(states), width)
    fill = torch.full_like(x[:, :count], _NEVER)
    parts = [fill, x[:, : width - count]] if states > 0 else [x[:, count:], fill]
    return torch.cat(parts, 1)
