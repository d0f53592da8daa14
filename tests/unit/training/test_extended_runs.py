"""A run that continues with a higher limit trains on: each schedule follows the new plan from its rate on."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from speechtrain.optim.schedules import Schedule
from speechtrain.start.run_config import part_of
from tests.support.composed import composed
from tests.support.small_trainer import MICRO_BATCHES
from tests.support.timed_run import Run

CONF = Path(__file__).parents[3] / "conf" / "schedule"
TYPED = {
    "polynomial": ["schedule.warmup_steps=4"],
    "intel": ["schedule.warmup_steps=4"],
    "mlperf": ["schedule.warmup_epochs=1", "schedule.hold_epochs=1"],
}
"""The settings of the schedules whose own warm-up is longer than the runs of this file."""
SCHEDULES = {path.stem: TYPED.get(path.stem, []) for path in sorted(CONF.glob("[!_]*.yaml"))}
FOLLOWERS = [name for name in SCHEDULES if name not in ("constant", "mlperf")]  # of the plan
PEAK = 1e-3
EPOCHS, STOP = 4, 20
STEPS = EPOCHS * MICRO_BATCHES
LIMITS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "max_steps": ({"max_hours": None, "max_steps": STEPS}, {"max_hours": None, "max_steps": 2 * STEPS}),
    "max_epochs": ({"max_hours": None, "max_epochs": EPOCHS}, {"max_hours": None, "max_epochs": 2 * EPOCHS}),
    "max_hours": ({"seconds": 120.0}, {"seconds": 240.0}),
    "max_hours, then max_steps": ({"seconds": 120.0}, {"max_hours": None, "max_steps": 2 * STEPS}),
}
"""The limits of the first start and of the second one."""
extensions = pytest.mark.parametrize(
    "limit", ["max_steps", *(pytest.param(name, marks=pytest.mark.slow) for name in list(LIMITS)[1:])]
)


def schedule_of(name: str, steps: int, *settings: str) -> Schedule:
    """Return the schedule as a rank builds it for a plan of ``steps`` updates."""
    config = composed(f"schedule={name}", f"optimizer.lr={PEAK}", *SCHEDULES[name], *settings)
    return part_of(config, "schedule").build(steps_per_epoch=MICRO_BATCHES, planned_steps=steps)


@pytest.fixture
def extended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Run, Run]]:
    """``extended("cosine", "max_steps", stop_at=20)``: both starts of a run whose second limit is higher."""

    def run_twice(name: str, limit: str, *settings: str, stop_at: int | None) -> tuple[Run, Run]:
        before, after = LIMITS[limit]
        plan = schedule_of(name, STEPS, *settings)
        first = Run(tmp_path, monkeypatch, schedule=plan, stop_at=stop_at, validate_every=1000, **before)
        assert first.status == ("preempted" if stop_at else "finished")
        # The seconds of the first start belong to the run, too.
        plan = schedule_of(name, 2 * STEPS, *settings)
        second = Run(tmp_path, monkeypatch, schedule=plan, validate_every=1000, **after)
        assert second.status == "finished"
        assert second.recorder.of("resume") == [{"step": first.steps}]
        assert list(second.rates) == list(range(first.steps + 1, second.steps + 1))
        return first, second

    return run_twice


def check_added_updates(first: Run, second: Run, name: str) -> None:
    """The added updates change the weights, and their rate ends where the whole plan ends."""
    assert second.steps > 1.5 * STEPS
    assert all(rate > 0 for rate in second.rates.values())
    assert not torch.equal(first.task.linear.weight, second.task.linear.weight)
    plan = schedule_of(name, second.steps)
    end = plan.rate(second.steps + 1)
    # A stretched decay has at most twice the slope of the whole plan.
    last_notch = plan.rate(second.steps - 1) - end
    assert second.rates[(first.steps + second.steps) // 2] > end + last_notch
    assert end <= second.rates[second.steps] <= end + last_notch


@extensions
@pytest.mark.parametrize("name", FOLLOWERS)
def test_an_interrupted_run_continues_from_its_rate(
    extended: Callable[..., tuple[Run, Run]], name: str, limit: str
) -> None:
    first, second = extended(name, limit, stop_at=STOP)
    plan = [schedule_of(name, STEPS).rate(step) for step in range(1, STEPS)]
    decay = plan[plan.index(max(plan)) :]
    steepest = max(before - after for before, after in pairwise(decay))
    assert abs(second.rates[STOP + 1] - first.rates[STOP]) <= 1.2 * steepest
    check_added_updates(first, second, name)


@extensions
@pytest.mark.parametrize("name", FOLLOWERS)
def test_a_finished_run_has_the_rates_of_the_longer_plan(
    extended: Callable[..., tuple[Run, Run]], name: str, limit: str
) -> None:
    first, second = extended(name, limit, stop_at=None)
    plan = schedule_of(name, second.steps)
    rates = [second.rates[step] for step in sorted(second.rates)]
    expected = [plan.rate(step) for step in range(first.steps + 1, second.steps + 1)]
    assert rates == pytest.approx(expected, abs=0.03 * PEAK)
    check_added_updates(first, second, name)


@pytest.mark.parametrize("stop_at", [None, STOP])
@pytest.mark.parametrize("name", ["constant", "mlperf", "cosine"])
def test_a_schedule_without_the_plan_of_the_run_keeps_its_rates(
    extended: Callable[..., tuple[Run, Run]], name: str, stop_at: int | None
) -> None:
    settings = ["schedule.steps=45", "schedule.warmup_steps=4"] if name == "cosine" else []
    first, second = extended(name, "max_steps", *settings, stop_at=stop_at)
    schedule = schedule_of(name, STEPS, *settings)
    for step, rate in {**first.rates, **second.rates}.items():
        assert rate == schedule.rate(step)
    assert not torch.equal(first.task.linear.weight, second.task.linear.weight)
