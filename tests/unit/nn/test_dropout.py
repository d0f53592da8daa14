from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from speechtrain.compute_policy import STATIC, ComputePolicy, apply_policy
from speechtrain.devices.cuda import CUDA
from speechtrain.nn.dropout import Dropout


def dropped(x: torch.Tensor, probability: float = 0.1, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    y: torch.Tensor = Dropout(probability).train()(x)
    return y


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_share_and_the_scale_follow_from_the_probability(probability: float, dtype: torch.dtype) -> None:
    y = dropped(torch.ones(1_000_000, dtype=dtype), probability)
    assert y.dtype == dtype
    share = y.count_nonzero() / len(y)
    assert float(share) == pytest.approx(1 - probability, abs=0.002)
    values = y[y != 0].unique()
    assert len(values) == 1
    rounding_error = 4e-3 if dtype == torch.bfloat16 else 3e-4
    assert float(values) == pytest.approx(1 / (1 - probability), rel=rounding_error)


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 5), (7, 3, 5)])
def test_any_shape_and_stride_has_a_mask_of_its_own(shape: tuple[int, ...]) -> None:
    x = torch.rand(shape) + 1
    y = dropped(x, 0.5)
    spread = torch.empty(*shape, 2)[..., 0].copy_(x)
    assert y.shape == x.shape
    assert torch.equal(y, dropped(spread, 0.5))
    assert torch.equal(y[y != 0], (x * 2)[y != 0])
    assert not torch.equal(dropped(torch.ones(100)), dropped(torch.ones(100), seed=1))


def test_units_are_dropped_independently() -> None:
    signs = dropped(torch.ones(1000, 1024), 0.5) - 1  # −1 or 1
    correlation = signs.T @ signs / 1000
    off_diagonal = correlation - torch.eye(1024)
    assert off_diagonal.abs().max() < 0.2
    means = signs.mean(0)
    assert means.abs().max() < 0.16


def test_gradients_are_those_of_the_mask() -> None:
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: dropped(x, 0.3), x)


def test_nothing_is_dropped_in_evaluation_or_at_a_probability_of_0_and_all_at_1() -> None:
    x = torch.rand(10) + 1
    assert torch.equal(Dropout(0.5).eval()(x), x)
    assert torch.equal(dropped(x, 0.0), x)
    assert torch.equal(dropped(x, 1.0), torch.zeros(10))


@pytest.mark.parametrize("policy", [STATIC, CUDA().policy(torch.float32)])
def test_devices_other_than_cpus_use_the_operation_of_torch(policy: ComputePolicy) -> None:
    dropout = Dropout(0.3).train()
    apply_policy(dropout, policy)
    x = torch.rand(100)
    torch.manual_seed(3)
    y = dropout(x)
    torch.manual_seed(3)
    assert torch.equal(y, F.dropout(x, 0.3))
