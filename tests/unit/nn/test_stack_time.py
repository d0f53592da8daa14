from __future__ import annotations

import pytest
import torch
from torch import Tensor

from speechtrain.nn.stack_time import StackTime, stack_time


def shifted_copies(x: Tensor, factor: int) -> Tensor:
    """The reference's other published form: the sequence beside its shifted copies, every k-th step."""
    copies = [x]
    for shift in range(1, factor):
        copy = torch.zeros_like(x)
        copy[:, : max(x.shape[1] - shift, 0)] = x[:, shift:]
        copies.append(copy)
    return torch.cat(copies, dim=2)[:, ::factor]


@pytest.mark.parametrize("factor", range(1, 10))
@pytest.mark.parametrize("frames", range(1, 20))
def test_equals_the_form_by_shifted_copies(frames: int, factor: int) -> None:
    x = torch.randn(3, frames, 4)
    lengths = torch.full((3,), frames)
    stacked, stacked_lengths = StackTime(factor)(x, lengths)
    assert torch.equal(stacked, shifted_copies(x, factor))
    assert stacked.shape == (3, -(-frames // factor), 4 * factor)
    assert stacked_lengths.tolist() == [stacked.shape[1]] * 3


def test_lengths_are_rounded_up_for_every_row() -> None:
    lengths = torch.arange(1, 18)
    _, stacked = StackTime(4)(torch.zeros(17, 17, 1), lengths)
    assert stacked.tolist() == [-(-n // 4) for n in range(1, 18)]
    # The golden chain of 16.7 s: 557 spliced frames, 279 after a factor of 2, 70 after 8.
    for factor, frames in ((2, 279), (8, 70)):
        y, n = StackTime(factor)(torch.zeros(1, 557, 2), torch.tensor([557]))
        assert (y.shape[1], n.item()) == (frames, frames)


def test_a_row_does_not_depend_on_the_padding_of_its_batch() -> None:
    x = torch.randn(1, 5, 3)
    alone, _ = StackTime(4)(x, torch.tensor([5]))
    padded = torch.cat([x, torch.randn(1, 6, 3)], dim=1)  # what an LSTM leaves beyond a row's end
    beside, lengths = StackTime(4)(padded, torch.tensor([5]))
    assert lengths.tolist() == [2]
    assert torch.equal(beside[:, :2], alone)


def test_keeps_the_precision_and_the_frame_order() -> None:
    x = torch.arange(6.0).view(1, 6, 1).bfloat16()
    y, _ = StackTime(3)(x, torch.tensor([6]))
    assert y.dtype == torch.bfloat16
    assert y.tolist() == [[[0, 1, 2], [3, 4, 5]]]
    assert stack_time(x[:, :4], 3).tolist() == [[[0, 1, 2], [3, 0, 0]]]
