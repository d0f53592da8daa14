"""How many updates a run makes: as steps and epochs say, or as many as there is time for."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from speechtrain.batch import Batch
from speechtrain.devices.base import Device
from speechtrain.distributed.group import Group
from speechtrain.tracking.base import Tracker
from speechtrain.trainer_config import TrainerConfig, planned_steps
from speechtrain.training import time_plan
from speechtrain.training.run_state import Parts, Progress
from speechtrain.training.time_plan import Revision, TimePlan

Evaluate = Callable[[Parts, dict[str, Iterable[Batch]]], object]

_LATEST = 1.05  # share of max_hours at which a run ends that is slower than its plan
_MEASURED_SHARE, _MAX_MEASURED_S = 0.01, 10.0  # of the time, to time a part of a validation
_WINDOW, _MIN_WINDOW = 0.1, 5  # the latest updates whose median counts: a share of all, and the fewest
_UNPLANNED = 10**9  # updates of a schedule before the first update is timed, so that its warm-up has begun
_NEWS = 0.05  # change of the plan that is reported
_FEW_UPDATES = 50


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

    _revision: Revision | None = None  # that is followed
    _reported_updates = 0

    def start(self, parts: Parts, per_epoch: float) -> None:
        progress, hours = parts.progress, self.plan.hours
        self._start_s = self._mark_s = self.wall_seconds()
        self._mark_step = progress.step
        stored_plan = None if self.group.world.rank else time_plan.read(self.run_dir)
        self.plan = time_plan.shared(stored_plan, self.group) or self.plan
        self._update_seconds = [self.plan.seconds_per_update] * len(self.plan.revisions)
        if not progress.step:
            parts.schedule.plan(_UNPLANNED)
        if self.plan.hours != hours or not self.plan.revisions:
            self.plan.hours = hours
            self.plan.revisions = self.plan.until(progress.step, progress.validated)
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
            before = self.wall_seconds()
            plan.seconds_per_validation = self._measure_validation(parts)
            self._mark_s += self.wall_seconds() - before
        progress.wall_s = self.wall_seconds()
        plan.revise(progress.step, progress.validated, progress.wall_s, self.config.validate_every)
        self.plan = time_plan.shared(plan, self.group) or plan
        if not self.group.world.rank:
            time_plan.write(self.plan, self.run_dir)

    def _measure_updates(self, step: int) -> None:
        """Add the updates since the last revision and take the median of the latest ones.

        All updates between two revisions get their mean time: a device that works asynchronously is
        synchronised only here, and the mean has long batches in their proportion.
        """
        self.device.synchronize()
        wall_s, updates = self.wall_seconds(), step - self._mark_step
        if updates:
            self._update_seconds += [(wall_s - self._mark_s) / updates] * updates
            # at most half of all, so that a longer plan does not bring a slow start back
            count = max(_MIN_WINDOW, min(step // 2, round(_WINDOW * self.plan.updates)))
            self.plan.seconds_per_update = statistics.median(self._update_seconds[-count:])
        self._mark_s, self._mark_step = wall_s, step

    def _is_measurement_due(self, progress: Progress) -> bool:
        """Return whether a part of a validation must be timed, because no whole one has been.

        That is the case at 2 % of the time, and once more at half, when the model writes more.
        """
        if progress.validated:
            return False
        if not self.plan.seconds_per_validation:
            is_late_enough = self.wall_seconds() >= time_plan.SPACING * self.plan.seconds
            return self.group.any(is_late_enough and not self.group.world.rank)
        half = (self.updates or 0) / 2
        return self._revision is not None and self._revision.step < half <= progress.step

    def _measure_validation(self, parts: Parts) -> float:
        """Return the seconds of a validation, from as many batches of each set as the time allows."""
        total, world = 0.0, self.group.world
        for name, batches in parts.data.valid(world.rank, world.size).items():
            before = self.wall_seconds()
            audio_seconds: list[float] = []
            self.evaluate(parts, {name: self._first_batches(batches, audio_seconds)})
            audio_share = sum(audio_seconds) / getattr(batches, "seconds", math.inf)
            total += (self.wall_seconds() - before) / (audio_share or 1.0)
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
        revisions = self.plan.until(progress.step, progress.validated)
        if not revisions or revisions[-1] == self._revision:
            return
        self._revision = revision = revisions[-1]
        self.updates = revision.updates
        parts.schedule.plan(revision.updates, progress.step)
        if revision.wall_s >= time_plan.SPACING * self.plan.seconds:
            self._report(revision)

    def _report(self, revision: Revision) -> None:
        """Log a plan that differs by 5 % from the one before, with warnings at the first."""
        plan = self.plan
        if abs(revision.updates - self._reported_updates) < _NEWS * revision.updates:
            return
        values = {"step": revision.step, "steps": revision.updates, "hours": plan.hours}
        values |= {"validate_every": plan.validate_every}
        values |= {"s_per_update": round(plan.seconds_per_update, 6)}
        values |= {"s_per_validation": round(plan.seconds_per_validation, 4)}
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
        if share > time_plan.VALIDATION_SHARE:
            advice = "give data.valid fewer recordings, or set a longer trainer.validate_every"
            message = f"validation takes {share:.0%} of the time ({speed}); {advice}"
            self.tracker.log("warning", {"message": message})
