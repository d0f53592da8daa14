"""Plans by time: their arithmetic, and runs of the real trainer with a planted clock."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from speechtrain.batch import Batch
from speechtrain.distributed.group import SingleProcess
from speechtrain.errors import MachineError, RunError
from speechtrain.start.run_config import part_of
from speechtrain.task import Evaluation
from speechtrain.training.time_budget import Revision, TimePlan, read_plan, shared_plan, write_plan
from tests.support.composed import composed
from tests.support.timed_run import SECONDS, UPDATE_S, VALIDATION_S, Run, Timed


def first_tenth(factor: float) -> Callable[[float], float]:
    """Return the seconds of an update, which are ``factor`` times as many in the first tenth of the time."""

    def update_s(clock_s: float) -> float:
        if clock_s < SECONDS / 10:
            return factor * UPDATE_S
        return UPDATE_S

    return update_s


RECIPES = {
    "scratch": ["recipe=scratch", "data.train=x.jsonl"],
    "fsdd": ["recipe=fsdd", "trainer.max_epochs=null", "trainer.validate_every=80"],
    "wav2vec2": ["recipe=wav2vec2_fsdd", "trainer.max_steps=null", "trainer.validate_every=null"],
    "finetune": ["schedule=tri_stage", "schedule.last=0.009"],  # its own last rate is 5 % of the peak
    "Intel's": ["schedule=intel", "schedule.warmup_steps=30"],
}


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "factor"), [*((recipe, 5.0) for recipe in RECIPES), ("scratch", 0.2)])
def test_a_plan_survives_another_speed_of_the_first_tenth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, factor: float
) -> None:
    config = composed(*RECIPES[recipe])
    schedule = part_of(config, "schedule").build(steps_per_epoch=50, planned_steps=1)
    every = config.trainer.validate_every
    run = Run(tmp_path, monkeypatch, first_tenth(factor), schedule=schedule, validate_every=every)
    assert run.status == "finished"
    validation_s = VALIDATION_S * len(run.validations)
    assert 0.97 * SECONDS <= run.task.update_seconds + validation_s <= run.wall_s <= SECONDS
    if factor == 5.0:
        room = (SECONDS / 10 / factor + 0.9 * SECONDS - validation_s) / UPDATE_S
        assert run.steps >= 0.97 * room
    assert validation_s <= 0.1 * SECONDS
    check_rates(list(run.rates.values()), config.optimizer.lr)


def test_eta_s_is_the_rest_of_a_run_at_its_average(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch, max_steps=20, validate_every=5)
    for row in run.recorder.of("train"):
        step = row["step"]
        wall_s = step * UPDATE_S + (step - 1) // 5 * VALIDATION_S
        rest_s = (20 - step) * wall_s / step
        assert row["eta_s"] == pytest.approx(rest_s)
    assert run.steps == 20


def check_rates(rates: list[float], peak: float) -> None:
    """The rates of a run rise once, fall once and never jump."""
    assert max(rates) >= 0.7 * peak
    assert rates[-1] <= 0.01 * max(rates)
    for before, after in pairwise(rates[rates.index(max(rates)) :]):
        assert after <= 1.02 * before
    for before, after in pairwise(rates):
        assert abs(after - before) <= 0.15 * max(rates)


def test_validations_of_a_typed_interval_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch, lambda clock_s: 1.37, 43.0, seconds=432.0, validate_every=100)
    assert run.validations == [100, run.steps]
    assert 0.97 * 432 <= run.wall_s <= 432
    assert "a longer trainer.validate_every" in run.warnings[0]


def test_a_run_ends_at_a_validation_after_which_no_other_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slower(Timed):
        """A model that is only slow to evaluate once it has learnt something."""

        def evaluate(self, batch: Batch, decoder: Any) -> Evaluation:
            self.batch_s = 1.0 if self.clock_s < SECONDS / 20 else 45.0
            return super().evaluate(batch, decoder)

    monkeypatch.setattr("tests.support.timed_run.Timed", Slower)
    run = Run(tmp_path, monkeypatch, validate_every=100)
    assert run.validations == [run.steps] == [100]
    assert run.status == "finished"
    assert run.wall_s <= 1.05 * SECONDS


def test_a_plan_of_few_updates_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch, lambda clock_s: 50.0)
    assert run.steps == 32
    (warning,) = run.warnings
    assert warning.startswith("trainer.max_hours=0.5 has room for 3")
    assert "an update takes 50 s, a validation 12 s; set a longer trainer.max_hours" in warning


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", [10, 40, 90])
def test_a_killed_run_repeats_what_its_plan_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: int
) -> None:
    speed = first_tenth(5.0)
    first = Run(tmp_path, monkeypatch, speed, save_every=10, stop_at=120)
    recorded = json.loads((tmp_path / "plan.json").read_text())["revisions"]
    for number in range(checkpoint + 1, 121):
        shutil.rmtree(tmp_path / f"checkpoints/step-{number:08}", ignore_errors=True)
    second = Run(tmp_path, monkeypatch, speed, save_every=10, start_s=SECONDS / 10)
    assert second.recorder.of("resume") == [{"step": checkpoint}]
    continued = json.loads((tmp_path / "plan.json").read_text())["revisions"]
    assert continued[: len(recorded)] == recorded
    check_repeated(first, second, last_step=recorded[-1][0])


def check_repeated(first: Run, second: Run, last_step: int) -> None:
    """The second start repeats the updates of the first one as far as the plan was recorded."""
    start = min(second.losses)
    for step in range(start, last_step + 1):
        assert (second.losses[step], second.rates[step]) == (first.losses[step], first.rates[step])
    repeated = [step for step in second.validations if step < last_step]
    assert repeated == [step for step in first.validations if start <= step < last_step]


def test_a_finished_run_with_more_time_learns_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Run(tmp_path, monkeypatch, seconds=600.0)
    second = Run(tmp_path, monkeypatch, seconds=600.0)
    assert (second.status, second.rates) == ("finished", {})
    longer = Run(tmp_path, monkeypatch, seconds=1200.0)
    assert longer.steps == pytest.approx(2 * first.steps, rel=0.05)
    assert 1140 <= longer.wall_s <= 1200
    assert max(longer.rates.values()) == pytest.approx(0.5e-3, rel=0.15)
    assert Run(tmp_path, monkeypatch, seconds=900.0).rates == {}, "the time is over"


@pytest.mark.slow
def test_more_time_after_a_stop_does_not_change_the_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Run(tmp_path, monkeypatch, stop_at=300)
    longer = Run(tmp_path, monkeypatch, seconds=2 * SECONDS)
    assert longer.rates[301] == pytest.approx(first.rates[300], rel=0.01)
    assert longer.steps == pytest.approx(2 * SECONDS / UPDATE_S, rel=0.15)


def test_a_share_of_the_updates_is_never_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``model.freeze_encoder_steps`` below 1 is a share of ``planned_updates``."""
    run = Run(tmp_path, monkeypatch, first_tenth(5.0))
    is_frozen = [step < 0.2 * length for step, length in enumerate(run.task.lengths)]
    assert is_frozen == sorted(is_frozen, reverse=True)
    assert 0.05 * run.steps <= is_frozen.count(True) <= 0.25 * run.steps


@pytest.mark.parametrize("per_update", [0.01, 0.4, 7.0])
@pytest.mark.parametrize("per_validation", [0.0, 2.0, 40.0, 800.0])
@pytest.mark.parametrize("every", [None, 50])
def test_updates_and_whole_validations_fill_the_time(
    per_update: float, per_validation: float, every: int | None
) -> None:
    plan = TimePlan(0.5, seconds_per_update=per_update, seconds_per_validation=per_validation)
    plan.revise(1, 0, 20.0, every)
    step, validations, wall_s = 1, 0, 20.0
    validated = 0
    while step < plan.updates:
        step += 1
        wall_s += per_update
        revision = plan.revisions[-1]
        if step == revision.validate_at or step == revision.updates:
            wall_s += per_validation
            validations, validated = validations + 1, step
            if step < revision.updates:
                plan.revise(step, validated, wall_s, every)
    assert 1800 - max(2 * per_update, 1.0) <= wall_s <= 1800 + 1e-6
    assert validated == step
    if every is None:
        assert validations <= 20
        assert validations == 1 or validations * per_validation <= 0.1 * 1800


def test_a_plan_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text = Path.write_text

    def write_to_full_disk(path: Path, *content: Any, **options: Any) -> int:
        if path.name.startswith(".plan.json"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_text(path, *content, **options)

    with monkeypatch.context() as full_disk:
        full_disk.setattr(Path, "write_text", write_to_full_disk)
        first = Run(tmp_path, monkeypatch, stop_at=100)
        with pytest.raises(MachineError, match=r"No space left on device: '.*plan\.json'"):
            Run(tmp_path / "strict", monkeypatch, on_save_error="stop")
    assert first.warnings
    for warning in first.warnings:
        assert f"No space left on device: '{tmp_path}/plan.json'; training goes on" in warning
    # The disk has space again, so the next revision is written with all earlier ones.
    second = Run(tmp_path, monkeypatch)
    assert second.status == "finished"
    plan = read_plan(tmp_path)
    assert plan is not None
    assert plan.updates == second.steps


def test_a_continued_run_without_room_for_an_update_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first start was killed after it had timed updates, and before it saved a checkpoint."""
    Run(tmp_path, monkeypatch, stop_at=20)
    shutil.rmtree(tmp_path / "checkpoints")
    shorter = Run(tmp_path, monkeypatch, seconds=1.0)
    assert shorter.status in ("finished", "time")
    assert shorter.steps <= 1
    longer = Run(tmp_path, monkeypatch, seconds=300.0)
    assert longer.status == "finished"
    assert longer.wall_s >= 0.9 * 300


@pytest.mark.parametrize(("seconds", "validation_s"), [(18.0, 23.0), (40.0, 24.0)])
def test_a_validation_longer_than_half_of_the_time_leaves_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, validation_s: float
) -> None:
    run = Run(tmp_path, monkeypatch, lambda clock_s: 0.1, validation_s, seconds=seconds)
    assert run.status == "finished"
    assert run.validations == [run.steps]
    # Measurements of the validation take the rest of this half.
    assert 0.35 * seconds <= run.task.update_seconds <= 0.55 * seconds
    warning = run.warnings[-1]
    assert f"validation takes {validation_s / seconds:.0%} of the time" in warning
    late = re.search(r"so the run ends (\S+) s late", warning)
    assert late is not None
    assert float(late[1]) == pytest.approx(run.wall_s - seconds, abs=0.05 * seconds)


def test_a_plan_is_kept_and_shared(tmp_path: Path) -> None:
    plan = TimePlan(0.5, 1100, 100, 1.7, 5.0, [Revision(250, 400.0, 1100, 200, validate_at=300, share=0.2)])
    assert read_plan(tmp_path) is None
    write_plan(plan, tmp_path)
    assert read_plan(tmp_path) == plan
    assert shared_plan(plan, SingleProcess()) == plan
    assert shared_plan(None, SingleProcess()) is None


VALUES = {"updates": 9, "validate_every": 3, "seconds_per_update": 1.0, "seconds_per_validation": 1.0}
DAMAGED = [
    "{}", "[", "[]", '{"hours": "x"}', json.dumps({"hours": 1, **VALUES}),
    json.dumps({"hours": "x", **VALUES, "revisions": []}),
    json.dumps({"hours": 1, **VALUES, "updates": 0, "revisions": []}),
    json.dumps({"hours": 1, **VALUES, "revisions": [[1, 2.0, 3]]}),
    json.dumps({"hours": 1, **VALUES, "revisions": [[1, 2.0, 3, 4, 5, None]]}),
]  # fmt: skip


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_plan_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(RunError, match=r"plan\.json is damaged"):
        read_plan(tmp_path)
