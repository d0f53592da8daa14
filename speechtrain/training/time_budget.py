"""The number of updates of a run: as steps and epochs say, or as many as there is time for."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import torch

from speechtrain.batch import Batch
from speechtrain.devices.base import Device
from speechtrain.distributed.group import Group
from speechtrain.errors import RunError
from speechtrain.files import read_json, write_json
from speechtrain.tracking.base import Tracker
from speechtrain.trainer_config import TrainerConfig, planned_steps
from speechtrain.training.run_state import Parts, Progress

Evaluate = Callable[[Parts, dict[str, Iterable[Batch]]], object]

_LATEST = 1.05  # share of max_hours after which a run ends that is slower than its plan
# The time for a part of a validation: at most this share of the time of the run, and at most these seconds.
_MEASURED_SHARE, _MAX_MEASURED_S = 0.01, 10.0
# The median counts this share of all updates, the latest ones, but at least this number of updates.
_WINDOW, _MIN_WINDOW = 0.1, 5
# The updates of a schedule until the first update is timed. The schedule then begins with its warm-up.
_UNPLANNED = 10**9
_NEWS = 0.05  # the smallest relative change of the plan that is reported
_FEW_UPDATES = 50  # a plan of fewer updates causes a warning
_FILE = "plan.json"
_SPACING = 0.02  # the share of the run between two revisions
_VALIDATION_SHARE = 0.1  # the largest share of the time for validation, unless one validation takes more
_MAX_VALIDATIONS = 20


@dataclass(frozen=True)
class Revision:
    """The plan as it was corrected after an update, or after the validation that follows it."""

    step: int  # updates so far
    wall_s: float  # seconds of the run so far
    updates: int  # planned updates of the whole run
    validated: int  # the step of the latest validation
    validate_at: int  # the step of the next validation
    share: float  # the share of the run that was done, by the plans so far

    def share_at(self, step: int) -> float:
        """Return the share of the run that is done after ``step`` updates, from 0 to 1."""
        updates_left = max(1, self.updates - self.step)
        share_of_rest = min(1.0, (step - self.step) / updates_left)
        return self.share + (1 - self.share) * share_of_rest


@dataclass
class TimePlan:
    """The present plan of a run and all its revisions. ``plan.json`` holds it.

    A continued run applies the stored revisions at the same steps, so an interruption changes no update.
    """

    hours: float  # the planned duration of all starts
    updates: int = 0  # planned updates of the whole run
    validate_every: int = 0  # updates from one validation to the next
    seconds_per_update: float = 0.0  # the median of the latest updates
    seconds_per_validation: float = 0.0  # 0: not measured yet
    revisions: list[Revision] = field(default_factory=list)  # in order, each a list in ``plan.json``

    @property
    def seconds(self) -> float:
        return self.hours * 3600

    def revisions_until(self, step: int, validated: int) -> list[Revision]:
        """Return the revisions made up to update ``step`` and the validation of step ``validated``."""
        point = (step, validated)
        return [revision for revision in self.revisions if (revision.step, revision.validated) <= point]

    def is_due(self, step: int, validated: int) -> bool:
        """Return whether the plan must be revised here.

        The first revisions are at steps 1, 2, 4, 8, … Later ones are 2 % of the updates apart, or half of the
        updates that are left, if that is less. A revision also follows each validation.
        """
        if not self.revisions:
            return step > 0
        latest = self.revisions[-1]
        if (step, validated) <= (latest.step, latest.validated) or step >= latest.updates:
            return False
        half = (latest.updates - latest.step) // 2
        spacing = min(latest.step, math.ceil(_SPACING * latest.updates), half)
        return validated > latest.validated or step >= latest.step + max(1, spacing)

    def revise(self, step: int, validated: int, wall_s: float, validate_every: int | None) -> None:
        """Plan the rest of the run from ``wall_s`` on, by the present seconds per update and validation.

        The rest has a whole number of validations, of which one is the end. With ``validate_every`` None they
        are evenly spaced. There are at most 20 in a run, and at least nine times their duration lies between
        two. Otherwise they have that spacing, but the last interval is longer.
        """
        per_update = self.seconds_per_update
        seconds_left = self.seconds - wall_s
        seconds_since_validation = (step - validated) * per_update
        period = self._validation_period(validate_every)
        validations = max(1, int((seconds_since_validation + seconds_left) / period))
        seconds_left -= validations * self.seconds_per_validation
        self.updates = step + max(0, int(seconds_left / per_update))
        spacing = validate_every or math.ceil((self.updates - validated) / validations)
        self.validate_every = max(1, spacing)
        validate_at = max(step, validated + self.validate_every) if validations > 1 else self.updates
        share = step / self.updates
        if self.revisions:
            share = self.revisions[-1].share_at(step)
        revision = Revision(step, wall_s, self.updates, validated, validate_at, share)
        self.revisions.append(revision)

    def _validation_period(self, validate_every: int | None) -> float:
        """Return the seconds between the ends of two validations. With None it is the shortest period."""
        per_validation = self.seconds_per_validation
        if validate_every is None:
            return max(self.seconds / _MAX_VALIDATIONS, per_validation / _VALIDATION_SHARE)
        return validate_every * self.seconds_per_update + per_validation

    def content(self) -> dict[str, Any]:
        """Return the content of ``plan.json``."""
        return {**vars(self), "revisions": [astuple(revision) for revision in self.revisions]}


def shared_plan(plan: TimePlan | None, group: Group) -> TimePlan | None:
    """Return rank 0's plan on every rank."""
    content = b""
    if plan is not None and not group.world.rank:
        content = json.dumps(plan.content()).encode()
    # The other ranks add zeros, so each sum is the number of rank 0.
    length = torch.tensor([float(len(content))])
    size = int(group.sum(length)[0])
    numbers = torch.zeros(size)
    numbers[: len(content)] = torch.tensor(list(content))
    content = bytes(group.sum(numbers).int().tolist())
    return _plan_of(json.loads(content)) if content else None


def _plan_of(content: dict[str, Any]) -> TimePlan:
    """Return the plan of the content of ``plan.json``. Raises TypeError or ValueError."""
    rows = content["revisions"]
    plan = TimePlan(**{**content, "revisions": [Revision(*row) for row in rows]})
    numbers = [number for name, number in content.items() if name != "revisions"]
    for row in rows:
        numbers += row
    are_numbers = all(isinstance(number, int | float) for number in numbers)
    if not are_numbers or plan.updates < 1:
        raise ValueError("a value is not a number of a plan")
    return plan


def read_plan(folder: Path) -> TimePlan | None:
    """Return the stored plan of a run, or None without one. Raises RunError for a damaged plan."""
    path = folder / _FILE
    if not path.exists():
        return None
    try:
        return _plan_of(read_json(path))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path} is damaged ({error}). Restore it, or use another run_dir") from None


def write_plan(plan: TimePlan, folder: Path) -> None:
    write_json(folder / _FILE, plan.content())


class Planning:
    """The number of updates of a run that is limited by steps, epochs or nothing."""

    def __init__(
        self,
        config: TrainerConfig,
        device: Device,
        group: Group,
        tracker: Tracker,
        run_dir: Path,
        wall_seconds: Callable[[], float],
        evaluate: Evaluate,
    ) -> None:
        self.config = config
        self.device = device
        self.group = group
        self.tracker = tracker
        self.run_dir = run_dir
        self.wall_seconds = wall_seconds
        """Returns the seconds of training, earlier starts included."""
        self.evaluate = evaluate
        self.updates: int | None = None
        self.validate_every = 1
        self.plan = TimePlan(config.max_hours or 0.0)

    def start(self, parts: Parts, per_epoch: float) -> None:
        """Plan the run before its first update."""
        self.updates = planned_steps(self.config, per_epoch)
        self.validate_every = self.config.validate_every or max(1, round(per_epoch))

    def length(self, step: int) -> float:
        """Return the updates of the whole run at its pace until ``step``, or 0 if nothing is planned."""
        return self.updates or 0

    def correct(self, parts: Parts) -> None:
        """Correct a plan by time. It is called after each update and after each validation."""

    def add_validation(self, seconds: float) -> None:
        """Count ``seconds`` of a whole validation and its checkpoint."""

    def is_validation_step(self, step: int) -> bool:
        """Return whether a validation follows update ``step``, if the run does not end there."""
        return step % self.validate_every == 0

    def latest_s(self) -> float | None:
        """Return the seconds of training after which no further update begins, or None for no limit."""
        return None if self.config.max_hours is None else self.config.max_hours * 3600

    def is_late(self) -> bool:
        """Return whether the time is over by this rank's clock."""
        latest = self.latest_s()
        return latest is not None and self.wall_seconds() >= latest

    def status(self, step: int, stop: bool, late: bool) -> str:
        """Return how the run ends after ``step`` updates. It is empty while the run continues."""
        if self.updates is not None and step >= self.updates:
            return "finished"
        if late:
            return "time"
        return "preempted" if stop else ""

    def eta_s(self, progress: Progress) -> float | None:
        """Return the seconds to the end by the average of the run, which includes validations."""
        step, planned = progress.step, self.updates
        return None if planned is None else (planned - step) * progress.wall_s / step


class TimedPlanning(Planning):
    """The number of updates of a run that is limited by ``max_hours`` alone.

    The plan comes from the median time of real updates. Rank 0's clock decides for all ranks.
    """

    _revision: Revision | None = None  # the revision that the run follows
    _reported_updates = 0  # the planned updates of the latest report

    def start(self, parts: Parts, per_epoch: float) -> None:
        progress, hours = parts.progress, self.plan.hours
        self._start_s = self._mark_s = self.wall_seconds()
        self._mark_step = progress.step
        stored_plan = read_plan(self.run_dir)  # Only the folder of rank 0 has one.
        self.plan = shared_plan(stored_plan, self.group) or self.plan
        self._update_seconds = [self.plan.seconds_per_update] * len(self.plan.revisions)
        if not progress.step:
            parts.schedule.plan(_UNPLANNED)
        if self.plan.hours != hours or not self.plan.revisions:
            self.plan.hours = hours
            self.plan.revisions = self.plan.revisions_until(progress.step, progress.validated)
            if self.plan.seconds_per_update:
                self._revise(parts)
        self._follow(parts)

    def length(self, step: int) -> float:
        share = self._revision.share_at(step) if self._revision else 0.0
        return step / share if share else _UNPLANNED

    def correct(self, parts: Parts) -> None:
        progress = parts.progress
        if self.plan.is_due(progress.step, progress.validated):
            self._revise(parts)
        self._follow(parts)

    def add_validation(self, seconds: float) -> None:
        self.plan.seconds_per_validation = seconds
        self._mark_s += seconds

    def is_validation_step(self, step: int) -> bool:
        return self._revision is not None and step >= self._revision.validate_at

    def latest_s(self) -> float | None:
        return _LATEST * self.plan.seconds - self.plan.seconds_per_validation

    def _revise(self, parts: Parts) -> None:
        """Measure the updates since the last revision and plan the rest."""
        plan, progress = self.plan, parts.progress
        self._measure_updates(progress.step)
        if self._is_measurement_due(progress):
            start_s = self.wall_seconds()
            plan.seconds_per_validation = self._measure_validation(parts)
            self._mark_s += self.wall_seconds() - start_s
        progress.wall_s = self.wall_seconds()
        plan.revise(progress.step, progress.validated, progress.wall_s, self.config.validate_every)
        self.plan = shared_plan(plan, self.group) or plan
        if not self.group.world.rank:
            write_plan(self.plan, self.run_dir)

    def _measure_updates(self, step: int) -> None:
        """Add the updates since the last revision and take the median of the latest ones.

        All updates between two revisions get their mean time: a device that works asynchronously is
        synchronised only here, and the mean has long batches in their proportion.
        """
        self.device.synchronize()
        wall_s, updates = self.wall_seconds(), step - self._mark_step
        if updates:
            self._update_seconds += [(wall_s - self._mark_s) / updates] * updates
            # At most half of the updates count, so that a longer plan does not include a slow start again.
            count = max(_MIN_WINDOW, min(step // 2, round(_WINDOW * self.plan.updates)))
            self.plan.seconds_per_update = statistics.median(self._update_seconds[-count:])
        self._mark_s, self._mark_step = wall_s, step

    def _is_measurement_due(self, progress: Progress) -> bool:
        """Return whether a part of a validation must be timed, because the run has not validated yet.

        It is timed at 2 % of the time. It is timed again at half of the updates, when hypotheses are longer.
        """
        if progress.validated:
            return False
        if not self.plan.seconds_per_validation:
            is_late_enough = self.wall_seconds() >= _SPACING * self.plan.seconds
            return self.group.any(is_late_enough and not self.group.world.rank)
        half = (self.updates or 0) / 2
        return self._revision is not None and self._revision.step < half <= progress.step

    def _measure_validation(self, parts: Parts) -> float:
        """Return the estimated seconds of a validation, from the first batches of each set."""
        total, world = 0.0, self.group.world
        for name, batches in parts.data.valid(world.rank, world.size).items():
            start_s = self.wall_seconds()
            audio_seconds: list[float] = []
            self.evaluate(parts, {name: self._first_batches(batches, audio_seconds)})
            audio_share = sum(audio_seconds) / getattr(batches, "seconds", math.inf)
            total += (self.wall_seconds() - start_s) / (audio_share or 1.0)
        return total

    def _first_batches(self, batches: Iterable[Batch], audio_seconds: list[float]) -> Iterator[Batch]:
        end = self.wall_seconds() + min(_MEASURED_SHARE * self.plan.seconds, _MAX_MEASURED_S)
        for batch in batches:
            yield batch
            audio_seconds.append(batch.seconds)
            is_over = hasattr(batches, "seconds") and self.wall_seconds() >= end
            if self.group.any(is_over):
                return

    def _follow(self, parts: Parts) -> None:
        """Apply the revision of this point, which the run may have stored before it was interrupted."""
        progress = parts.progress
        revisions = self.plan.revisions_until(progress.step, progress.validated)
        if not revisions or revisions[-1] == self._revision:
            return
        self._revision = revision = revisions[-1]
        self.updates = revision.updates
        parts.schedule.plan(revision.updates, progress.step)
        if revision.wall_s >= _SPACING * self.plan.seconds:
            self._report(revision)

    def _report(self, revision: Revision) -> None:
        """Log a plan that differs by 5 % from the one before, with warnings at the first."""
        plan = self.plan
        if abs(revision.updates - self._reported_updates) < _NEWS * revision.updates:
            return
        values = {
            "step": revision.step,
            "steps": revision.updates,
            "hours": plan.hours,
            "validate_every": plan.validate_every,
            "s_per_update": round(plan.seconds_per_update, 6),
            "s_per_validation": round(plan.seconds_per_validation, 4),
        }
        self.tracker.log("plan", values)
        if not self._reported_updates:
            self._warn(revision)
        self._reported_updates = revision.updates

    def _warn(self, revision: Revision) -> None:
        plan, per_validation = self.plan, self.plan.seconds_per_validation
        speed = f"an update takes {plan.seconds_per_update:.3g} s, a validation {per_validation:.3g} s"
        if revision.updates < _FEW_UPDATES:
            room = f"trainer.max_hours={plan.hours:g} has room for {revision.updates} updates"
            reason = f"the start took {self._start_s:.3g} s, {speed}; set a longer trainer.max_hours"
            self.tracker.log("warning", {"message": f"{room}: {reason}"})
        share = max(1, revision.updates // plan.validate_every) * per_validation / plan.seconds
        if share > _VALIDATION_SHARE:
            advice = "give data.valid fewer recordings, or set a longer trainer.validate_every"
            message = f"validation takes {share:.0%} of the time ({speed}); {advice}"
            self.tracker.log("warning", {"message": message})
