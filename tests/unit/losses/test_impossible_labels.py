"""Classes of bias -inf: labels that cannot be emitted, in both forms of the transducer loss."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from speechtrain.losses.transducer import transducer_loss

ROWS, FRAMES, SYMBOLS, WIDTH, CLASSES = 3, 5, 2, 4, 6
BLANK, IMPOSSIBLE = 5, 2


def inputs(durations: int = 0) -> list[Tensor]:
    """Return encoder, prediction, weight and bias; the class IMPOSSIBLE has bias -inf."""
    torch.manual_seed(0)
    outputs = CLASSES + durations
    tensors = [
        torch.randn(ROWS, FRAMES, WIDTH),
        torch.randn(ROWS, SYMBOLS + 1, WIDTH),
        torch.randn(outputs, WIDTH),
        torch.randn(outputs),
    ]
    tensors[3][IMPOSSIBLE] = -torch.inf
    return [tensor.requires_grad_() for tensor in tensors]


def losses_of(tensors: list[Tensor], labels: list[list[int]], static: bool, durations: list[int]) -> Tensor:
    rows = len(labels)
    encoder, prediction, weight, bias = tensors
    lengths = torch.full((rows,), FRAMES), torch.full((rows,), SYMBOLS)
    return transducer_loss(
        encoder[:rows], prediction[:rows], weight, bias, torch.tensor(labels), *lengths,
        blank=BLANK, static=static, durations=durations,
    )  # fmt: skip


@pytest.mark.parametrize("durations", [[], [0, 1, 2]])
@pytest.mark.parametrize("static", [False, True])
def test_transducer_loss_is_infinite_for_an_impossible_label(static: bool, durations: list[int]) -> None:
    possible = [[0, 1], [3, 4]]
    tensors = inputs(len(durations))
    losses = losses_of(tensors, [*possible, [1, IMPOSSIBLE]], static, durations)
    assert losses[2] == torch.inf
    losses.sum().backward()
    alone = inputs(len(durations))
    expected = losses_of(alone, possible, static, durations)
    expected.sum().backward()
    torch.testing.assert_close(losses[:2], expected)
    for tensor, reference in zip(tensors, alone, strict=True):
        assert tensor.grad is not None
        assert reference.grad is not None
        assert bool(tensor.grad.isfinite().all())
        torch.testing.assert_close(tensor.grad, reference.grad, rtol=1e-5, atol=1e-6)
    assert not tensors[0].grad[2].any()  # type: ignore[index]


@pytest.mark.parametrize("static", [False, True])
def test_transducer_loss_ignores_an_impossible_class_that_no_label_needs(static: bool) -> None:
    tensors = inputs()
    losses = losses_of(tensors, [[0, 1]], static, [])
    unlikely = [tensor.detach().clone() for tensor in tensors]
    unlikely[3][IMPOSSIBLE] = -80.0
    torch.testing.assert_close(losses, losses_of(unlikely, [[0, 1]], static, []))
