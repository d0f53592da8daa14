"""Plans by time: their arithmetic with planted timings, and a run that is as if nothing had been timed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from speechtrain.batch import Batch
from speechtrain.distributed.group import SingleProcess
from speechtrain.errors import RunError
from speechtrain.training import time_plan
from speechtrain.training.time_plan import Stopwatch, TimePlan, read, shared, write
from speechtrain.training.time_plan import time_plan as made

from .test_trainer import Counted, Rig


def seconds_of(plan: TimePlan, updates: int, validations: int) -> float:
    return updates * plan.seconds_per_update + validations * plan.seconds_per_validation


@pytest.mark.parametrize("per_update", [0.01, 0.4, 7.0])
@pytest.mark.parametrize("per_validation", [0.0, 2.0, 40.0])
@pytest.mark.parametrize("per_epoch", [0.5, 30.0, 1e6])
@pytest.mark.parametrize("every", [None, 50])
def test_updates_and_validations_fill_the_time(
    per_update: float, per_validation: float, per_epoch: float, every: int | None
) -> None:
    plan = made(0.5, 20.0, per_update, per_validation, per_epoch, every)
    validations = -(-plan.updates // plan.validate_every)
    spent = 20 + seconds_of(plan, plan.updates, validations)
    assert abs(spent - 1800) <= 2 * per_update + per_validation
    if every is None:
        assert validations <= 20
        assert (validations - 1) * per_validation <= 0.1 * 1800
        assert validations == 1 or plan.validate_every >= per_epoch


def test_a_validation_follows_each_epoch_where_there_are_few() -> None:
    assert made(0.5, 0.0, 1.0, 1.0, 180.0, None).validate_every == pytest.approx(180, abs=20)


def test_too_little_time_is_one_update() -> None:
    assert made(0.001, 60.0, 1.0, 1.0, 10.0, None).updates == 1


def followed(plan: TimePlan, per_update: float, validation_s: float) -> float:
    """The wall time of a run of ``plan`` on a machine of another speed than planned."""
    wall, step = 0.0, 0
    while step < plan.updates_at(step):
        step += 1
        wall += per_update
        if plan.is_due(step):
            plan.revise(step, wall, validation_s)
        if step % plan.validate_every == 0 or step == plan.updates_at(step):
            wall += validation_s
    return wall


@pytest.mark.parametrize("factor", [0.6, 0.85, 1.0, 1.3, 2.0])
def test_a_plan_is_corrected_by_the_clock(factor: float) -> None:
    plan = made(0.5, 0.0, 0.4, 2.0, 300.0, None)
    assert followed(plan, 0.4 * factor, 4.0) == pytest.approx(1800, rel=0.02)
    assert len(plan.revisions) >= 3


def test_what_was_corrected_after_the_checkpoint_is_kept() -> None:
    plan = made(0.5, 0.0, 0.4, 2.0, 300.0, None)
    followed(plan, 0.3, 2.0)
    (first, *_), before = plan.revisions, json.dumps(plan.revisions)
    assert plan.updates_at(int(first[0]) - 1) == plan.updates
    assert plan.updates_at(int(first[0])) == first[2]
    followed(plan, 0.5, 2.0)  # continued from its beginning, on a slower machine
    assert json.dumps(plan.revisions) == before


def test_other_hours_are_planned_from_here() -> None:
    plan = TimePlan(0.5, 1000, 100, 1.7, 5.0)
    plan.extend(1.0, 1000, 1800.0)
    assert plan.updates_at(1000) == pytest.approx(2000, rel=0.02)
    plan.extend(0.1, 1000, 1800.0)
    assert plan.updates_at(1000) == 1001


def test_a_plan_is_kept_and_shared(tmp_path: Path) -> None:
    plan = TimePlan(0.5, 1000, 100, 1.7, 5.0, [[250, 400.0, 1100]])
    assert read(tmp_path) is None
    write(plan, tmp_path)
    assert read(tmp_path) == plan
    assert shared(plan, SingleProcess()) == plan
    assert shared(None, SingleProcess()) is None


@pytest.mark.parametrize("text", ["{}", "[", '{"hours": "x"}', json.dumps({**vars(TimePlan(1, 0, 1, 1, 1))})])
def test_a_damaged_plan_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(RunError, match=r"plan\.json is damaged"):
        read(tmp_path)


def test_the_first_updates_are_not_timed() -> None:
    now = [0.0]

    def update() -> float:
        now[0] += 1.0 if now[0] < 5 else 0.1  # slow at first
        return 20.0

    watch = Stopwatch(SingleProcess(), 1000.0, lambda: now[0], lambda: False)
    assert watch.updates(update) == pytest.approx(0.1 / 20)


def test_a_part_of_a_large_set_is_timed_for_all() -> None:
    now = [0.0]

    class Part(list[Batch]):
        seconds = 250.0

    def evaluate(sets: dict[str, Iterable[Batch]]) -> None:
        for _ in next(iter(sets.values())):
            now[0] += 1.0

    batches = [Counted().at(0)] * 500  # one second of audio each
    watch = Stopwatch(SingleProcess(), 100.0, lambda: now[0], lambda: False)
    assert watch.validation({"dev": Part(batches)}, evaluate) == pytest.approx(250.0)
    assert now[0] == 2
    assert watch.validation({"dev": batches[:30]}, evaluate) == pytest.approx(30.0)


def test_a_run_is_as_if_nothing_had_been_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TimePlan, "is_due", lambda plan, step: False)
    planned = TimePlan(0.01, 12, 5, 0.1, 0.1)
    monkeypatch.setattr(time_plan, "time_plan", lambda *_: planned)
    monkeypatch.setattr(time_plan, "_SETTLE", (0.01, 0.02))
    monkeypatch.setattr(time_plan, "_MEASURE", (0.01, 0.02))
    timed = Rig(tmp_path / "a", max_hours=0.01, validate_every=None)
    assert len(timed.task.advanced) >= 12 + 4  # two updates that settle, two that are timed
    plain = Rig(tmp_path / "b", max_steps=12, validate_every=5)
    assert (timed.status, timed.losses) == ("finished", plain.losses)
    assert all(map(torch.equal, timed.task.parameters(), plain.task.parameters()))
    assert timed.data.next == plain.data.next
    assert timed.recorder.of("valid") == [
        {**row, "seconds": mine["seconds"]}
        for row, mine in zip(plain.recorder.of("valid"), timed.recorder.of("valid"), strict=True)
    ]
    (event,) = timed.recorder.of("plan")
    assert (event["steps"], event["validate_every"]) == (12, 5)


def test_a_plan_is_kept_on_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TimePlan, "is_due", lambda plan, step: False)
    monkeypatch.setattr(time_plan, "time_plan", lambda *_: TimePlan(0.01, 12, 5, 0.1, 0.1))
    monkeypatch.setattr(time_plan, "_SETTLE", (0.01, 0.02))
    monkeypatch.setattr(time_plan, "_MEASURE", (0.01, 0.02))
    whole = Rig(tmp_path / "a", max_hours=0.01, validate_every=None)
    first = Rig(tmp_path / "b", max_steps=7, validate_every=5)
    write(TimePlan(0.01, 12, 5, 0.1, 0.1), tmp_path / "b")
    monkeypatch.setattr(time_plan, "time_plan", lambda *_: pytest.fail("it is planned already"))
    second = Rig(tmp_path / "b", max_hours=0.01, validate_every=None)
    assert {**first.losses, **second.losses} == whole.losses


def test_a_slow_run_ends_soon_after_its_time_with_a_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TimePlan, "is_due", lambda plan, step: False)
    monkeypatch.setattr(time_plan, "time_plan", lambda hours, *_: TimePlan(hours, 10**6, 10**6, 0.1, 0.0))
    rig = Rig(tmp_path / "a", max_hours=1e-4, validate_every=None, log_every=10**6)
    assert rig.status == "time"
    assert len(rig.recorder.of("valid")) == 1


ON_LAZY = """
import json, sys, warnings
from pathlib import Path
warnings.filterwarnings("ignore")
import torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
import test_trainer
from speechtrain.devices.lazy import Lazy
from speechtrain.training import time_plan
Lazy().open(0)

class Fixed(test_trainer.Counted):
    shapes = evaluation_shapes = lambda self: [(3, 4, 1)]
    at = lambda self, number: super().at(3 * (number // 3) + 1)

class Line(test_trainer.Line):
    def __init__(self, *rest):
        super().__init__(*rest)
        self.dropout = torch.nn.Identity()
        self.to("lazy")
    prepare = lambda self, batch, seed: batch

adamw = torch.optim.AdamW
torch.optim.AdamW = lambda weights, lr: adamw(weights, lr=lr, foreach=False, fused=False)
test_trainer.CPU, test_trainer.Counted, test_trainer.Line = Lazy, Fixed, Line
time_plan.TimePlan.is_due = lambda plan, step: False
time_plan.time_plan = lambda *_: time_plan.TimePlan(0.01, 8, 4, 0.1, 0.1)
time_plan._SETTLE = time_plan._MEASURE = (0.01, 0.02)
found = {}
for name, limits in json.loads(sys.argv[3]).items():
    rig = test_trainer.Rig(Path(sys.argv[2], name), **limits)
    train = rig.recorder.of("train")
    found[name] = {
        "losses": [row["loss"] for row in train],
        "weights": [weight.cpu().tolist() for weight in rig.task.parameters()],
        "graphs": sorted({row["graphs"] for row in train}),
        "warnings": [row["message"] for row in rig.recorder.of("warning")],
        "advanced": len(rig.task.advanced),
    }
print(json.dumps(found))
"""


def test_what_is_timed_on_a_device_of_graphs_is_undone_and_compiles_nothing_later(tmp_path: Path) -> None:
    # a process of its own: the backend registers its device for good
    limits = {
        "plain": {"max_steps": 8, "validate_every": 4},
        "timed": {"max_hours": 0.01, "validate_every": None},
    }
    line = [sys.executable, "-c", ON_LAZY, str(Path(__file__).parent), str(tmp_path), json.dumps(limits)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    plain, timed = found["plain"], found["timed"]
    assert timed["advanced"] >= plain["advanced"] + 4
    assert (timed["losses"], timed["weights"]) == (plain["losses"], plain["weights"])
    assert len(timed["graphs"]) == 1  # none after the first update, not even for a validation
    assert not timed["warnings"]
