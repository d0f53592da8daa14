"""The planned number of updates of a run.

``Planning`` takes it from ``max_steps`` and ``max_epochs``. ``TimedPlanning`` is for a run that ``max_hours``
alone limits: it plans as many updates as the time allows, and revises the plan while the run is going on.

Legend: a point of a run is a step, and the step of the latest validation. The two differ before and after the
validation of a step. Names that end in ``_s`` are seconds. ``share`` is a fraction from 0 to 1.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from speechtrain.batch import Batch
from speechtrain.devices.base import Device
from speechtrain.distributed.group import Group
from speechtrain.errors import RunError
from speechtrain.files import read_json, write_json
from speechtrain.run_directory import Status
from speechtrain.tracking.base import Tracker
from speechtrain.trainer_config import TrainerConfig, planned_steps
from speechtrain.training.run_state import Parts, Progress
from speechtrain.training.saving import handle_failed_write

Evaluate = Callable[[Parts, dict[str, Iterable[Batch]]], object]
"""Evaluates named sets of batches."""

_FILE = "plan.json"
# A run that is slower than its plan ends at this multiple of ``max_hours``.
_LATEST_END = 1.05
# Before the first update is timed, a schedule gets this number of planned updates, so that it begins with its
# warm-up.
_UNPLANNED = 10**9
# Late revisions are this share of the updates apart. Only after this share of the time, a validation is timed
# and plans are logged.
_SPACING = 0.02
# The time of an update is the median of this share of all updates, the latest ones, but at least of this
# number of updates.
_WINDOW, _MIN_WINDOW = 0.1, 5
# Part of a validation is timed to plan the first one. It takes at most this share of the time of the run, and
# at most these seconds.
_MEASURED_SHARE, _MAX_MEASURED_S = 0.01, 10.0
_VALIDATION_SHARE = 0.1  # the largest share of the time for validations, unless one validation takes more
_MAX_VALIDATIONS = 20  # in a run
_REPORTED_CHANGE = 0.05  # the smallest relative change of the planned updates that is logged
_FEW_UPDATES = 50  # a plan of fewer updates causes a warning


@dataclass(frozen=True)
class Revision:
    """The plan as it was revised after an update, or after the validation that follows the update."""

    step: int  # updates so far
    wall_s: float  # seconds of the run so far
    updates: int  # planned updates of the whole run
    validated: int  # the step of the latest validation
    validate_at: int  # the step of the next validation
    share: float  # the share of the run that was done, by the plans so far

    def share_at(self, step: int) -> float:
        """Return the share of the run that is done after ``step`` updates, from 0 to 1.

        A revision does not change the share that was done before it. The updates after it have equal parts of
        the rest.
        """
        remaining_updates = max(1, self.updates - self.step)
        remaining_share = min(1.0, (step - self.step) / remaining_updates)
        return self.share + (1 - self.share) * remaining_share


@dataclass
class TimePlan:
    """The present plan of a run and all its revisions. It is stored in ``plan.json``.

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
        """The planned duration of all starts."""
        return self.hours * 3600

    @property
    def seconds_for_validation(self) -> float:
        """The seconds that the plan leaves for each validation, at most half of the time."""
        return min(self.seconds_per_validation, self.seconds / 2)

    def revisions_until(self, step: int, validated: int) -> list[Revision]:
        """Return the revisions that were made at the point (``step``, ``validated``) or before it."""
        point = (step, validated)
        return [revision for revision in self.revisions if (revision.step, revision.validated) <= point]

    def is_revision_due(self, step: int, validated: int) -> bool:
        """Return whether the plan must be revised at the point (``step``, ``validated``).

        The first revisions are at steps 1, 2, 4, 8, … Later ones are 2 % of the planned updates apart, or
        half of the remaining updates if that is less. A revision also follows each validation.
        """
        if not self.revisions:
            return step > 0
        latest = self.revisions[-1]
        if (step, validated) <= (latest.step, latest.validated) or step >= latest.updates:
            return False
        half_of_rest = (latest.updates - latest.step) // 2
        spacing = min(latest.step, math.ceil(_SPACING * latest.updates), half_of_rest)
        return validated > latest.validated or step >= latest.step + max(1, spacing)

    def revise(self, step: int, validated: int, wall_s: float, validate_every: int | None) -> None:
        """Plan the rest of the run from second ``wall_s`` on, and append the revision.

        The plan uses the present seconds per update and per validation. The rest of the run contains a whole
        number of validations, and the last of them is at the end. There is at least one update. If one
        validation takes more than half of the time, updates have the other half, and the run ends late.

        - With ``validate_every`` None, they are evenly spaced. There are at most 20 in a run, and validations
          take at most a tenth of the time.
        - Otherwise they are ``validate_every`` updates apart, and the last interval is longer.
        """
        per_update = self.seconds_per_update
        seconds_left = self.seconds - wall_s
        seconds_since_validation = (step - validated) * per_update
        period = self._validation_period(validate_every)
        validations = max(1, int((seconds_since_validation + seconds_left) / period))
        seconds_left -= validations * self.seconds_for_validation
        self.updates = max(1, step + max(0, int(seconds_left / per_update)))
        spacing = validate_every or math.ceil((self.updates - validated) / validations)
        self.validate_every = max(1, spacing)
        validate_at = self.updates
        if validations > 1:
            validate_at = max(step, validated + self.validate_every)
        share = step / self.updates
        if self.revisions:
            share = self.revisions[-1].share_at(step)
        revision = Revision(step, wall_s, self.updates, validated, validate_at, share)
        self.revisions.append(revision)

    def _validation_period(self, validate_every: int | None) -> float:
        """Return the seconds from the end of a validation to the end of the next one.

        With ``validate_every`` None, this is the shortest period that the limits of validation allow.
        """
        per_validation = self.seconds_per_validation
        if validate_every is None:
            return max(self.seconds / _MAX_VALIDATIONS, per_validation / _VALIDATION_SHARE)
        return validate_every * self.seconds_per_update + per_validation

    def content(self) -> dict[str, Any]:
        """Return the content of ``plan.json``."""
        return {**vars(self), "revisions": [astuple(revision) for revision in self.revisions]}


def shared_plan(plan: TimePlan | None, group: Group) -> TimePlan | None:
    """Return the ``plan`` of rank 0 on every rank, or None if rank 0 has none."""
    content = group.from_rank_0(plan and plan.content())
    return _plan_from(content) if content else None


def _plan_from(content: dict[str, Any]) -> TimePlan:
    """Return the plan with the content of ``plan.json``. Raises TypeError or ValueError if it is damaged."""
    revisions = content["revisions"]
    plan = TimePlan(**{**content, "revisions": [Revision(*fields) for fields in revisions]})
    numbers = [number for name, number in content.items() if name != "revisions"]
    for fields in revisions:
        numbers += fields
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
        return _plan_from(read_json(path))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path} is damaged ({error}). Restore it, or use another run_dir") from None


def write_plan(plan: TimePlan, folder: Path) -> None:
    write_json(folder / _FILE, plan.content())


class Planning:
    """The planned updates of a run that is limited by steps, epochs or nothing.

    ``max_hours`` may end such a run earlier.
    """

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
        self.wall_seconds = wall_seconds  # returns the seconds of the run, earlier starts included
        self.evaluate = evaluate
        self.updates: int | None = None  # the planned updates of the whole run, or None for no plan
        self.validate_every = 1  # updates from one validation to the next
        self.plan = TimePlan(config.max_hours or 0.0)

    def start(self, parts: Parts) -> None:
        """Plan the run before the first update of this start."""
        self.updates = planned_steps(self.config, parts.updates_per_epoch)
        if self.updates is not None and self.updates > parts.progress.step:
            # The restored schedule still has the plan of the earlier start.
            parts.schedule.plan(self.updates, parts.progress.step)
        self.validate_every = self.config.validate_every or max(1, round(parts.updates_per_epoch))

    def expected_updates(self, step: int) -> float:
        """Return the updates of the whole run by its progress until ``step``, or 0 without a plan."""
        return self.updates or 0

    def correct(self, parts: Parts) -> None:
        """Revise a plan by time if that is due. The trainer calls this after each update and validation."""

    def record_validation(self, seconds: float) -> None:
        """Record the ``seconds`` that a whole validation and its checkpoint took."""

    def is_validation_step(self, step: int) -> bool:
        """Return whether a validation follows update ``step``, if the run does not end there."""
        return step % self.validate_every == 0

    def time_limit_s(self) -> float | None:
        """Return the seconds of the run after which no further update begins, or None for no limit."""
        return None if self.config.max_hours is None else self.config.max_hours * 3600

    def is_late(self) -> bool:
        """Return whether the time limit is over by this rank's clock."""
        limit_s = self.time_limit_s()
        return limit_s is not None and self.wall_seconds() >= limit_s

    def status(self, step: int, stop: bool, late: bool) -> Status | None:
        """Return how the run ends after ``step`` updates, or None if it continues."""
        if self.updates is not None and step >= self.updates:
            return Status.FINISHED
        if late:
            return Status.TIME
        return Status.PREEMPTED if stop else None

    def eta_s(self, progress: Progress) -> float | None:
        """Return the estimated seconds to the end, from the mean time of an update with validations."""
        if self.updates is None:
            return None
        return (self.updates - progress.step) * progress.wall_s / progress.step


class TimedPlanning(Planning):
    """The planned updates of a run that is limited by ``max_hours`` alone.

    The plan comes from the median time of real updates. The clock of rank 0 decides for all ranks.
    """

    _revision: Revision | None = None  # the revision that the run applies at present
    _reported_updates = 0  # the planned updates in the latest log line of a plan, or 0

    def start(self, parts: Parts) -> None:
        progress, hours = parts.progress, self.plan.hours
        # Updates are timed from ``_mark_step`` and ``_mark_s``, the step and the second of the last revision.
        self._start_s = self._mark_s = self.wall_seconds()
        self._mark_step = progress.step
        stored_plan = read_plan(self.run_dir)  # Only the run directory of rank 0 contains it.
        self.plan = shared_plan(stored_plan, self.group) or self.plan
        # The seconds of each update. The plan of an earlier start stores only their median, which stands here
        # for one update of each revision.
        self._update_seconds = [self.plan.seconds_per_update] * len(self.plan.revisions)
        if not progress.step:
            parts.schedule.plan(_UNPLANNED)
        if self.plan.hours != hours or not self.plan.revisions:
            # With another time limit, the stored revisions of later steps are wrong.
            self.plan.hours = hours
            self.plan.revisions = self.plan.revisions_until(progress.step, progress.validated)
            if self.plan.seconds_per_update:
                self._revise(parts)
        self._apply_revision(parts)

    def expected_updates(self, step: int) -> float:
        share = self._revision.share_at(step) if self._revision else 0.0
        return step / share if share else _UNPLANNED

    def correct(self, parts: Parts) -> None:
        progress = parts.progress
        if self.plan.is_revision_due(progress.step, progress.validated):
            self._revise(parts)
        self._apply_revision(parts)

    def record_validation(self, seconds: float) -> None:
        self.plan.seconds_per_validation = seconds
        self._mark_s += seconds  # This time does not belong to updates.

    def is_validation_step(self, step: int) -> bool:
        return self._revision is not None and step >= self._revision.validate_at

    def time_limit_s(self) -> float | None:
        # The last validation must end before the latest end.
        return _LATEST_END * self.plan.seconds - self.plan.seconds_for_validation

    def _revise(self, parts: Parts) -> None:
        """Measure the updates since the last revision, and plan the rest of the run."""
        plan, progress = self.plan, parts.progress
        self._measure_updates(progress.step)
        if self._is_measurement_due(progress):
            start_s = self.wall_seconds()
            plan.seconds_per_validation = self._measure_validation(parts)
            self._mark_s += self.wall_seconds() - start_s
        progress.wall_s = self.wall_seconds()
        plan.revise(progress.step, progress.validated, progress.wall_s, self.config.validate_every)
        self.plan = shared_plan(plan, self.group) or plan
        if self.group.world.rank == 0:
            # If the plan cannot be written, the next revision writes it again.
            with handle_failed_write(self.tracker, self.config.on_save_error):
                write_plan(self.plan, self.run_dir)

    def _measure_updates(self, step: int) -> None:
        """Set the seconds per update to the median of the latest updates up to ``step``.

        Each update since the last revision counts with the mean time of these updates. Single times are not
        known, because a device that works asynchronously is synchronised only here.
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
        """Return whether part of a validation must be timed. All ranks return the same.

        This is the case before the first validation of the run: at 2 % of the time, and again at half of the
        updates, when the hypotheses are longer.
        """
        if progress.validated:
            return False
        if not self.plan.seconds_per_validation:
            is_late_enough = self.wall_seconds() >= _SPACING * self.plan.seconds
            return self.group.any(is_late_enough and self.group.world.rank == 0)
        half = (self.updates or 0) / 2
        return self._revision is not None and self._revision.step < half <= progress.step

    def _measure_validation(self, parts: Parts) -> float:
        """Return the estimated seconds of a whole validation, from the first batches of each set."""
        total_s, world = 0.0, self.group.world
        for name, batches in parts.data.valid(world.rank, world.size).items():
            start_s = self.wall_seconds()
            audio_seconds: list[float] = []
            self.evaluate(parts, {name: self._first_batches(batches, audio_seconds)})
            evaluated_share = sum(audio_seconds) / getattr(batches, "seconds", math.inf)
            # The share is 0 if the seconds of the set are unknown. Then all batches were evaluated.
            total_s += (self.wall_seconds() - start_s) / (evaluated_share or 1.0)
        return total_s

    def _first_batches(self, batches: Iterable[Batch], audio_seconds: list[float]) -> Iterator[Batch]:
        """Yield batches until the time for the measurement is over, and add the seconds of their audio.

        If the seconds of the whole set are unknown, all batches are yielded.
        """
        end_s = self.wall_seconds() + min(_MEASURED_SHARE * self.plan.seconds, _MAX_MEASURED_S)
        for batch in batches:
            yield batch
            audio_seconds.append(batch.seconds)
            is_over = hasattr(batches, "seconds") and self.wall_seconds() >= end_s
            if self.group.any(is_over):
                return

    def _apply_revision(self, parts: Parts) -> None:
        """Apply the latest revision up to this point, if the run does not apply it already.

        It may come from an earlier start, which was interrupted after this point.
        """
        progress = parts.progress
        revisions = self.plan.revisions_until(progress.step, progress.validated)
        if not revisions or revisions[-1] == self._revision:
            return
        self._revision = revision = revisions[-1]
        self.updates = revision.updates
        parts.schedule.plan(revision.updates, progress.step)
        # Earlier plans rest on a few updates, so they are not logged.
        if revision.wall_s >= _SPACING * self.plan.seconds:
            self._report(revision)

    def _report(self, revision: Revision) -> None:
        """Log a plan that differs by 5 % from the last logged one. The first one may also cause warnings."""
        plan = self.plan
        if abs(revision.updates - self._reported_updates) < _REPORTED_CHANGE * revision.updates:
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
        """Warn of a plan with few updates, and of validations that take much of the time."""
        plan, per_validation = self.plan, self.plan.seconds_per_validation
        speed = f"an update takes {plan.seconds_per_update:.3g} s, a validation {per_validation:.3g} s"
        if revision.updates < _FEW_UPDATES:
            room = f"trainer.max_hours={plan.hours:g} has room for {revision.updates} updates"
            reason = f"the start took {self._start_s:.3g} s, {speed}; set a longer trainer.max_hours"
            self.tracker.log("warning", {"message": f"{room}: {reason}"})
        validations = max(1, revision.updates // plan.validate_every)
        share = validations * per_validation / plan.seconds
        if share > _VALIDATION_SHARE:
            advice = "give data.valid fewer recordings, or set a longer trainer.validate_every"
            lateness = ""
            if per_validation > plan.seconds_for_validation:
                late_s = per_validation - plan.seconds_for_validation
                lateness = f", so the run ends {late_s:.3g} s late"
            message = f"validation takes {share:.0%} of the time ({speed}){lateness}; {advice}"
            self.tracker.log("warning", {"message": message})
