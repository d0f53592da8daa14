"""The loss scale: lowered by an overflow, raised after a quiet time, never below its floor."""

from __future__ import annotations

import pytest
import torch

from speechtrain.devices.cuda import CUDA
from speechtrain.precision import BF16, FP16, FP32, Precision, gradients_of


def parameter(gradient: float | None) -> torch.optim.Optimizer:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = None if gradient is None else torch.full((2,), gradient)
    return torch.optim.SGD([weight], lr=1.0)


def test_the_scale_is_in_the_gradients_until_unscale() -> None:
    precision = FP16(initial_scale=1024.0)
    optimizer = parameter(None)
    weight = optimizer.param_groups[0]["params"][0]
    precision.backward((3.0 * weight).sum())
    assert weight.grad.tolist() == [3072.0, 3072.0]
    precision.unscale(optimizer)
    assert weight.grad.tolist() == [3.0, 3.0]
    precision.step(optimizer)
    assert weight.tolist() == [-2.0, -2.0]


def test_an_overflow_halves_the_scale_and_takes_no_step() -> None:
    precision = FP16(initial_scale=1024.0)
    optimizer = parameter(float("inf"))
    assert precision.overflow(optimizer)
    assert precision.scale == 512.0
    assert optimizer.param_groups[0]["params"][0].tolist() == [1.0, 1.0]


def test_at_its_floor_an_overflow_is_the_recipes_fault() -> None:
    precision = FP16(initial_scale=4.0, floor=3.0)
    optimizer = parameter(float("nan"))
    assert [precision.overflow(optimizer) for _ in range(3)] == [True, False, False]
    assert precision.scale == 3.0


def test_overflow_is_not_of_a_scale_that_cannot_help() -> None:
    precision = FP16(initial_scale=1024.0)
    optimizer = parameter(1.0)
    assert not precision.overflow(optimizer)
    assert precision.scale == 1024.0
    assert optimizer.param_groups[0]["params"][0].tolist() == [1.0, 1.0]


def test_the_scale_grows_after_quiet_updates_in_a_row() -> None:
    precision = FP16(initial_scale=8.0, growth_interval=2)
    for gradient, scale in ((1.0, 8.0), (float("inf"), 4.0), (1.0, 4.0), (1.0, 8.0), (1.0, 8.0), (1.0, 16.0)):
        optimizer = parameter(gradient)
        if gradient == 1.0:
            precision.step(optimizer)
        else:
            precision.overflow(optimizer)
        assert precision.scale == scale
    copy = FP16()
    copy.load_state_dict(precision.state_dict())
    assert vars(copy) | {"growth_interval": 2} == vars(precision)


def test_the_others_have_no_scale() -> None:
    for precision in (FP32(), BF16()):
        optimizer = parameter(float("inf"))
        assert not precision.overflow(optimizer)
        assert precision.state_dict() == {}
        precision.unscale(optimizer)
        assert gradients_of(optimizer)[0].tolist() == [float("inf")] * 2


@pytest.mark.parametrize("precision", [FP32(), BF16(), FP16()])
def test_autocast_has_products_in_the_precision_and_fp32_weights(precision: Precision) -> None:
    linear = torch.nn.Linear(4, 4)
    with CUDA().policy(precision.dtype).autocast("cpu"):
        assert linear(torch.ones(1, 4)).dtype == precision.dtype
    assert linear.weight.dtype == torch.float32
