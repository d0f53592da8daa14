"""The running statistics of MaskedBatchNorm: which batches they count."""

from __future__ import annotations

import copy

import pytest
import torch

from speechtrain.nn.norm import MaskedBatchNorm

LENGTHS = torch.tensor([5, 3])


def frames(seed: int) -> torch.Tensor:
    return torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e25])
def test_statistics_that_overflow_are_not_kept(value: float) -> None:
    """The update of such a batch is skipped, so it must not change the model. 1e25 squared is inf in fp32."""
    norm, clean = MaskedBatchNorm(4), MaskedBatchNorm(4)
    for seed in range(3):
        norm(frames(seed), LENGTHS)
        clean(frames(seed), LENGTHS)
        if seed == 1:
            damaged = frames(9)
            damaged[0, 2, 1] = value
            norm(damaged, LENGTHS)
    assert torch.equal(norm.running_mean[1], clean.running_mean[1])
    assert torch.equal(norm.running_var[1], clean.running_var[1])
    assert norm.running_mean.isfinite().all()
    assert norm.running_var.isfinite().all()


def test_a_norm_without_gradients_does_not_change() -> None:
    """A frozen encoder computes without gradients, in training as in evaluation."""
    norm = MaskedBatchNorm(4)
    norm(frames(0), LENGTHS)
    state, frozen = copy.deepcopy(norm.state_dict()), copy.deepcopy(norm)
    with torch.no_grad():
        output = frozen(frames(1), LENGTHS)
    torch.testing.assert_close(frozen.state_dict(), state, rtol=0, atol=0)
    assert torch.equal(output, norm.eval()(frames(1), LENGTHS))
