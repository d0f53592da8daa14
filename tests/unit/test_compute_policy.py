"""A run's compute policy: how it is chosen by timing, recorded, and read again."""

from __future__ import annotations

import copy
import json
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch

from speechtrain import compute_policy
from speechtrain.compute_policy import (
    PLAIN,
    STATIC,
    ComputePolicy,
    apply_policy,
    equal_parts,
    fastest_policy,
)
from speechtrain.nn.prediction import LSTMPrediction

LOOP = ComputePolicy(lstm="loop")
NARROW = ComputePolicy(autocast_dtype=torch.bfloat16, product_dtype=torch.bfloat16)


def chosen(*seconds: float) -> ComputePolicy:
    """The policy that is used where plain, loop and bf16 take so long."""
    planted = dict(zip((PLAIN, LOOP, NARROW), seconds, strict=True))
    policy, medians = fastest_policy((PLAIN, LOOP, NARROW), planted.__getitem__)
    assert medians == list(seconds)
    return policy


def test_a_policy_of_twice_the_speed_is_used_and_one_of_half_is_not() -> None:
    assert chosen(1.0, 2.0, 0.5) == NARROW
    assert chosen(1.0, 0.5, 2.0) == LOOP
    assert chosen(1.0, 2.0, 2.0) == PLAIN


def test_another_policy_must_save_ten_percent() -> None:
    assert chosen(1.0, 1.0, 0.91) == PLAIN
    assert chosen(1.0, 1.0, 0.9) == NARROW


def test_timings_are_interleaved_and_the_first_of_each_is_not_counted() -> None:
    order: list[ComputePolicy] = []

    def seconds_of(policy: ComputePolicy) -> float:
        order.append(policy)
        return 100.0 if order.count(policy) == 1 else 1.0 if policy == PLAIN else 0.5

    policy, medians = fastest_policy((PLAIN, LOOP), seconds_of)
    assert (policy, medians) == (LOOP, [1.0, 0.5])
    assert order == [PLAIN, LOOP] * (len(order) // 2)


def test_a_copy_of_a_module_shares_its_policy() -> None:
    """A search on the host copies modules. The functions of an opened device cannot be copied."""
    policy = replace(STATIC, mark_step=SimpleNamespace(chip=torch).__repr__)
    module = LSTMPrediction()
    module.connect(3)
    apply_policy(module, policy)
    assert copy.deepcopy(policy) is policy
    assert policy.module_for_search(module) is not module
    assert PLAIN.module_for_search(module) is module


def test_with_static_shapes_the_host_reads_no_length() -> None:
    lengths = torch.tensor([2, 5])
    assert PLAIN.lengths_on_host(lengths, 8) == [2, 5]
    assert STATIC.lengths_on_host(lengths, 8) == [8, 8]


def test_one_slow_timing_decides_nothing() -> None:
    noise = iter([1.0, 1.0, 1.0, 0.2, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    assert fastest_policy((PLAIN, LOOP), lambda policy: next(noise))[0] == PLAIN


def test_long_steps_are_timed_less_often() -> None:
    counts = []
    for seconds in (0.001, 60.0):
        calls: list[ComputePolicy] = []
        fastest_policy((PLAIN, LOOP), lambda policy, s=seconds, c=calls: c.append(policy) or s)  # type: ignore[misc,func-returns-value]
        counts.append(len(calls))
    rounds = compute_policy._MAX_ROUNDS + 1, compute_policy._MIN_ROUNDS + 1
    assert counts == [2 * rounds[0], 2 * rounds[1]]


@pytest.mark.parametrize("policy", [PLAIN, LOOP, NARROW, STATIC, replace(STATIC, lstm_segment=8)])
def test_a_record_is_the_policy(policy: ComputePolicy) -> None:
    record = json.loads(json.dumps(policy.record()))
    assert ComputePolicy.from_record(record) == policy


@pytest.mark.parametrize("name", [f.name for f in fields(ComputePolicy) if f.compare])
@pytest.mark.parametrize("value", ["x", -1, 1.5, [1], {"a": 1}])
def test_a_damaged_record_is_none(name: str, value: object) -> None:
    assert ComputePolicy.from_record({**PLAIN.record(), name: value}) is None
    assert ComputePolicy.from_record({k: v for k, v in PLAIN.record().items() if k != name}) is None


def test_a_description_names_the_precision_and_the_other_kernels() -> None:
    assert PLAIN.describe() == "fp32"
    assert replace(LOOP, fp32_matmul="medium").describe() == "fp32 fp32_matmul=medium lstm=loop"
    assert NARROW.describe() == "bf16"


@pytest.mark.parametrize("steps", [1, 79, 80, 81, 100, 160, 161, 1999])
def test_equal_parts_cover_the_steps_with_less_than_a_step_of_padding_each(steps: int) -> None:
    count, size = equal_parts(steps)
    assert size <= 80
    assert steps <= count * size < steps + count
