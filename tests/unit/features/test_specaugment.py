from __future__ import annotations

from typing import Any

import scipy.stats
import torch
from torch import Tensor

from speechtrain.features.specaugment import SpecAugment

OFF: dict[str, Any] = {"freq_masks": 0, "time_masks": 0}


def masked(module: SpecAugment, rows: int, frames: int, width: int, lengths: Tensor | None = None) -> Tensor:
    """Where (rows, frames, width) a module in training puts zeros."""
    lengths = torch.full((rows,), frames) if lengths is None else lengths
    return module.train()(torch.ones(rows, frames, width), lengths) == 0


def uniform(counts: Tensor) -> float:
    """p-value that the counts come from equally likely outcomes."""
    return float(scipy.stats.chisquare(counts.numpy()).pvalue)


def test_frequency_masks_are_uniform_and_reach_both_ends() -> None:
    torch.manual_seed(0)
    hit = masked(SpecAugment(**{**OFF, "freq_masks": 1}), 20000, 2, 80)
    assert torch.equal(hit[:, 0], hit[:, 1])
    widths = hit[:, 0].sum(1)
    assert widths.max() == 20
    assert uniform(widths.bincount(minlength=21)) > 1e-3
    assert hit[:, 0, 0].any()
    assert hit[:, 0, -1].any()
    torch.manual_seed(1)
    fixed = masked(
        SpecAugment(**{**OFF, "freq_masks": 1, "freq_width": 6, "freq_width_min": 6}), 20000, 1, 40
    )
    assert (fixed[:, 0].sum(1) == 6).all()
    starts = fixed[:, 0].float().argmax(1)
    assert uniform(starts.bincount(minlength=35)) > 1e-3  # 0 to 34, both included


def test_time_masks_are_bounded_by_a_fraction_of_each_utterance() -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([1000, 500, 120, 20]).repeat(5000)
    hit = masked(SpecAugment(**{**OFF, "time_masks": 1}), 20000, 1000, 1, lengths)[:, :, 0]
    widths = hit.sum(1).view(5000, 4)
    # round(0.03 · length): 30, 15, 4 and 1
    for column, most in enumerate((30, 15, 4, 1)):
        counts = widths[:, column].bincount(minlength=most + 1)
        assert len(counts) == most + 1
        assert uniform(counts) > 1e-3
    for column, length in enumerate((1000, 500, 120, 20)):
        row = hit.view(5000, 4, 1000)[:, column]
        assert not row[:, length:].any()
        assert row[:, length - 1].any()


def test_number_of_time_masks_can_follow_the_utterance() -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([400, 100, 20, 10])
    module = SpecAugment(**{**OFF, "time_masks": 0.05, "time_width": 1, "time_width_min": 1})
    hits = torch.stack([masked(module, 4, 400, 1, lengths)[:, :, 0].sum(1) for _ in range(300)])
    assert hits.max(0).values.tolist() == [20, 5, 1, 1]  # 0.5 rounds up
    assert hits[:, 2:].min() == 1
    assert hits[:, 0].float().mean() > 18  # single frames that seldom meet


def test_fixed_regions_of_the_older_reference() -> None:
    torch.manual_seed(0)
    module = SpecAugment(
        freq_masks=2, freq_width=6, freq_width_min=6, time_masks=2, time_width=6, time_width_min=6
    )
    hit = masked(module, 500, 100, 240)
    rows, columns = hit.all(2).sum(1), hit.all(1).sum(1)
    for counts in (rows, columns):
        assert counts.min() >= 6
        assert counts.max() == 12
    # An utterance shorter than a mask is masked whole, and nothing beyond it.
    hit = masked(SpecAugment(**{**OFF, "time_masks": 2, "time_width": 6, "time_width_min": 6}), 2, 9, 3,
                 torch.tensor([4, 0]))  # fmt: skip
    assert hit[0].all(1).tolist() == [True] * 4 + [False] * 5
    assert not hit[1].any()


def test_utterances_of_a_batch_are_drawn_apart() -> None:
    torch.manual_seed(0)
    hit = masked(SpecAugment(), 64, 400, 80)
    assert len({tuple(row.flatten().tolist()) for row in hit}) > 60


def test_draws_follow_the_global_seed_and_not_the_padding() -> None:
    lengths = torch.tensor([90, 70])
    module = SpecAugment(rect_masks=2).train()
    x = torch.randn(2, 90, 80)
    torch.manual_seed(7)
    once = module(x, lengths)
    torch.manual_seed(7)
    padded = module(torch.cat([x, torch.zeros(2, 33, 80)], dim=1), lengths)
    assert torch.equal(padded[:, :90], once)
    assert not torch.equal(module(x, lengths), once)


def test_unmasked_values_gradients_and_precision_pass_unchanged() -> None:
    torch.manual_seed(0)
    x = (1 + torch.rand(4, 200, 80)).bfloat16().requires_grad_()  # A value of 0 would count as masked.
    y = SpecAugment().train()(x, torch.full((4,), 200))
    assert y.dtype == torch.bfloat16
    kept = y != 0
    assert torch.equal(y[kept], x[kept])
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, kept.bfloat16())


def test_rectangles_are_the_products_of_their_bands() -> None:
    """A loop over the same draws: of the widths in features, then of those in frames."""
    lengths, frames, width = torch.tensor([70, 40, 9]), 75, 30
    module = SpecAugment(**OFF, rect_masks=5, rect_time=20, rect_freq=12)
    torch.manual_seed(3)
    hit = masked(module, 3, frames, width, lengths)
    torch.manual_seed(3)
    freq_draws, time_draws = torch.rand(2, 3, 5).double(), torch.rand(2, 3, 5).double()
    expected = torch.zeros(3, frames, width, dtype=torch.bool)
    for row in range(3):
        length = int(lengths[row])
        for mask in range(5):
            high = int(freq_draws[0, row, mask] * (12 + 1))
            low_bin = int(freq_draws[1, row, mask] * (width - high + 1))
            long = int(time_draws[0, row, mask] * (min(20, length) + 1))
            first = int(time_draws[1, row, mask] * (length - long + 1))
            expected[row, first : first + long, low_bin : low_bin + high] = True
    assert expected.any()
    assert torch.equal(hit, expected)
