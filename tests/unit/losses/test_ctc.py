"""The static form of the CTC loss against torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from speechtrain.compute_policy import PLAIN, STATIC, ComputePolicy
from speechtrain.losses.ctc import ctc_loss, view_divergence

BLANK = 6


def case(rows: int, length: int, width: int, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, length, 7, generator=generator, dtype=torch.float64).requires_grad_()
    labels = torch.randint(0, 6, (rows, width), generator=generator)
    labels[:, 1:3] = labels[:, :1]  # repeated ones need a blank between
    frames = torch.randint(1, length + 1, (rows,), generator=generator)
    frames[0] = length
    symbols = torch.randint(0, width + 1, (rows,), generator=generator)
    symbols[0], symbols[1] = width, 0
    return scores, labels, frames, symbols


@pytest.mark.parametrize(("length", "width"), [(12, 4), (30, 9), (3, 3), (1, 1)])
def test_losses_and_gradients_are_torch_s(length: int, width: int) -> None:
    scores, labels, frames, symbols = case(9, length, width)
    factors = torch.linspace(0.5, 2, 9, dtype=torch.float64)
    found = []
    for static in (False, True):
        losses = ctc_loss(
            F.log_softmax(scores, 2), labels, frames, symbols, BLANK, STATIC if static else PLAIN
        )
        (gradient,) = torch.autograd.grad((losses * factors).sum(), scores)
        found.append((losses.detach(), gradient))
    # softplus is linear above 20, which costs 2e-9
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-8, atol=1e-7)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-7, atol=1e-7)
    assert found[0][0].gt(0).any()


def test_rows_that_cannot_be_spelt_cost_nothing() -> None:
    scores, labels, frames, symbols = case(4, 5, 6)
    frames, symbols = torch.tensor([5, 2, 0, 5]), torch.tensor([6, 4, 1, 2])
    losses = ctc_loss(F.log_softmax(scores, 2), labels, frames, symbols, BLANK, STATIC)
    (gradient,) = torch.autograd.grad(losses.sum(), scores)
    assert losses[:3].tolist() == [0, 0, 0]
    assert not gradient[:3].any()
    assert losses[3] > 0
    assert gradient.isfinite().all()


def test_what_lies_beyond_a_row_does_not_count() -> None:
    scores, labels, frames, symbols = case(3, 8, 4)
    frames, symbols = torch.tensor([6, 5, 8]), torch.tensor([2, 1, 3])
    plain = ctc_loss(F.log_softmax(scores, 2), labels, frames, symbols, BLANK, STATIC)
    other, spelt = scores.detach().clone(), labels.clone()
    other[0, 6:], spelt[0, 2:] = 7.0, 3
    again = ctc_loss(F.log_softmax(other, 2), spelt, frames, symbols, BLANK, STATIC)
    assert torch.equal(plain.detach(), again)


def kernel_without_empty_rows(
    scores: Tensor, labels: Tensor, frames: Tensor, symbols: Tensor, *settings: object
) -> Tensor:
    """Torch's loss, but NaN with gradients of NaN in rows without frames or labels."""
    is_empty = (frames == 0) | (symbols == 0)
    factors = torch.ones_like(scores).masked_fill(is_empty[None, :, None], torch.nan)
    return F.ctc_loss(scores * factors, labels, frames, symbols, BLANK, "none", zero_infinity=True)


@pytest.mark.parametrize("width", [0, 4])
def test_a_vendors_kernel_gets_no_row_without_labels(width: int) -> None:
    scores, labels, _, _ = case(5, 8, 4)
    frames, symbols = torch.tensor([8, 6, 0, 0, 2]), torch.tensor([4, 0, 0, 2, 4]).clamp(max=width)
    vendor = ComputePolicy(ctc="vendor", ctc_kernel=kernel_without_empty_rows)
    results = []
    for policy in (PLAIN, STATIC, vendor):
        losses = ctc_loss(F.log_softmax(scores, 2), labels[:, :width], frames, symbols, BLANK, policy)
        results.append((losses.detach(), *torch.autograd.grad(losses.sum(), scores)))
    torch.testing.assert_close(results[1:], [results[0]] * 2, rtol=1e-7, atol=1e-7)
    assert results[0][0][1] > 0


def test_the_divergence_of_two_views_is_that_of_torch_and_moves_only_its_own_row() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 5, 7, generator=generator, dtype=torch.float64).requires_grad_()
    scores, frames = F.log_softmax(logits, 2), torch.tensor([5, 2, 0, 5, 2, 0])
    divergences = view_divergence(scores, frames)
    for row, count in enumerate(frames.tolist()):
        other = (row + 3) % 6
        distribution, target = scores[row, :count], scores[other, :count].detach()
        expected = F.kl_div(distribution, target, reduction="sum", log_target=True)
        torch.testing.assert_close(divergences[row], expected, rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(divergences[0], logits)
    assert gradient[0].any()
    assert not gradient[1:].any()
