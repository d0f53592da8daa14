"""Tests of the policy of a start: the policy that the run has recorded, or the fastest one of the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from speechtrain.batch import Batch
from speechtrain.compute_policy import PLAIN, ComputePolicy
from speechtrain.data.base import DataModule
from speechtrain.devices.cpu import CPU
from speechtrain.distributed.group import SingleProcess
from speechtrain.errors import ConfigError
from speechtrain.files import write_json
from speechtrain.precision import BF16, FP32, Auto, Precision
from speechtrain.rank.build import build_task
from speechtrain.run_directory import About, DeviceRecord
from speechtrain.start.build import build_data
from speechtrain.start.compose import compose
from speechtrain.start.run_config import run_config
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
        self.chip_name, self.policies = name, list(policies)

    def chip(self) -> str:
        return self.chip_name

    def candidates(self, dtype: torch.dtype) -> list[ComputePolicy]:
        autocast = None if dtype == torch.float32 else dtype
        return [policy for policy in self.policies if policy.autocast_dtype == autocast]

    def precision_fallback_reason(self, dtype: torch.dtype) -> str:
        return "" if self.candidates(dtype) else "no instructions"


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Task, DataModule]:
    config = compose(
        ["recipe=demo", "encoder.hidden=16", "model.prediction.hidden=16", "model.prediction.embedding=8",
         "model.joint.hidden=16", "data.workers=0", f"run_dir={tmp_path_factory.mktemp('run')}"],
        None,
    )  # fmt: skip
    task, tokenizer = build_task(run_config(config))
    return task, build_data(run_config(config), tokenizer, task)


@pytest.fixture
def step_seconds(monkeypatch: pytest.MonkeyPatch) -> dict[ComputePolicy, float]:
    """Return a dict that a test fills with the seconds of a step by policy. They replace a measurement."""
    seconds: dict[ComputePolicy, float] = {}

    def timer(*parts: Any, batch: Batch) -> Callable[[ComputePolicy], float]:
        def seconds_of(policy: ComputePolicy) -> float:
            return seconds[policy]

        return seconds_of

    monkeypatch.setattr(autotune, "_timer", timer)
    return seconds


def choose(
    record: DeviceRecord | None, chip: CPU, parts: tuple[Task, DataModule], precision: Precision
) -> Any:
    return choose_policy(record, chip, precision, task=parts[0], data=parts[1])


def test_choose_policy_returns_the_fastest_policy_with_the_times(
    step_seconds: dict[ComputePolicy, float], parts: tuple[Task, DataModule]
) -> None:
    step_seconds |= {PLAIN: 1.0, NARROW: 0.8, LOOP: 0.5}
    record = choose(None, Chip(), parts, BF16())
    assert ComputePolicy.from_record(record.policy) == LOOP
    assert record.milliseconds == {"bf16": 800.0, "bf16 lstm=loop": 500.0, "fp32": 1000.0}
    assert (record.device, record.chip, record.precision) == ("cpu", "one", "bf16")


def test_choose_policy_warns_of_a_faster_precision(
    step_seconds: dict[ComputePolicy, float], parts: tuple[Task, DataModule], caplog: pytest.LogCaptureFixture
) -> None:
    step_seconds |= {PLAIN: 0.5, NARROW: 1.0, LOOP: 0.9}
    record = choose(None, Chip(), parts, BF16())
    assert record.computes == "bf16 lstm=loop"
    assert "precision=bf16: fp32 would be faster here (bf16 1000.0 ms" in caplog.text
    caplog.clear()
    step_seconds |= {PLAIN: 1.0, NARROW: 0.5}
    assert choose(None, Chip(), parts, FP32()).computes == "fp32"
    assert not caplog.text


@pytest.mark.parametrize(("seconds_of_bf16", "computes"), [(0.8, "bf16"), (0.95, "fp32"), (2.0, "fp32")])
def test_auto_chooses_the_precision_by_the_times(
    step_seconds: dict[ComputePolicy, float],
    parts: tuple[Task, DataModule],
    seconds_of_bf16: float,
    computes: str,
) -> None:
    step_seconds |= {PLAIN: 1.0, NARROW: seconds_of_bf16, LOOP: 3.0}
    record = choose(None, Chip(), parts, Auto())
    assert (record.precision, record.computes) == ("auto", computes)
    assert recorded_policy(record, Chip(), Auto()) == ComputePolicy.from_record(record.policy)
    assert choose(None, Chip(policies=[PLAIN]), parts, Auto()).computes == "fp32"
    other_chip = Chip("without bf16", [PLAIN, ComputePolicy(fp32_matmul="medium")])
    assert (recorded_policy(record, other_chip, Auto()) is None) == (computes == "bf16")


def test_a_sweep_times_once(
    tmp_path: Path, step_seconds: dict[ComputePolicy, float], parts: tuple[Task, DataModule]
) -> None:
    def computes(name: str, argv: list[str], precision: Precision, milliseconds: tuple[int, int]) -> str:
        step_seconds.update(zip((NARROW, LOOP), milliseconds, strict=True))
        run_dir = tmp_path / name
        run_dir.mkdir()
        write_json(run_dir / "run.json", asdict(About([], argv)))
        policy, _ = resolve_policy(
            Chip(), precision, SingleProcess(), run_dir=run_dir, task=parts[0], data=parts[1]
        )
        return policy.describe()

    step_seconds[PLAIN] = 2.0
    sweep = ["-m", "seed=1,2", "precision=bf16,auto"]
    assert computes("b", sweep, BF16(), (9, 5)) == "bf16 lstm=loop"
    assert computes("a", sweep, BF16(), (5, 9)) == "bf16 lstm=loop"
    assert computes("c", sweep, Auto(), (9, 9)) == "fp32"
    assert computes("d", sweep, Auto(), (1, 1)) == "fp32"
    assert computes("e", ["another"], BF16(), (5, 9)) == "bf16"


def test_choose_policy_returns_a_recorded_policy_without_timing(
    step_seconds: dict[ComputePolicy, float], parts: tuple[Task, DataModule], caplog: pytest.LogCaptureFixture
) -> None:
    step_seconds |= {PLAIN: 1.0, NARROW: 0.5, LOOP: 2.0}
    record = choose(None, Chip(), parts, BF16())
    step_seconds.clear()  # Timing would raise KeyError.
    assert choose(record, Chip(), parts, BF16()) == record
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert choose(record, Chip("other"), parts, BF16()) == record
    assert "chosen on one and is kept on other" in caplog.text


def test_recorded_policy_is_none_for_a_record_of_other_settings(parts: tuple[Task, DataModule]) -> None:
    record = choose(None, Chip(policies=[LOOP]), parts, BF16())
    assert recorded_policy(record, Chip(), BF16()) == LOOP
    assert recorded_policy(record, Chip(), FP32()) is None
    assert recorded_policy(record, Chip(policies=[NARROW, replace(NARROW, lstm="layers")]), BF16()) is None
    assert recorded_policy(record, Chip("other", [PLAIN]), BF16()) is None  # device.autotune=false
    assert recorded_policy(replace(record, policy={"lstm": "?"}), Chip(), BF16()) is None
    assert recorded_policy(None, Chip(), BF16()) is None


def test_timer_changes_no_weights_and_no_order_of_training(parts: tuple[Task, DataModule]) -> None:
    task, data = parts
    before = {name: value.clone() for name, value in task.state_dict().items()}
    state = data.state_dict()
    sample = data.sample()
    assert isinstance(sample, Batch)
    seconds = autotune._timer(task, CPU(), FP32(), batch=sample)(ComputePolicy(lstm="loop"))
    assert seconds > 0
    assert all(torch.equal(value, before[name]) for name, value in task.state_dict().items())
    assert all(parameter.grad is None for parameter in task.parameters())
    later_state = data.state_dict()
    torch.testing.assert_close(later_state.pop("sets"), state.pop("sets"), rtol=0, atol=0)
    assert later_state == state


class Compiled(CPU):
    """A device that calls torch.compile. The backend ``eager`` captures graphs, and needs no C++ compiler."""

    compile = True

    def policy(self, dtype: torch.dtype) -> ComputePolicy:
        policy = super().policy(dtype)
        assert policy.compiler == "inductor"
        return replace(policy, compiler="eager")


def test_resolve_policy_compiles_at_each_start(tmp_path: Path) -> None:
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
        assert policy == PLAIN, "the recorded policy depends on whether the device compiles"
        assert record["computes"] == "fp32"
    torch._dynamo.reset()


def test_validate_shapes_requires_fixed_shapes_to_compile() -> None:
    CPU().validate_shapes([])
    Compiled().validate_shapes([(2, 16000, 3)])
    with pytest.raises(ConfigError, match=r"data\.shapes=0: device=cpu compiles a graph for every shape"):
        Compiled().validate_shapes([])
