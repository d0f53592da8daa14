"""The shared trainer: one loop that every model, device and launcher uses.

The order of an update is: next batch, prepare, move, forward, backward, mark step, all-reduce of the status,
learning rate, unscale, clip, optimizer step, average. Then log, save and validate if they are due.

The status of a run is None while the run continues.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from speechtrain.batch import Batch
from speechtrain.checkpoint.whole import Checkpointer
from speechtrain.compute_policy import ComputePolicy, apply_policy, compile_module, scale_scalar
from speechtrain.counter_rng import RunStream, seed_at
from speechtrain.data.base import DataModule
from speechtrain.devices.base import Device
from speechtrain.distributed.group import Group, SingleProcess
from speechtrain.errors import Preempted
from speechtrain.optim.ema import Average, average_of
from speechtrain.optim.schedules import Schedule
from speechtrain.precision import FP32, Precision
from speechtrain.run_directory import Status
from speechtrain.task import Loss, Task, detached
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


class GlobalBatch(NamedTuple):
    """The state of a global batch after backward, on which all ranks agree."""

    weight: Tensor  # (), the sum of the loss weights
    is_finite: Tensor  # () bool, whether every loss is finite
    is_stop_requested: bool  # on any rank
    is_late: bool  # whether the time limit of the run is over on any rank


class DueWork(NamedTuple):
    """The work that must follow an update."""

    log: bool
    save: bool
    validate: bool


class Trainer:
    """Trains a task until a limit, a target or a stop request is reached.

    - ``config`` has the limits of the run and the settings of an update.
    - ``device`` is open.
    - ``run_dir`` is the folder for the files that the trainer writes, such as ``replay.safetensors``.
    - ``tracker`` receives the events of the run.
    - ``precision`` is fp32 by default.
    - ``group`` connects the ranks. By default this process trains alone.
    - ``checkpointer`` writes ``run_dir/checkpoints`` by default, and keeps ``config.keep`` checkpoints.
    - ``seed`` determines all random numbers of the updates.
    - ``policy`` has the kernels that the task already uses. By default, ``fit`` applies the default policy of
      the device and the precision to the task.
    - ``stop_requested`` says whether the run must end after the present update.
    """

    def __init__(
        self,
        config: TrainerConfig,
        device: Device,
        run_dir: str | Path,
        tracker: Tracker,
        precision: Precision | None = None,
        group: Group | None = None,
        checkpointer: Checkpointer | None = None,
        seed: int = 1,
        policy: ComputePolicy | None = None,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self.config, self.device, self.tracker = config, device, tracker
        self.run_dir = Path(run_dir)
        self.precision = precision or FP32()
        self.group = group or SingleProcess()
        self.checkpointer = checkpointer or Checkpointer(run_dir, config.keep)
        self.seed = seed
        self.policy = policy or device.policy(self.precision.dtype)
        self._applies_policy = policy is None
        self.stop_requested = stop_requested
        self.progress = Progress()
        self.parts: Parts | None = None  # the arguments of ``fit``
        update_class: type[Update] = HostCheckedUpdate
        graphs_class = Graphs
        if device.static_shapes:
            update_class, graphs_class = BranchFreeUpdate, WarmedUpGraphs
        self.update = update_class(self.precision, config.clip)
        self.graphs = graphs_class(device, tracker, config.max_graphs)
        self.recovery = Recovery(config, tracker, self.seed, run_dir=self.run_dir)
        self.validation = Validation(
            device,
            self.policy,
            self.group,
            tracker=tracker,
            target=config.target,
            stop_requested=self.stop_requested,
        )
        self.saving = Saving(self.group, self.checkpointer, tracker, config.on_save_error)
        # Values of ``time.perf_counter``: the time at which a run without interruptions would have started,
        # and the time from which the training time of the next update counts.
        self._start_clock, self._update_clock = 0.0, 0.0
        self._updates_per_epoch = 0.0
        planning_class = TimedPlanning if is_planned_by_time(config) else Planning
        self.planning = planning_class(
            config, device, self.group, tracker, self.run_dir, self._wall_seconds, self.validation.evaluate
        )

    def _wall_seconds(self) -> float:
        """Return the seconds of the run, which are the sum over its starts."""
        return time.perf_counter() - self._start_clock

    def fit(
        self,
        task: Task,
        data: DataModule,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        average: Average | None = None,
        checkpoint: int | None = None,
    ) -> Status:
        """Train and return how the run ended.

        ``average`` is evaluated and exported. By default it is the average of ``config.ema``.

        ``checkpoint`` is the step of the checkpoint from which the run continues. ``choose_checkpoint``
        returns it. None starts at step 0.

        - A stop request takes effect after the present update. During a validation it takes effect before the
          next batch, and the continued run repeats that validation.
        - After an error, the last complete update is saved if possible.

        Raises:
        - Diverged: ``max_bad_updates`` updates in a row were not finite, no update was ever finite, or
          training collapsed and ``on_collapse`` is ``stop``.
        - RunError: the checkpoint does not fit the run, or a rank cannot read it.
        - ConfigError: ``config.profile`` is ill-formed, or nothing ends the run.
        - Preempted: a stop request came while one of several ranks waited for a data worker.
        """
        self.config.require_end()
        if self._applies_policy:
            apply_policy(task, self.policy)
            compile_module(task, self.policy, len(data.shapes()))
        average = average or average_of(task, self.config.ema)
        self.parts = self.collect(task, data, optimizer, schedule, average)
        self.group.rank_status.begin_phase(0, "resume")
        if checkpoint is not None:
            self.saving.restore(self.parts, checkpoint)
        self.parts.wrapped = self.group.wrap(task)
        self._start_clock = time.perf_counter() - self.progress.wall_s
        try:
            with self.saving.save_after_error(self.parts):
                return self._train(self.parts)
        except Preempted:
            # Other ranks may still wait for this one, so only a single rank may end without an error.
            if self.group.world.size > 1:
                raise
            return Status.PREEMPTED

    def collect(
        self,
        task: Task,
        data: DataModule,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        average: Average,
    ) -> Parts:
        """Return the parts of a training, for ``run_update``. ``wrapped`` is not set yet."""
        micro_batches = self.group.world.size * self.config.accumulate
        self._updates_per_epoch = data.micro_batches_per_epoch / micro_batches
        return Parts(
            task=task,
            data=data,
            optimizer=optimizer,
            schedule=schedule,
            average=average,
            precision=self.precision,
            progress=self.progress,
        )

    def _train(self, parts: Parts) -> Status:
        """Train from the step of ``progress`` on. Return the status at the end."""
        progress = self.progress
        profiler = StepProfiler(self.config.profile, self.run_dir)
        batches, status = self._start(parts)
        interval = Interval()
        self._update_clock = time.perf_counter()
        while status is None:
            profiler.begin(progress.step + 1)
            interval, due, status = self.run_update(parts, batches, interval)
            profiler.end(progress.step, final=status is not None)
            if due.save or due.validate:
                status = self._save_and_validate(parts, status, due=due)
                # The time of checkpoints and validations does not count as training time.
                interval.start_clock = self._update_clock = time.perf_counter()
        if status is not Status.PREEMPTED:
            self.recovery.refuse_untrained(parts)
        return status

    def _start(self, parts: Parts) -> tuple[Iterator[Batch], Status | None]:
        """Do all work before the first update. Return the micro-batches of this rank, and the status."""
        world = self.group.world
        parts.task.train()
        self.group.rank_status.begin_phase(0, "warm-up")
        self._warm_up(parts)
        self.planning.start(parts, self._updates_per_epoch)
        batches = parts.data.train(world.rank, world.size, self.config.accumulate)
        return batches, self._catch_up(parts)

    def run_update(
        self, parts: Parts, batches: Iterator[Batch], interval: Interval
    ) -> tuple[Interval, DueWork, Status | None]:
        """Run the next update, and log a line if that is due.

        Return the interval of the next update, the work that is due, and the status.
        """
        rate, norm, status = self._apply_update(parts, batches, self.progress.step + 1, interval=interval)
        due = self._due_work(parts, status)
        # On a device with static shapes, the results are read only with a log line.
        self.recovery.count(self.update.results(due.log), parts)
        if due.log:
            self._log(interval, rate, norm=norm)
            self._check_interval(parts, interval)
            interval = Interval()
        self._count_update(parts)
        return interval, due, status

    def _apply_update(
        self, parts: Parts, batches: Iterator[Batch], step: int, interval: Interval
    ) -> tuple[float, Tensor, Status | None]:
        """Run update number ``step``, which is the next one, and correct the plan by its time.

        The losses of its micro-batches are added to ``interval``. Returns the learning rate, the norm () of
        the gradients before clipping, and the status.
        """
        progress = self.progress
        parts.task.planned_updates = self.planning.expected_updates(progress.step)
        parts.task.advance(progress.step, seed_at(self.seed, RunStream.UPDATE_SEED, step))
        batch = self._accumulate(parts, batches, step, interval=interval)
        self.group.rank_status.begin_phase(step, "update")
        rate = parts.schedule.rate(step)
        with self.saving.prevent_save_after_error(parts):
            norm = self._step(parts, batch, rate)
            parts.weight = batch.weight
            progress.step = step
            progress.wall_s = self._wall_seconds()
        self.planning.correct(parts)
        status = self.planning.status(step, batch.is_stop_requested, batch.is_late)
        return rate, norm, status

    def _due_work(self, parts: Parts, status: Status | None) -> DueWork:
        """Return the work that is due after the latest update. If the run ends here, all of it is due."""
        config, step = self.config, self.progress.step
        validate = self.validation.is_due(parts, status, self.planning.is_validation_step(step))
        is_save_step = config.save_every is not None and step % config.save_every == 0
        save = status is not None or is_save_step
        log = step % config.log_every == 0 or validate or save
        return DueWork(log, save, validate)

    def _accumulate(
        self, parts: Parts, batches: Iterator[Batch], step: int, interval: Interval
    ) -> GlobalBatch:
        """Compute the gradients of this rank's micro-batches. Return the global batch that they belong to."""
        world, accumulate = self.group.world, self.config.accumulate
        weights, finite_flags = [], []
        parts.micro_batches, parts.losses = [], []
        self.saving.begin_update()
        for index in range(accumulate):
            # The number of the micro-batch in the global batch addresses its random numbers. It does not
            # depend on the number of ranks, so neither do they.
            address = (step, index * world.size + world.rank)
            batch = self._next_batch(parts, batches, address, interval=interval)
            device_batch = self.device.move(batch)
            torch.manual_seed(seed_at(self.seed, RunStream.DEVICE_SEED, *address))
            is_last = index + 1 == accumulate
            loss = self._add_gradients(parts, device_batch, step, is_last=is_last)
            weights.append(loss.weight)
            finite_flags.append(torch.isfinite(loss.total.detach()).to(torch.float32))
            interval.add(batch, loss)
            if not self.device.static_shapes:  # There, each stored tensor would be an output of the graph.
                parts.losses.append((detached(loss.metrics), loss.rows))
            self.device.mark_step()
        self.group.rank_status.begin_phase(step, "all-reduce")
        return self._reduce_status(weights, finite_flags)

    def _next_batch(
        self, parts: Parts, batches: Iterator[Batch], address: tuple[int, int], interval: Interval
    ) -> Batch:
        """Return the next micro-batch, on the host and prepared by the task.

        ``address`` is the step and the number of the micro-batch in the global batch. It seeds the random
        numbers of the task.
        """
        step = address[0]
        self.group.rank_status.begin_phase(step, "data")
        wait_start = time.perf_counter()
        batch = next(batches)
        interval.data_wait_s += time.perf_counter() - wait_start
        self.group.rank_status.begin_phase(step, "forward")
        batch = parts.task.prepare(batch, seed_at(self.seed, RunStream.HOST_SEED, *address))
        parts.micro_batches.append(batch)
        parts.latest = batch
        return batch

    def _add_gradients(self, parts: Parts, batch: Batch, step: int, is_last: bool) -> Loss:
        """Run forward and backward of a micro-batch on the device, which adds to the gradients.

        With ``is_last``, the ranks also sum their gradients.
        """
        progress = self.progress
        synchronisation = nullcontext() if is_last else self.group.no_sync(parts.wrapped)
        with synchronisation:
            with self.policy.autocast(self.device.name):
                loss: Loss = parts.wrapped(batch)
            if not progress.backward_divisor:
                # The host reads the weight only once in a run, because checkpoints contain the divisor.
                weight = float(self.group.sum(loss.weight.detach().clone()))
                update_weight = max(1.0, weight * self.config.accumulate)
                # Division by a power of two is exact.
                progress.backward_divisor = 2.0 ** round(math.log2(update_weight))
            self.group.rank_status.begin_phase(step, "backward")
            self.precision.backward(scale_scalar(loss.total, 1.0 / progress.backward_divisor))
        return loss

    def _reduce_status(self, weights: list[Tensor], finite_flags: list[Tensor]) -> GlobalBatch:
        """Return the global batch from this rank's micro-batches, by a reduction over the ranks.

        ``weights`` has the loss weight () of each micro-batch. ``finite_flags`` has 1 () for a finite loss,
        else 0.
        """
        skip = torch.stack(finite_flags).sum() < self.config.accumulate
        late = self.planning.is_late()
        weight, stop, late, skip = self.group.all_reduce_status(
            torch.stack(weights).sum(), stop=self.stop_requested(), late=late, skip=skip
        )
        return GlobalBatch(weight, ~skip, is_stop_requested=stop, is_late=late)

    def _step(self, parts: Parts, batch: GlobalBatch, rate: float, is_applied: bool = True) -> Tensor:
        """Update by a global batch if its losses are finite and it has a usable recording on any rank.

        Return the norm () of its gradients.

        With ``is_applied`` False, as in the warm-up, the update is computed but not applied.
        """
        weight = batch.weight
        healthy = batch.is_finite.to(weight.dtype) * weight.bool().to(weight.dtype)
        if self.device.static_shapes:
            healthy = healthy * self._flag(is_applied)
        # ``full_like`` is needed, because a Python number would turn this lazy scalar into fp64.
        scale = torch.full_like(weight, self.progress.backward_divisor) / weight.clamp(min=1.0)
        norm = self.update(parts.trained, rate, scale, healthy=healthy)
        self.device.mark_step()
        return norm

    def _flag(self, flag: bool) -> Tensor:
        """Return 1 or 0 () on the device.

        It is an element of a tensor, because the lazy backend merges equal scalars, so that the warm-up and a
        real step would have different graphs.
        """
        return self.device.tensor(torch.tensor([float(flag)]))[0]

    def _warm_up(self, parts: Parts) -> None:
        """Compile the graphs before the first update, on a device that compiles graphs."""
        rate = parts.schedule.rate(self.progress.step + 1)

        def run_step(padding: Batch) -> None:
            parts.task.advance(self.progress.step, seed_at(self.seed, RunStream.UPDATE_SEED, 0))
            batch = self._accumulate(parts, itertools.repeat(padding), 0, interval=Interval())
            self._step(parts, batch, rate, is_applied=False)

        def evaluate(sets: dict[str, Iterable[Batch]]) -> None:
            self.validation.evaluate(parts, sets)

        self.graphs.warm_up(parts, run_step, evaluate)
        self.update.results(True)  # The results of the warm-up are discarded.
        self.graphs.settle()

    def _catch_up(self, parts: Parts) -> Status | None:
        """Do the validation or the save that the previous start left undone. Return the status.

        A stop request, or the time limit, may end the run before its first update.
        """
        progress = self.progress
        step = progress.step
        stop, late = self.stop_requested(), self.planning.is_late()
        status = self.planning.status(step, self.group.any(stop), self.group.any(late))
        is_validated = progress.validated and progress.validated == step
        if is_validated and self.validation.is_target_reached(parts):
            # The previous start reached the target, and was killed before it wrote its result.
            status = Status.TARGET
        if self.validation.is_due(parts, status, self.planning.is_validation_step(step)):
            progress.wall_s = self._wall_seconds()
            status = self._validate(parts, status)
        elif status is Status.PREEMPTED and not step:
            # A run that is stopped before its first update needs a checkpoint to continue from.
            self.saving.save(parts, is_last=True)
        return status

    def _save_and_validate(self, parts: Parts, status: Status | None, due: DueWork) -> Status | None:
        """Save a checkpoint, and validate if that is due. Return the status.

        A checkpoint is also saved if only a validation is due, so that an error in it loses no update.
        """
        self.saving.save(parts, is_last=status is not None)
        if due.validate:
            return self._validate(parts, status)
        return status

    def _validate(self, parts: Parts, status: Status | None) -> Status | None:
        """Validate. Return the new status.

        It differs from ``status`` if the target is reached, if a stop is requested, or if the corrected plan
        ends here.
        """
        start_s = self.progress.wall_s
        validation_status = self.validation.run(parts, status)
        self.progress.wall_s = self._wall_seconds()
        if validation_status is not None:
            # The run ends here, and the save before the validation may have failed.
            self.saving.save(parts, is_last=True)
            status = validation_status
        self.saving.add_validation(parts, is_last=status is not None)
        if status is not None:
            return status
        self.planning.add_validation(self._wall_seconds() - start_s)
        self.planning.correct(parts)
        return self.planning.status(self.progress.step, stop=False, late=False)

    def _check_interval(self, parts: Parts, interval: Interval) -> None:
        """Check the graph compilations, and the metrics since the last log line.

        Raises RunError for too many graphs, and Diverged for a collapse.
        """
        step = self.progress.step
        self.graphs.check(step)
        alarm = parts.task.watch(step, interval.sums.means())
        self.recovery.handle_alarm(alarm, step)

    def _count_update(self, parts: Parts) -> None:
        """Add the latest update to the progress. Log an event if the update is the last one of an epoch.

        Utterances and seconds of audio are estimates: this rank's counts times the number of ranks.
        """
        progress, ranks = self.progress, self.group.world.size
        clock = time.perf_counter()
        progress.train_s += clock - self._update_clock
        self._update_clock = clock
        progress.epochs += 1 / self._updates_per_epoch
        for batch in parts.micro_batches:
            progress.utterances += ranks * batch.utterances
            progress.audio_s += ranks * batch.seconds
        epoch, updates_in_epoch = divmod(progress.step, max(1, round(self._updates_per_epoch)))
        if updates_in_epoch == 0:
            seconds = progress.train_s - progress.epoch_start_s
            speed = (progress.utterances - progress.epoch_start_utterances) / max(1e-9, seconds)
            values = {"step": progress.step, "epoch": epoch, "seconds": seconds, "utterances_per_s": speed}
            self.tracker.log("epoch", values)
            progress.epoch_start_s = progress.train_s
            progress.epoch_start_utterances = progress.utterances

    def _log(self, interval: Interval, rate: float, norm: Tensor) -> None:
        """Log the metrics of ``interval``, the learning rate and the norm () of the latest gradients."""
        self.group.rank_status.begin_phase(self.progress.step, "log")
        self.device.synchronize()  # The speed below counts finished work.
        speed = interval.speed(self.group.world.size)
        interval.sums.reduce(self.group.sum)
        step = self.progress.step
        values = {"step": step, "steps": self.planning.updates, "epoch": step / self._updates_per_epoch}
        values |= {**interval.sums.means(), "lr": rate, "grad_norm": float(norm.cpu()), **speed}
        values |= {"memory_mib": self.device.memory() / 2**20, **self.device.counts()}
        values["eta_s"] = self.planning.eta_s(self.progress)
        self.tracker.log("train", values)
