"""Which policy a start uses: the one that the run has recorded, else the fastest of the device's."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from speechtrain.batch import Batch
from speechtrain.compute_policy import PLAIN, ComputePolicy
from speechtrain.config.build import build_data
from speechtrain.data.base import DataModule
from speechtrain.devices.cpu import CPU
from speechtrain.distributed.group import SingleProcess
from speechtrain.errors import ConfigError
from speechtrain.precision import BF16, FP32, Precision
from speechtrain.rank.build import build_task
from speechtrain.run_directory import DeviceRecord
from speechtrain.runs.compose import compose
from speechtrain.task import Task
from speechtrain.training import autotune
from speechtrain.training.autotune import choose_policy, recorded_policy, resolve_policy
from tests.support.small_trainer import Counted, Line

NARROW = ComputePolicy(autocast_dtype=torch.bfloat16)
LOOP = ComputePolicy(autocast_dtype=torch.bfloat16, lstm="loop")


class Chip(CPU):
    """A chip with bf16 whose policies are fixed."""

    def __init__(self, name: str = "one", policies: Sequence[ComputePolicy] = (PLAIN, NARROW, LOOP)) -> None:
        super().__init__()
        self.given, self.policies = name, list(policies)

    def chip(self) -> str:
        return self.given

    def candidates(self, dtype: torch.dtype) -> list[ComputePolicy]:
        return self.policies


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Task, DataModule]:
    config = compose(
        ["recipe=demo", "encoder.hidden=16", "model.prediction.hidden=16", "model.prediction.embedding=8",
         "model.joint.hidden=16", "data.workers=0", f"run_dir={tmp_path_factory.mktemp('run')}"],
        None,
    )  # fmt: skip
    task, tokenizer = build_task(config)
    return task, build_data(config, tokenizer, task)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> dict[ComputePolicy, float]:
    """Seconds of a step by policy, in place of a timing."""
    seconds: dict[ComputePolicy, float] = {}
    monkeypatch.setattr(autotune, "_timer", lambda *parts, batch: seconds.__getitem__)
    return seconds


def choose(
    record: DeviceRecord | None, chip: CPU, parts: tuple[Task, DataModule], precision: Precision
) -> Any:
    return choose_policy(record, chip, precision, task=parts[0], data=parts[1])


def test_the_fastest_is_chosen_and_kept_with_its_times(
    planted: dict[ComputePolicy, float], parts: tuple[Task, DataModule]
) -> None:
    planted |= {PLAIN: 1.0, NARROW: 0.8, LOOP: 0.5}
    record = choose(None, Chip(), parts, BF16())
    assert ComputePolicy.from_record(record.policy) == LOOP
    assert list(record.milliseconds.values()) == [1000.0, 800.0, 500.0]
    assert (record.device, record.chip, record.precision) == ("cpu", "one", "bf16")


def test_bf16_that_is_not_faster_is_fp32_with_a_warning(
    planted: dict[ComputePolicy, float], parts: tuple[Task, DataModule], caplog: pytest.LogCaptureFixture
) -> None:
    planted |= {PLAIN: 1.0, NARROW: 0.95, LOOP: 2.0}
    record = choose(None, Chip(), parts, BF16())
    assert ComputePolicy.from_record(record.policy) == PLAIN
    assert "precision=bf16: training is in fp32" in caplog.text


def test_the_recorded_choice_wins_and_is_not_timed_again(
    planted: dict[ComputePolicy, float], parts: tuple[Task, DataModule], caplog: pytest.LogCaptureFixture
) -> None:
    planted |= {PLAIN: 1.0, NARROW: 0.5, LOOP: 2.0}
    record = choose(None, Chip(), parts, BF16())
    planted.clear()  # a timing would raise KeyError
    assert choose(record, Chip(), parts, BF16()) == record
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert choose(record, Chip("other"), parts, BF16()) == record
    assert "chosen on one and is kept on other" in caplog.text


def test_a_record_of_other_settings_is_not_used(parts: tuple[Task, DataModule]) -> None:
    record = choose(None, Chip(policies=[LOOP]), parts, BF16())
    assert recorded_policy(record, Chip(), BF16()) == LOOP
    assert recorded_policy(record, Chip(), FP32()) is None
    assert recorded_policy(record, Chip(policies=[PLAIN, NARROW]), BF16()) is None
    assert recorded_policy(record, Chip("other", [PLAIN]), BF16()) is None  # device.autotune=false
    assert recorded_policy(replace(record, policy={"lstm": "?"}), Chip(), BF16()) is None
    assert recorded_policy(None, Chip(), BF16()) is None


def test_one_policy_is_not_timed(planted: dict[ComputePolicy, float], parts: tuple[Task, DataModule]) -> None:
    record = choose(None, Chip(policies=[LOOP]), parts, BF16())
    assert ComputePolicy.from_record(record.policy) == LOOP
    assert record.milliseconds is None


def test_a_timing_changes_neither_weights_nor_the_order_of_training(parts: tuple[Task, DataModule]) -> None:
    task, data = parts
    before = {name: value.clone() for name, value in task.state_dict().items()}
    state = data.state_dict()
    sample = data.sample()
    assert isinstance(sample, Batch)
    seconds = autotune._timer(task, CPU(), FP32(), batch=sample)(ComputePolicy(lstm="loop"))
    assert seconds > 0
    assert all(torch.equal(value, before[name]) for name, value in task.state_dict().items())
    assert all(parameter.grad is None for parameter in task.parameters())
    assert data.state_dict() == state


def test_a_batch_for_timings_is_of_median_size(parts: tuple[Task, DataModule]) -> None:
    _, data = parts
    sample = data.sample()
    assert sample is not None
    sizes = sorted(next(batches).audio.numel() for batches in [data.train()] for _ in range(9))
    assert sizes[0] <= sample.audio.numel() <= sizes[-1]


class Compiled(CPU):
    """A device of another package that compiles, by a backend that needs no compiler."""

    compile = True

    def policy(self, dtype: torch.dtype) -> ComputePolicy:
        policy = super().policy(dtype)
        assert policy.compiler == "inductor"
        return replace(policy, compiler="eager")


def test_any_device_can_compile_at_a_start_and_when_the_run_continues(tmp_path: Path) -> None:
    device, data = Compiled(), Counted()
    expected = Line().eval()(data.at(0)).total
    for number in range(2):
        torch._dynamo.reset()
        counters.clear()
        task = Line().eval()
        policy, record = resolve_policy(
            device, FP32(), SingleProcess(), run_dir=tmp_path, task=task, data=data
        )
        assert device.graphs() == 0
        torch.testing.assert_close(task(data.at(0)).total, expected)
        assert device.graphs() > 0, f"start {number} did not compile"
        assert policy == PLAIN, "the record of a run that compiles is the record of one that does not"
        assert record["policy"] == "plain"
    torch._dynamo.reset()


def test_a_device_that_compiles_needs_fixed_shapes() -> None:
    CPU().validate_shapes([])
    Compiled().validate_shapes([(2, 16000, 3)])
    with pytest.raises(ConfigError, match=r"data\.shapes=0: device=cpu compiles a graph for every shape"):
        Compiled().validate_shapes([])
