"""The shared trainer: one loop that every model, device and launcher goes through.

It reads in the order of time: next batch, prepare, move, forward, backward, mark step, reduce status,
schedule, unscale, clip, step, average, log when due, save when due, validate when due.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from speechtrain.batch import Batch
from speechtrain.checkpoint.whole import Checkpointer
from speechtrain.compute_policy import PLAIN, ComputePolicy, scaled
from speechtrain.counter_rng import RunStream, seed_at
from speechtrain.data.base import DataModule
from speechtrain.devices.base import Device
from speechtrain.distributed.group import Group
from speechtrain.errors import Diverged, Preempted
from speechtrain.optim.ema import Average
from speechtrain.optim.schedules import Schedule
from speechtrain.precision import Precision
from speechtrain.task import Loss, Task
from speechtrain.tracking.base import Tracker
from speechtrain.trainer_config import TrainerConfig, is_planned_by_time
from speechtrain.training.graph_warmup import Graphs, WarmedUpGraphs
from speechtrain.training.optimizer_step import BranchFreeUpdate, HostCheckedUpdate, Update
from speechtrain.training.profiling import StepProfiler
from speechtrain.training.recovery import Recovery
from speechtrain.training.run_state import Interval, Parts, Progress
from speechtrain.training.saving import Saving
from speechtrain.training.time_budget import Planning, TimedPlanning
from speechtrain.training.validation import Validation


@dataclass(eq=False)
class Trainer:
    """Trains a task until a limit, a target or a stop request is reached."""

    config: TrainerConfig
    device: Device
    precision: Precision
    group: Group
    checkpointer: Checkpointer
    tracker: Tracker
    seed: int
    run_dir: Path
    stop_requested: Callable[[], bool] = lambda: False
    policy: ComputePolicy = PLAIN
    progress: Progress = field(init=False, default_factory=Progress)
    parts: Parts | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        config, device, tracker = self.config, self.device, self.tracker
        is_static, stop = device.static_shapes, self.stop_requested
        update: type[Update] = BranchFreeUpdate if is_static else HostCheckedUpdate
        self.update = update(self.precision, config.clip)
        self.graphs = (WarmedUpGraphs if is_static else Graphs)(device, tracker, config.max_graphs)
        self.recovery = Recovery(config, tracker, self.seed, run_dir=self.run_dir)
        self.validation = Validation(
            device, self.policy, self.group, tracker=tracker, target=config.target, stop_requested=stop
        )
        self.saving = Saving(self.group, self.checkpointer, tracker, config.on_save_error)
        planning = TimedPlanning if is_planned_by_time(config) else Planning
        self._started = 0.0  # when the run would have started, had it never been interrupted
        self._lap_start = 0.0  # the clock when the latest update was counted, or a pause after it ended
        self._updates_per_epoch = 0.0
        self.planning = planning(
            config, device, self.group, tracker, self.run_dir, self._wall_seconds, self.validation.evaluate
        )

    def _wall_seconds(self) -> float:
        """Return the seconds of training, earlier starts included."""
        return time.perf_counter() - self._started

    def fit(
        self,
        task: Task,
        data: DataModule,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        average: Average,
        resume: str = "auto",
    ) -> str:
        """Train and return how it ended: ``finished``, ``target``, ``time`` or ``preempted``.

        ``resume`` is ``auto`` (continue where there is a usable checkpoint), ``never`` or ``must``. A stop
        request is obeyed at the next step boundary. During a validation it is obeyed before the next batch,
        and the continued run repeats that validation. An error saves the last whole update where it can.

        Raises Diverged after ``max_bad_updates`` non-finite updates in a row, if no update was ever finite,
        or after a collapse where ``on_collapse`` is ``stop``; RunError for ``must`` without a usable
        checkpoint; ConfigError for an ill-formed ``config.profile``; Preempted if a stop request came while
        one of several ranks waited for a data worker.
        """
        self.parts = Parts(
            task=task,
            data=data,
            optimizer=optimizer,
            schedule=schedule,
            average=average,
            precision=self.precision,
            progress=self.progress,
        )
        micro_batches = self.group.world.size * self.config.accumulate
        self._updates_per_epoch = data.micro_batches_per_epoch / micro_batches
        self.group.rank_status.at(0, "resume")
        self.saving.restore(self.parts, resume)
        self.parts.wrapped = self.group.wrap(task)
        self._started = time.perf_counter() - self.progress.wall_s
        try:
            with self.saving.rescued(self.parts):
                return self._train(self.parts)
        except Preempted:
            if self.group.world.size > 1:
                raise
            return "preempted"

    def _train(self, parts: Parts) -> str:
        """The loop, from where ``progress`` is; how it ended."""
        config, progress, world = self.config, self.progress, self.group.world
        profiler = StepProfiler(config.profile, self.run_dir)
        parts.task.train()

        self.group.rank_status.at(0, "warm-up")
        self._warm_up(parts)
        self.planning.start(parts, self._updates_per_epoch)
        save_every = config.save_every or math.inf
        batches = parts.data.train(world.rank, world.size, config.accumulate)
        status = self._catch_up(parts)
        interval = Interval()
        self._lap_start = time.perf_counter()
        while not status:
            step = progress.step + 1
            profiler.begin(step)
            parts.task.planned_updates = self.planning.length(progress.step)
            parts.task.advance(progress.step, seed_at(self.seed, RunStream.UPDATE_DRAWS, step))
            weight, healthy, stop, late = self._accumulate(parts, batches, step, interval=interval)
            self.group.rank_status.at(step, "update")
            rate = parts.schedule.rate(step)
            with self.saving.updating(parts):
                norm = self._step(parts, weight, healthy, rate=rate)
                progress.step = step
                progress.wall_s = self._wall_seconds()
            self.planning.correct(parts)
            status = self.planning.status(step, stop, late)
            profiler.end(step, final=bool(status))

            validate_due = self.validation.is_due(parts, status, self.planning.is_validation_step(step))
            save_due = bool(status) or step % save_every == 0
            log_due = step % config.log_every == 0 or validate_due or save_due
            self.recovery.count(self.update.outcomes(log_due), parts)
            if log_due:
                self._log(interval, rate, norm=norm)
                self.graphs.check(step)
                self.recovery.act_on(parts.task.watch(step, interval.sums.means()), step)
                interval = Interval()
            self._count_update(parts)
            if save_due or validate_due:
                self.saving.save(parts, is_last=bool(status))
                if validate_due:
                    status = self._validate(parts, status)
                # neither belongs to the training throughput
                interval.started = self._lap_start = time.perf_counter()
        if status != "preempted" and 0 < progress.step == progress.skipped_updates:
            raise Diverged(f"none of {progress.step} updates had a finite loss; nothing was learnt")
        return status

    def _accumulate(
        self, parts: Parts, batches: Iterator[Batch], step: int, interval: Interval
    ) -> tuple[Tensor, Tensor, bool, bool]:
        """Forward and backward of this rank's share of a global batch.

        Returns the global weight (), whether every loss was finite () bool, and what all ranks agree
        on: whether a stop was requested, whether the time is over.
        """
        world, accumulate, rank_status = self.group.world, self.config.accumulate, self.group.rank_status
        wrapped, progress = parts.wrapped, self.progress
        weights, finite = [], []
        parts.micro_batches = []
        for micro in range(accumulate):
            rank_status.at(step, "data")
            waiting = time.perf_counter()
            batch = next(batches)
            interval.waited_s += time.perf_counter() - waiting
            rank_status.at(step, "forward")
            # one address for each micro-batch of the run, whichever rank computes it
            address = (step, micro * world.size + world.rank)
            batch = parts.task.prepare(batch, seed_at(self.seed, RunStream.HOST_DRAWS, *address))
            parts.micro_batches.append(batch)
            parts.latest = batch
            moved = self.device.move(batch)
            torch.manual_seed(seed_at(self.seed, RunStream.DEVICE_DRAWS, *address))
            with nullcontext() if micro + 1 == accumulate else self.group.no_sync(wrapped):
                with self.policy.autocast(self.device.name):
                    loss: Loss = wrapped(moved)
                if not progress.backward_divisor:  # one host read in the life of a run: checkpoints hold it
                    size = max(1.0, float(self.group.sum(loss.weight.detach().clone())) * accumulate)
                    progress.backward_divisor = 2.0 ** round(math.log2(size))  # dividing by it is exact
                rank_status.at(step, "backward")
                self.precision.backward(scaled(loss.total, 1.0 / progress.backward_divisor))
            weights.append(loss.weight)
            finite.append(torch.isfinite(loss.total.detach()).to(torch.float32))
            interval.add(batch, loss)
            self.device.mark_step()
        rank_status.at(step, "all-reduce")
        skip = torch.stack(finite).sum() < accumulate
        late = self.planning.is_late()
        weight, stop, late, skip = self.group.all_reduce_status(
            torch.stack(weights).sum(), stop=self.stop_requested(), late=late, skip=skip
        )
        return weight, ~skip, stop, late

    def _step(
        self, parts: Parts, weight: Tensor, healthy: Tensor, rate: float, is_real: bool = True
    ) -> Tensor:
        """Update by a global batch of ``weight`` () if ``healthy`` () bool; return the gradients' norm ().

        With ``is_real`` False, as in the warm-up, the update is computed and not taken.
        """
        # a 1-element tensor: the lazy backend merges equal scalars, and a real step would be another graph
        healthy = healthy.to(weight.dtype) * self.device.tensor(torch.tensor([float(is_real)]))[0]
        # full_like: a Python number would turn this lazy scalar into fp64
        scale = torch.full_like(weight, self.progress.backward_divisor) / weight.clamp(min=1.0)
        norm = self.update(parts.trained, rate, scale, healthy=healthy)
        self.device.mark_step()
        return norm

    def _warm_up(self, parts: Parts) -> None:
        """Have a device that compiles graphs do so before the first update."""
        rate = parts.schedule.rate(self.progress.step + 1)

        def step(batch: Batch) -> None:
            parts.task.advance(self.progress.step, seed_at(self.seed, RunStream.UPDATE_DRAWS, 0))
            weight, healthy, _, _ = self._accumulate(parts, itertools.repeat(batch), 0, interval=Interval())
            self._step(parts, weight, healthy, rate=rate, is_real=False)

        self.graphs.warm_up(parts, step, lambda sets: self.validation.evaluate(parts, sets))
        self.update.outcomes(True)
        self.graphs.settle()

    def _catch_up(self, parts: Parts) -> str:
        """Make up for what the previous start missed; return the status before the first update."""
        progress = self.progress
        stop, late = self.stop_requested(), self.planning.is_late()
        status = self.planning.status(progress.step, self.group.any(stop), self.group.any(late))
        if progress.validated and progress.validated == progress.step and self.validation.reached(parts):
            status = "target"  # the previous start reached it, and was killed before it wrote its result
        if self.validation.is_due(parts, status, self.planning.is_validation_step(progress.step)):
            progress.wall_s = self._wall_seconds()
            status = self._validate(parts, status)
        elif status == "preempted" and not progress.step:  # stopped before the first update: save that, too
            self.saving.save(parts, is_last=True)
        return status

    def _validate(self, parts: Parts, status: str) -> str:
        """Validate; return the status, which a target, a stop request or a correction of the plan changes."""
        start_s = self.progress.wall_s
        outcome = self.validation.run(parts, status)
        self.progress.wall_s = self._wall_seconds()
        if outcome:  # this is the end, and the save before may have failed
            self.saving.save(parts, is_last=True)
        self.saving.note(parts, is_last=bool(status or outcome))
        if status or outcome:
            return outcome or status
        self.planning.add_validation(self._wall_seconds() - start_s)
        self.planning.correct(parts)
        return self.planning.status(self.progress.step, stop=False, late=False)

    def _count_update(self, parts: Parts) -> None:
        """Add the latest update to the progress. Log an event if it is the last one of an epoch."""
        progress, ranks = self.progress, self.group.world.size
        epoch, later_updates = divmod(progress.step, max(1, round(self._updates_per_epoch)))
        start_s, self._lap_start = self._lap_start, time.perf_counter()
        progress.train_s += self._lap_start - start_s
        progress.epochs += 1 / self._updates_per_epoch
        for batch in parts.micro_batches:
            progress.utterances += ranks * batch.utterances
            progress.audio_s += ranks * batch.seconds
        if not later_updates:
            seconds = progress.train_s - progress.epoch_start_s
            speed = (progress.utterances - progress.epoch_start_utterances) / max(1e-9, seconds)
            values = {"step": progress.step, "epoch": epoch, "seconds": seconds, "utterances_per_s": speed}
            self.tracker.log("epoch", values)
            progress.epoch_start_s = progress.train_s
            progress.epoch_start_utterances = progress.utterances

    def _log(self, interval: Interval, rate: float, norm: Tensor) -> None:
        self.group.rank_status.at(self.progress.step, "log")
        self.device.synchronize()  # the clock below measures finished work
        speed = interval.speed(self.group.world.size)
        interval.sums.reduce(self.group.sum)
        step = self.progress.step
        where = {"step": step, "steps": self.planning.updates, "epoch": step / self._updates_per_epoch}
        values = {**where, **interval.sums.means(), "lr": rate, "grad_norm": float(norm.cpu()), **speed}
        values |= {"memory_mib": self.device.memory() / 2**20, **self.device.counts()}
        self.tracker.log("train", values | {"eta_s": self.planning.eta_s(self.progress)})
