"""The shared trainer: one loop that every model, device and launcher uses.

The order of an update is: next batch, prepare, move, forward, backward, mark step, all-reduce of the status,
learning rate, unscale, clip, optimizer step, average. Then log, save and validate if they are due.

The status of a run is None while the run continues.

All parts of a run read one ``Progress``. Each field has one place that changes it:

- ``run_update``: the step and the seconds of the run, which ``_validate`` and a plan by time also renew.
- ``accumulate``: the divisor, once in a run.
- ``_count_result`` and ``_count_update``: the other counts.
- ``_log_epoch``: where the epoch began.
- ``Validation.run``: the metrics and their step.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from speechtrain.batch import Batch
from speechtrain.checkpoint.checkpointer import Checkpointer
from speechtrain.compute_policy import ComputePolicy, apply_policy, compile_module, scale_scalar
from speechtrain.counter_rng import RunStream, seed_at
from speechtrain.data.base import DataModule
from speechtrain.devices.base import Device
from speechtrain.distributed.group import Group, SingleProcess
from speechtrain.errors import Diverged, Preempted, RunError
from speechtrain.metrics import MetricSums
from speechtrain.optim.ema import Average, average_of
from speechtrain.optim.optimizer_step import LossDetails, UpdateResult
from speechtrain.optim.schedules import Schedule
from speechtrain.precision import FP32, Precision
from speechtrain.run_directory import Status
from speechtrain.task import Loss, Task
from speechtrain.tracking.base import Tracker
from speechtrain.trainer_config import TrainerConfig, is_planned_by_time, profile_steps
from speechtrain.training.graph_warmup import compile_graphs
from speechtrain.training.profiling import start_profile, write_profile
from speechtrain.training.run_state import GlobalBatch, Parts, Progress, UpdateRecord
from speechtrain.training.saving import Saving
from speechtrain.training.skipped_updates import bad_updates_error, fault_of, refuse_untrained
from speechtrain.training.time_budget import Planning, TimedPlanning
from speechtrain.training.validation import Validation


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
    - ``policy`` has the kernels that the task already uses. Without it, ``fit`` applies the default policy of
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
        self._task_has_policy = policy is not None
        self.stop_requested = stop_requested
        self.progress = Progress()  # ``Parts.progress`` is the same object
        self.latest_batch: Batch | None = None  # of training or evaluation. Messages of errors describe it
        self.update = device.update(self.precision, config.clip)  # changes the weights by the gradients
        self.validation = Validation(
            device,
            self.policy,
            self.group,
            tracker=tracker,
            target=config.target,
            stop_requested=self.stop_requested,
            record_latest=self._record_latest,
        )
        self.saving = Saving(self.group, self.checkpointer, tracker, config.on_save_error)
        planning_class = TimedPlanning if is_planned_by_time(config) else Planning
        self.planning = planning_class(
            config,
            device,
            self.group,
            tracker,
            run_dir=self.run_dir,
            wall_seconds=self._wall_seconds,
            evaluate=self.validation.evaluate,
        )
        self._earlier_s = 0.0  # the seconds of the earlier starts of the run
        self._start_s = time.perf_counter()  # when this start began, by the clock of the process

    def _wall_seconds(self) -> float:
        """Return the seconds of the run: of its earlier starts, and of this one. There is no other clock."""
        return self._earlier_s + time.perf_counter() - self._start_s

    def _record_latest(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield each of ``batches``, and make it the latest batch before."""
        for batch in batches:
            self.latest_batch = batch
            yield batch

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
        - DataError: the data module cannot read its recordings, or the last of ``max_bad_updates`` skipped
          updates in a row, or of a run that skipped all of its updates, had no usable recording.
        - MachineError: a checkpoint cannot be written, and ``on_save_error`` is ``stop`` or the run ends.
        - RunError: the checkpoint does not fit the run, a rank cannot read it, or more than ``max_graphs``
          graphs are compiled.
        - ConfigError: ``config.profile`` is ill-formed, or nothing ends the run.
        - Preempted: a stop request came while one of several ranks waited for a data worker.
        """
        config, progress, world = self.config, self.progress, self.group.world
        config.require_end()
        first_profiled, last_profiled = profile_steps(config.profile)
        if not self._task_has_policy:
            apply_policy(task, self.policy)
            compile_module(task, self.policy, len(data.shapes()))
        parts = Parts(
            task=task,
            data=data,
            optimizer=optimizer,
            schedule=schedule,
            average=average or average_of(task, config.ema),
            precision=self.precision,
            progress=progress,
            updates_per_epoch=data.micro_batches_per_epoch / (world.size * config.accumulate),
        )

        self.group.rank_status.begin_phase(0, "resume")
        if checkpoint is not None:
            self.saving.restore(parts, checkpoint)
        wrapped = self.group.wrap(task)
        self._earlier_s = progress.wall_s
        self._start_s = time.perf_counter()
        try:
            with self.saving.save_after_error(parts):
                task.train()
                self.group.rank_status.begin_phase(0, "warm-up")
                self._warm_up(parts, wrapped)
                graphs = self.device.graphs()
                self.planning.start(parts)
                batches = self._record_latest(data.train(world.rank, world.size, config.accumulate))
                status = self._catch_up(parts)

                record = None  # of the latest update of this start
                profile = None
                sums = MetricSums()  # the metrics since the last log line
                last_logged = replace(progress)  # a copy of the progress at the last log line
                update_start_s = self._wall_seconds()
                while status is None:
                    if progress.step + 1 == first_profiled:
                        profile = start_profile()
                    record = self.run_update(parts, wrapped, batches)
                    batch = record.batch
                    step = progress.step

                    # 1. Decide what follows the update. At the end of the run, all of it does.
                    status = self.planning.status(step, batch.is_stop_requested, batch.is_late)
                    is_validation_step = self.planning.is_validation_step(step)
                    is_validation_due = self.validation.is_due(parts, status, is_validation_step)
                    is_save_step = config.save_every is not None and step % config.save_every == 0
                    is_save_due = is_validation_due or is_save_step or status is not None
                    is_log_due = is_save_due or step % config.log_every == 0

                    # 2. Count the update. This raises after too many skipped updates. On a device with static
                    # shapes, the results are read only with a log line.
                    for result in self.update.results(is_log_due):
                        self._count_result(result, batch)
                    if is_log_due:
                        self.group.rank_status.begin_phase(step, "log")
                        self.device.synchronize()  # The time of an update includes all of its work.
                    update_end_s = self._wall_seconds()
                    self._count_update(parts, batch, update_end_s - update_start_s)
                    update_start_s = update_end_s
                    sums.merge(batch.sums)

                    # 3. Log. This raises after a collapse, so the collapsed weights are not saved below.
                    if is_log_due:
                        self.log(parts, record, sums, since=last_logged)
                        graphs = self._check_graphs(graphs)
                        self._check_collapse(task, sums.means())
                        sums = MetricSums()
                        last_logged = replace(progress)
                    self._log_epoch(parts)
                    is_profile_complete = step >= last_profiled or status is not None
                    if profile is not None and is_profile_complete:
                        name = f"profile-{first_profiled}-{last_profiled}.json"
                        write_profile(profile, self.run_dir / name)
                        profile = None

                    # 4. Save, then validate, so that an error in the validation loses no update.
                    if is_save_due:
                        self.saving.save(parts, is_last=status is not None)
                    if is_validation_due:
                        status = self._validate(parts, status)
                    if is_save_due:
                        # The time of checkpoints and validations does not count as training time.
                        update_start_s = self._wall_seconds()
        except Preempted:
            # A stop request came while this rank waited for a data worker. Other ranks may still wait for
            # this one, so only a single rank may end without an error.
            if world.size > 1:
                raise
            return Status.PREEMPTED
        if status is not Status.PREEMPTED:
            refuse_untrained(progress, record)
        return status

    def run_update(self, parts: Parts, wrapped: nn.Module, batches: Iterator[Batch]) -> UpdateRecord:
        """Run the next update, and correct the plan of the run by its time.

        ``wrapped`` is the task in the wrapper of the group, such as DDP.
        """
        progress = self.progress
        completed = progress.step
        step = completed + 1
        # A task may plan by these numbers, for example the updates after which its encoder is trained.
        parts.task.planned_updates = self.planning.expected_updates(completed)
        parts.task.advance(completed, seed_at(self.seed, RunStream.UPDATE_SEED, step))
        batch = self.accumulate(parts.task, wrapped, batches, step)
        self.group.rank_status.begin_phase(step, "update")
        rate = parts.schedule.rate(step)
        with self.saving.without_save_after_error(parts):
            norm = self.update(parts.trained, rate, batch.scale, batch.healthy)
            self.device.mark_step()
            progress.step = step
            progress.wall_s = self._wall_seconds()
        self.planning.correct(parts)
        return UpdateRecord(batch, rate, norm)

    def accumulate(self, task: Task, wrapped: nn.Module, batches: Iterator[Batch], step: int) -> GlobalBatch:
        """Compute the gradients of this rank's micro-batches. Return the global batch of all ranks."""
        progress, world = self.progress, self.group.world
        begin_phase = self.group.rank_status.begin_phase
        micro_batches: list[Batch] = []
        loss_details: list[LossDetails] = []
        weights = []
        finite_losses = []  # for each micro-batch: () 1 if its loss is finite, else 0
        sums = MetricSums()
        data_wait_s = 0.0
        self.saving.begin_update()
        for index in range(self.config.accumulate):
            # The random numbers of a micro-batch have its number in the global batch as their address. So
            # they do not depend on the number of ranks.
            address = (step, index * world.size + world.rank)
            begin_phase(step, "data")
            wait_start_s = self._wall_seconds()
            batch = next(batches)
            data_wait_s += self._wall_seconds() - wait_start_s

            begin_phase(step, "forward")
            batch = task.prepare(batch, seed_at(self.seed, RunStream.HOST_SEED, *address))
            micro_batches.append(batch)
            device_batch = self.device.move(batch)
            torch.manual_seed(seed_at(self.seed, RunStream.DEVICE_SEED, *address))
            # In the backward of the last micro-batch, the ranks also sum their gradients.
            is_last = index + 1 == self.config.accumulate
            with nullcontext() if is_last else self.group.no_sync(wrapped):
                with self.policy.autocast(self.device.name):
                    loss: Loss = wrapped(device_batch)
                if not progress.backward_divisor:  # only in the first update of a run
                    progress.backward_divisor = self._choose_divisor(loss)
                begin_phase(step, "backward")
                self.precision.backward(scale_scalar(loss.total, 1.0 / progress.backward_divisor))

            weights.append(loss.weight)
            finite_losses.append(torch.isfinite(loss.total.detach()).to(torch.float32))
            sums.add({"loss": (loss.total.detach(), loss.weight), **loss.metrics})
            loss_details += self.update.loss_details(loss)
            self.device.mark_step()

        begin_phase(step, "all-reduce")
        rank_weight = torch.stack(weights).sum()
        has_nonfinite_loss = torch.stack(finite_losses).sum() < self.config.accumulate
        global_status = self.group.all_reduce_status(
            rank_weight, stop=self.stop_requested(), late=self.planning.is_late(), skip=has_nonfinite_loss
        )
        weight = global_status.weight
        # An update needs finite losses on all ranks, and a usable recording on any rank.
        healthy = (~global_status.skip).to(weight.dtype) * weight.bool().to(weight.dtype)
        # ``full_like`` is needed, because a Python number would turn this lazy scalar into fp64.
        scale = torch.full_like(weight, progress.backward_divisor) / weight.clamp(min=1.0)
        return GlobalBatch(
            micro_batches=micro_batches,
            loss_details=loss_details,
            sums=sums,
            data_wait_s=data_wait_s,
            weight=weight,
            scale=scale,
            healthy=healthy,
            is_stop_requested=global_status.stop,
            is_late=global_status.late,
        )

    def _choose_divisor(self, loss: Loss) -> float:
        """Return the divisor of all losses before backward, from the first micro-batch of the run.

        It is about the weight of an update. The host reads the weight from the device here, only once in a
        run, because checkpoints contain the divisor.
        """
        micro_batch_weight = float(self.group.sum(loss.weight.detach().clone()))
        update_weight = max(1.0, micro_batch_weight * self.config.accumulate)
        return 2.0 ** round(math.log2(update_weight))  # Division by a power of two is exact.

    def _warm_up(self, parts: Parts, wrapped: nn.Module) -> None:
        """Compile the graphs before the first update, on a device that compiles them in advance."""
        rate = parts.schedule.rate(self.progress.step + 1)

        def run_step(padding: Batch) -> object:
            parts.task.advance(self.progress.step, seed_at(self.seed, RunStream.UPDATE_SEED, 0))
            batch = self.accumulate(parts.task, wrapped, itertools.repeat(padding), 0)
            norm = self.update.rehearse(parts.trained, rate, batch.scale, batch.healthy)
            self.device.mark_step()
            return norm  # What is alive at ``mark_step`` is an output of the graph, as in an update.

        def evaluate(sets: dict[str, Iterable[Batch]]) -> object:
            return self.validation.evaluate(parts, sets)

        def rehearse() -> None:
            compile_graphs(parts, self.device, self.tracker, run_step, evaluate)

        self.device.warm_up(rehearse)
        self.update.results(True)  # The results of the warm-up are discarded.

    def _catch_up(self, parts: Parts) -> Status | None:
        """Do the validation or the save that the previous start left undone. Return the status.

        A stop request, or the time limit, may end the run before its first update.
        """
        progress = self.progress
        step = progress.step
        stop, late = self.stop_requested(), self.planning.is_late()
        status = self.planning.status(step, self.group.any(stop), self.group.any(late))
        is_validated = step > 0 and progress.validated == step
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

    def _validate(self, parts: Parts, status: Status | None) -> Status | None:
        """Validate. Return the new status.

        It differs from ``status`` if the target is reached, if a stop is requested, or if the corrected plan
        ends here.
        """
        update_end_s = self.progress.wall_s
        validation_status = self.validation.run(parts, status)
        self.progress.wall_s = self._wall_seconds()
        if validation_status is not None:
            # The run ends here. This does nothing if the save before the validation has succeeded.
            self.saving.save(parts, is_last=True)
            status = validation_status
        self.saving.add_validation(parts, is_last=status is not None)
        if status is not None:
            return status
        # The save before the validation belongs to the time of the validation.
        self.planning.record_validation(self._wall_seconds() - update_end_s)
        self.planning.correct(parts)
        return self.planning.status(self.progress.step, stop=False, late=False)

    def _count_result(self, result: UpdateResult, batch: GlobalBatch) -> None:
        """Count the result of an update. ``batch`` is the latest one. All ranks do this alike.

        Raises Diverged after ``max_bad_updates`` non-finite updates in a row, and DataError if the last one
        had no usable recording.
        """
        progress = self.progress
        if result is UpdateResult.APPLIED:
            progress.bad_updates = 0
        elif result is UpdateResult.SCALE_LOWERED:
            progress.scale_skips += 1  # The recipe is not at fault, so this does not count as a bad update.
        else:
            progress.bad_updates += 1
            progress.skipped_updates += 1
            message = f"update {progress.step} skipped: {fault_of(batch)}"
            self.tracker.log("warning", {"step": progress.step, "message": message})
            if progress.bad_updates >= self.config.max_bad_updates:
                raise bad_updates_error(self.config, progress, batch, self.run_dir, self.seed)

    def _count_update(self, parts: Parts, batch: GlobalBatch, seconds: float) -> None:
        """Add an update of ``seconds`` to the progress.

        Utterances and seconds of audio are estimates: this rank's counts times the number of ranks. The
        earlier starts of a run may have had other numbers of updates in an epoch, so ``epochs`` is a sum.
        """
        progress, ranks = self.progress, self.group.world.size
        progress.train_s += seconds
        progress.data_wait_s += batch.data_wait_s
        progress.epochs += 1 / parts.updates_per_epoch
        for micro_batch in batch.micro_batches:
            progress.utterances += ranks * micro_batch.utterances
            progress.audio_s += ranks * micro_batch.seconds

    def log(self, parts: Parts, update: UpdateRecord, sums: MetricSums, since: Progress) -> None:
        """Log the metrics ``sums`` and the speed since the progress ``since``, after the latest update.

        The throughput is this rank's times the number of ranks. ``data_wait`` is the fraction of the time
        that this rank waited for data. ``epoch`` is a fraction, by the updates of an epoch in this start.
        """
        progress = self.progress
        seconds = max(1e-9, progress.train_s - since.train_s)
        sums.reduce(self.group.sum)
        step = progress.step
        values = {"step": step, "steps": self.planning.updates, "epoch": step / parts.updates_per_epoch}
        values |= {**sums.means(), "lr": update.rate, "grad_norm": float(update.norm.cpu())}
        values["seconds"] = seconds
        values["utterances_per_s"] = (progress.utterances - since.utterances) / seconds
        values["audio_s_per_s"] = (progress.audio_s - since.audio_s) / seconds
        values["data_wait"] = (progress.data_wait_s - since.data_wait_s) / seconds
        values |= {"memory_mib": self.device.memory() / 2**20, **self.device.counts()}
        values["eta_s"] = self.planning.eta_s(progress)
        self.tracker.log("train", values)

    def _log_epoch(self, parts: Parts) -> None:
        """Log an event if the latest update is the last one of an epoch.

        An event needs whole updates, so the updates of an epoch are rounded here.
        """
        progress = self.progress
        epoch, updates_in_next = divmod(progress.step, max(1, round(parts.updates_per_epoch)))
        if updates_in_next > 0:
            return
        seconds = progress.train_s - progress.epoch_start_s
        speed = (progress.utterances - progress.epoch_start_utterances) / max(1e-9, seconds)
        values = {"step": progress.step, "epoch": epoch, "seconds": seconds, "utterances_per_s": speed}
        self.tracker.log("epoch", values)
        progress.epoch_start_s = progress.train_s
        progress.epoch_start_utterances = progress.utterances

    def _check_graphs(self, known_graphs: int) -> int:
        """Return the number of compiled graphs, and warn if it is above ``known_graphs``.

        Raises RunError if the run has more graphs than ``trainer.max_graphs``.
        """
        graphs, limit, step = self.device.graphs(), self.config.max_graphs, self.progress.step
        if limit is not None and graphs > limit:
            raise RunError(f"{graphs} graphs compiled by step {step}, more than trainer.max_graphs={limit}")
        if graphs > known_graphs:
            message = f"{graphs - known_graphs} more graphs compiled after the warm-up"
            self.tracker.log("warning", {"step": step, "message": message})
        return graphs

    def _check_collapse(self, task: Task, means: Mapping[str, float]) -> None:
        """Log an alarm of the task about ``means``. Raises Diverged if ``on_collapse`` is ``stop``."""
        step = self.progress.step
        alarm = task.watch(step, means)
        if alarm is None:
            return
        self.tracker.log("warning", {"step": step, "message": alarm.message})
        if self.config.on_collapse == "stop":
            raise Diverged(f"{alarm.message} (seen since step {alarm.onset}, trainer.on_collapse=stop)")
