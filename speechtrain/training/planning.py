"""How many updates a run makes: as steps and epochs say, or as many as there is time for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from speechtrain.batch import Batch
from speechtrain.devices.base import Device
from speechtrain.distributed.group import Group
from speechtrain.tracking.base import Tracker
from speechtrain.trainer_config import TrainerConfig, planned_steps
from speechtrain.training import time_plan
from speechtrain.training.run_state import Parts, Progress

Update = Callable[[Iterator[Batch]], object]
"""Takes one update from training batches."""
Evaluate = Callable[[dict[str, Iterable[Batch]]], object]


class Planning:
    """The number of updates of a run that is limited by steps, epochs or nothing."""

    def __init__(
        self,
        config: TrainerConfig,
        device: Device,
        group: Group,
        tracker: Tracker,
        run_dir: Path,
        stop_requested: Callable[[], bool],
    ) -> None:
        self.config = config
        self.device = device
        self.group = group
        self.tracker = tracker
        self.run_dir = run_dir
        self.stop_requested = stop_requested
        self.updates: int | None = None
        self.first_plan = 0
        """The updates of the first plan, whatever the clock has made of it; 0 for none."""
        self.validate_every = 1
        self.validation_s = 0.0
        """Seconds of the latest validation."""

    def start(
        self, parts: Parts, per_epoch: float, started: float, update: Update, evaluate: Evaluate
    ) -> None:
        """Plan a run that was begun at ``started``, where ``update`` and ``evaluate`` can be timed."""
        self.updates = planned_steps(self.config, per_epoch)
        self.first_plan = self.updates or 0
        self.validate_every = self.config.validate_every or max(1, round(per_epoch))

    def correct(self, parts: Parts) -> None:
        """Called after each update; changes ``updates`` where they are planned by time."""

    def latest_s(self) -> float | None:
        """Seconds of training after which no further update begins; None for no such limit."""
        return None if self.config.max_hours is None else self.config.max_hours * 3600

    def is_late(self, spent_s: float) -> bool:
        """True where this rank's clock says that the time is over."""
        latest = self.latest_s()
        return latest is not None and spent_s >= latest

    def status(self, step: int, stop: bool, late: bool) -> str:
        """How the run ends after ``step`` updates; empty while it continues."""
        if self.updates is not None and step >= self.updates:
            return "finished"
        if late:
            return "time"
        return "preempted" if stop else ""

    def eta_s(self, progress: Progress) -> float | None:
        """Seconds to the end by the whole run, so that it holds still, and validations count."""
        step, planned = progress.step, self.updates
        return None if planned is None else (planned - step) * progress.wall_s / step


class TimedPlanning(Planning):
    """The number of updates of a run that is limited by ``max_hours`` alone.

    Rank 0's plan holds for all ranks and starts. It is made before the first update, by updates of learning
    rate 0 and a validation that are timed and undone, and corrected by the clock of the updates themselves.
    """

    plan: time_plan.TimePlan | None = None

    def start(
        self, parts: Parts, per_epoch: float, started: float, update: Update, evaluate: Evaluate
    ) -> None:
        super().start(parts, per_epoch, started, update, evaluate)
        config, group, step = self.config, self.group, parts.progress.step
        assert config.max_hours is not None
        plan = self._of_rank_0(None if group.world.rank else time_plan.read(self.run_dir))
        if plan is None and not step:
            plan = self._timed(parts, per_epoch, started, update, evaluate)
        if plan is None or group.any(self.stop_requested()):  # an earlier release planned nothing
            return
        if is_other := plan.hours != config.max_hours:
            plan.extend(config.max_hours, step, parts.progress.wall_s)
        if is_other or not step:  # else the checkpoint's schedule has it
            parts.schedule.plan(plan.updates_at(step))
        self._take(plan, step)

    def _timed(
        self, parts: Parts, per_epoch: float, started: float, update: Update, evaluate: Evaluate
    ) -> time_plan.TimePlan | None:
        config, world = self.config, self.group.world
        size = parts.data.padded_samples() * config.accumulate

        def clock() -> float:
            self.device.synchronize()
            return time.perf_counter()

        def trial() -> float:
            update(batches)
            return float(sum(batch.audio.numel() for batch in parts.micro_batches)) if size else 1.0

        assert config.max_hours is not None
        watch = time_plan.Stopwatch(self.group, config.max_hours * 3600, clock, self.stop_requested)
        with time_plan.rewound(parts):
            batches = parts.data.train(world.rank, world.size, config.accumulate)
            per_update = watch.updates(trial) * (size or 1.0)
            validation_s = watch.validation(parts.data.valid(world.rank, world.size), evaluate)
        self.device.mark_step()  # what was put back is not in the first update's graph
        parts.wrapped = self.group.wrap(parts.task)  # DDP's buckets as if there had been no update
        spent, every = time.perf_counter() - started, config.validate_every
        return self._of_rank_0(
            time_plan.time_plan(config.max_hours, spent, per_update, validation_s, per_epoch, every)
        )

    def correct(self, parts: Parts) -> None:
        plan, progress = self.plan, parts.progress
        if plan is None or not plan.is_due(progress.step):
            return
        plan.revise(progress.step, progress.wall_s, self.validation_s or plan.seconds_per_validation)
        if (revised := self._of_rank_0(plan)) is not None:
            parts.schedule.plan(revised.updates_at(progress.step))
            self._take(revised, progress.step)

    def latest_s(self) -> float | None:
        seconds = super().latest_s()
        if seconds is None or (plan := self.plan) is None:
            return seconds
        # which a slower machine may miss; what is last must still fit
        return time_plan.LATEST * seconds - (self.validation_s or plan.seconds_per_validation)

    def _of_rank_0(self, plan: time_plan.TimePlan | None) -> time_plan.TimePlan | None:
        return time_plan.shared(None if self.group.world.rank else plan, self.group)

    def _take(self, plan: time_plan.TimePlan, step: int) -> None:
        """Follow ``plan``, report it, and write it where the next start finds it."""
        self.plan, self.first_plan = plan, plan.updates
        self.updates, self.validate_every = plan.updates_at(step), plan.validate_every
        if not self.group.world.rank:
            time_plan.write(plan, self.run_dir)
        values = {"step": step, "steps": self.updates, "hours": plan.hours}
        speed = {"s_per_update": plan.seconds_per_update, "s_per_validation": plan.seconds_per_validation}
        self.tracker.log("plan", {**values, "validate_every": plan.validate_every, **speed})
