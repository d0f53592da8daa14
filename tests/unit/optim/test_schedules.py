"""Schedules: the reference systems' golden values, continuity, and the plan that a resume keeps."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speechtrain.optim.schedules import (
    Constant,
    Cosine,
    IntelQuadratic,
    Polynomial,
    TriStage,
    WarmupHoldExponential,
)


def test_mlperf_warm_up_of_ten_epochs() -> None:
    schedule = WarmupHoldExponential(0.007, warmup_epochs=10, steps_per_epoch=3)
    printed = [f"{schedule.rate(step):.2e}" for step in (1, 2, 3)]
    assert printed == ["4.52e-04", "6.77e-04", "9.03e-04"]


def test_mlperf_holds_then_decays_by_the_epoch() -> None:
    schedule = WarmupHoldExponential(1.0, 2, 3, gamma=0.5, min_lr=0.1, steps_per_epoch=4)
    assert schedule.rate(7) == pytest.approx(8 / 9)
    assert [schedule.rate(step) for step in range(8, 21)] == [1.0] * 13  # to the end of epoch 5
    assert [schedule.rate(step) for step in range(21, 25)] == [0.5] * 4
    assert [schedule.rate(step) for step in range(25, 29)] == [0.25] * 4
    assert schedule.rate(29) == 0.125
    assert schedule.rate(33) == schedule.rate(10_000) == 0.1
    assert WarmupHoldExponential(1e-7, steps_per_epoch=4).rate(1) == 1e-5


@given(st.integers(0, 5), st.integers(0, 5), st.floats(0.1, 1.0), st.integers(1, 7), st.integers(1, 200))
def test_mlperf_follows_its_formula(warmup: int, hold: int, gamma: float, per_epoch: int, step: int) -> None:
    """The reference's loop, which counts steps and epochs from 1."""
    counted = 0
    epoch = 0
    rate = 0.0
    while counted < step:
        epoch += 1
        for _ in range(per_epoch):
            counted += 1
            if counted < warmup * per_epoch:
                rate = 0.004 * (counted + 1) / (warmup * per_epoch + 1)
            elif counted < (warmup + hold) * per_epoch:
                rate = 0.004
            else:
                rate = 0.004 * gamma ** (epoch - warmup - hold)
            rate = max(rate, 1e-5)
            if counted == step:
                break
    schedule = WarmupHoldExponential(0.004, warmup, hold, gamma, steps_per_epoch=per_epoch)
    assert schedule.rate(step) == pytest.approx(rate, rel=1e-12)


def test_wav2vec2_base() -> None:
    schedule = Polynomial(5e-4, warmup_steps=32_000, steps=400_000)
    # n updates done is the rate of update n + 1
    assert schedule.rate(16_001) == pytest.approx(2.5e-4, rel=1e-12)
    assert schedule.rate(216_001) == pytest.approx(2.5e-4, rel=1e-12)
    assert schedule.rate(32_001) == 5e-4
    assert schedule.rate(1) == 0  # as traced in fairseq's trainer, which has done no update then
    assert schedule.rate(2) == pytest.approx(5e-4 / 32_000)
    assert schedule.rate(400_000) > 0
    assert schedule.rate(400_001) == schedule.rate(10**7) == 0


def test_polynomial_power_and_end() -> None:
    schedule = Polynomial(1.0, steps=10, power=2.0, end=0.2)
    assert schedule.rate(1) == 1.0
    assert schedule.rate(6) == pytest.approx(0.2 + 0.8 * 0.25)
    assert schedule.rate(11) == 0.2
    flat = Polynomial(1.0, steps=10, power=0.0, end=0.2)  # 0⁰ must not keep the peak for ever
    assert (flat.rate(10), flat.rate(11)) == (1.0, 0.2)


def test_cosine() -> None:
    schedule = Cosine(0.02, warmup_steps=4, steps=14, end=0.01)
    assert [schedule.rate(step) for step in (1, 2, 3, 4, 5)] == [0.005, 0.01, 0.015, 0.02, 0.02]
    for done in range(4, 14):
        expected = 0.01 + 0.5 * (0.02 - 0.01) * (1 + math.cos(math.pi * (done - 4) / (14 - 4)))
        assert schedule.rate(done + 1) == pytest.approx(expected, rel=1e-12)
    assert schedule.rate(15) == schedule.rate(24) == 0.01  # where a cosine would be at its peak again


def test_intel() -> None:
    schedule = IntelQuadratic(1e-3, warmup_steps=100, steps=1000)
    assert schedule.rate(1) == 0
    assert schedule.rate(51) == pytest.approx(0.5 * 1e-3 * 0.95**2)
    assert schedule.rate(501) == pytest.approx(1e-3 * 0.25)
    assert schedule.rate(951) == 1e-5  # 2.5e-6 by the decay alone
    assert schedule.rate(2000) == 1e-5


def test_tri_stage() -> None:
    schedule = TriStage(0.1, planned_steps=1000)
    assert schedule.warmup == 100
    assert schedule.rate(1) == pytest.approx(0.001)
    assert schedule.rate(51) == pytest.approx(0.1 * 0.505)
    assert {schedule.rate(step) for step in (101, 300, 501)} == {0.1}
    assert schedule.rate(751) == pytest.approx(0.1 * 0.05**0.5)
    assert schedule.rate(1001) == schedule.rate(5000) == pytest.approx(0.005)
    schedule.plan(2000)  # a plan that is corrected by the clock
    assert schedule.state_dict() == {"steps": 2000, "corrected_at": 0, "position": 0.0}
    assert schedule.rate(1001) == 0.1
    assert TriStage(0.1, steps=10).rate(11) == pytest.approx(0.005)


@pytest.mark.parametrize("cls", [Polynomial, Cosine, TriStage])
@pytest.mark.parametrize("step", [30, 70, 400, 900])
@pytest.mark.parametrize("total", [920, 5000])
def test_a_corrected_plan_continues_from_the_same_rate(cls: Any, step: int, total: int) -> None:
    schedule = cls(0.1, planned_steps=1000)
    schedule.warmup_steps = None
    before = schedule.rate(step)
    schedule.plan(total, step)
    assert schedule.rate(step + 1) == pytest.approx(before, rel=0.1, abs=1e-3)
    resumed = cls(0.1, planned_steps=7)
    resumed.warmup_steps = None
    resumed.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
    rates = [schedule.rate(number) for number in range(step + 1, total + 2)]
    assert [resumed.rate(number) for number in range(step + 1, total + 2)] == rates
    assert rates[-1] == pytest.approx(cls(0.1, planned_steps=9).rate(10))


@pytest.mark.parametrize("step", [3, 30, 100, 400])
@pytest.mark.parametrize("total", [500, 2000, 10**5])
def test_intels_warm_up_by_the_plan_does_not_jump(step: int, total: int) -> None:
    schedule = IntelQuadratic(0.1, warmup_steps=None, planned_steps=1000)
    before = schedule.rate(step + 1)
    schedule.plan(total, step)
    assert schedule.rate(step + 1) == pytest.approx(before)


def test_a_longer_plan_after_the_end_begins_a_new_decay() -> None:
    schedule = Cosine(0.1, planned_steps=1000)
    schedule.plan(500, 400)
    schedule.plan(500, 500)
    assert schedule.rate(501) == 0
    schedule.plan(1000, 500)
    assert schedule.rate(501) == pytest.approx(0.05)


def test_typed_steps_are_not_those_of_a_plan() -> None:
    for schedule in (Cosine(0.1, steps=50), TriStage(0.1, steps=50), Constant(0.1)):
        before = schedule.rate(40)
        schedule.plan(500)
        assert schedule.rate(40) == before


def test_constant() -> None:
    assert [Constant(0.1, 4).rate(step) for step in (1, 2, 4, 5, 10**6)] == [0.025, 0.05, 0.1, 0.1, 0.1]
    assert Constant(0.1).rate(1) == 0.1


planned = st.sampled_from([Polynomial, Cosine])


@given(planned, st.integers(0, 40), st.integers(1, 60), st.floats(0, 0.1))
def test_decays_rise_once_and_fall_once(cls: Any, warmup: int, steps: int, end: float) -> None:
    schedule = cls(0.1, warmup_steps=warmup, steps=steps, end=end)
    rates = [schedule.rate(step) for step in range(1, steps + 80)]
    top = rates.index(max(rates))
    assert all(0 <= rate <= 0.1 + 1e-15 for rate in rates)
    assert all(a <= b + 1e-15 for a, b in pairwise(rates[: top + 1]))
    assert all(a >= b - 1e-15 for a, b in pairwise(rates[top:]))
    assert rates[max(warmup, steps) + 1 :] == [end] * (len(rates) - max(warmup, steps) - 1)


@pytest.mark.parametrize("cls", [Polynomial, Cosine, IntelQuadratic])
def test_the_worker_offers_the_plan(cls: Any) -> None:
    offered, own = cls(0.1, warmup_steps=5, planned_steps=50), cls(0.1, warmup_steps=5, steps=50)
    assert [offered.rate(s) for s in range(1, 70)] == [own.rate(s) for s in range(1, 70)]
    assert cls(0.1, warmup_steps=5, steps=50, planned_steps=9).rate(40) == own.rate(40)  # the user's wins


@pytest.mark.parametrize("cls", [Polynomial, Cosine, IntelQuadratic])
def test_a_resume_keeps_the_first_plan(cls: Any) -> None:
    """The limits of a run may change; its learning rates may not jump."""
    first, resumed = cls(0.1, warmup_steps=5, planned_steps=50), cls(0.1, warmup_steps=5, planned_steps=500)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [resumed.rate(s) for s in range(1, 70)] == [first.rate(s) for s in range(1, 70)]


@pytest.mark.parametrize("cls", [Polynomial, Cosine, IntelQuadratic])
def test_a_warm_up_of_null_is_8_percent_of_the_first_plan(cls: Any) -> None:
    for steps, warmup in ((375, 30), (400_000, 32_000), (1_000_000, 32_000), (5, 0)):
        derived, typed = (
            cls(0.1, warmup_steps=None, planned_steps=steps),
            cls(0.1, warmup_steps=warmup, planned_steps=steps),
        )
        assert derived.warmup == warmup
        assert [derived.rate(s) for s in range(1, 400)] == [typed.rate(s) for s in range(1, 400)]
    resumed = cls(0.1, warmup_steps=None, planned_steps=9000)
    resumed.load_state_dict(cls(0.1, warmup_steps=None, planned_steps=375).state_dict())
    assert resumed.warmup == 30


def test_a_resume_keeps_the_length_of_an_epoch() -> None:
    first = WarmupHoldExponential(0.1, 2, 2, 0.5, steps_per_epoch=5)
    resumed = WarmupHoldExponential(0.1, 2, 2, 0.5, steps_per_epoch=7)
    resumed.load_state_dict(first.state_dict())
    assert [resumed.rate(s) for s in range(1, 70)] == [first.rate(s) for s in range(1, 70)]
    assert resumed.warmup == 10
