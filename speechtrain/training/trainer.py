"""The shared trainer: one loop that every model, device and launcher goes through.

It reads in the order of time: next batch, forward, backward, mark, agree, scale, clip, step, mark,
schedule, average, log when due, validate when due, save when due.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speechtrain.batch import Batch
from speechtrain.checkpoint.whole import Checkpointer, Stateful, on_host
from speechtrain.compute_policy import times
from speechtrain.counter_rng import seed_at
from speechtrain.data.base import DataModule
from speechtrain.devices.base import Device
from speechtrain.distributed.group import Group
from speechtrain.errors import Diverged, MachineError, RunError
from speechtrain.metrics import MetricSums
from speechtrain.optim.ema import Average
from speechtrain.optim.schedules import Schedule
from speechtrain.precision import Precision
from speechtrain.task import Alarm, Loss, Task
from speechtrain.tracking.base import Tracker
from speechtrain.trainer_config import TrainerConfig
from speechtrain.training.evaluation import Interrupted, Outcome, evaluate
from speechtrain.training.graph_warmup import padding_batch, without_side_effects
from speechtrain.training.optimizer_step import BranchFreeUpdate, HostCheckedUpdate, StepOutcome, Update
from speechtrain.training.profiling import StepProfiler

# stream numbers in the addresses drawn here
_DEVICE_DRAWS, _HOST_DRAWS, _UPDATE_DRAWS = 1, 7, 8
_RENAMED = {"nominal": "backward_divisor"}
"""Fields of ``Progress`` under the names that 0.1.0 saved them by."""


@dataclass
class Progress:
    """Where a run stands; part of every checkpoint."""

    step: int = 0
    wall_s: float = 0.0
    backward_divisor: float = 0.0  # the constant that backward's loss is divided by, a power of two
    bad_updates: int = 0  # non-finite ones in a row
    skipped_updates: int = 0  # non-finite ones in all
    scale_skips: int = 0  # updates left out to lower fp16's loss scale
    validated: int = 0  # step of the latest whole validation
    metrics: dict[str, float] = field(default_factory=dict)  # of the latest validation
    rate_factor: float = 1.0  # on the schedule's learning rate; runs of 0.1.0 may hold another one

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        names = {name: _RENAMED.get(name, name) for name in state}
        vars(self).update({now: state[name] for name, now in names.items() if hasattr(self, now)})


@dataclass
class Interval:
    """What happened since the last log line; sums stay on the device until a line is due."""

    sums: MetricSums = field(default_factory=MetricSums)
    utterances: int = 0
    audio_s: float = 0.0
    waited_s: float = 0.0
    begun: float = field(default_factory=time.perf_counter)
    steps: int = 0

    def add(self, batch: Batch, loss: Loss) -> None:
        self.sums.add({"loss": (loss.total.detach(), loss.weight), **loss.metrics})
        self.utterances += batch.utterances
        self.audio_s += batch.seconds


class Trainer:
    """Trains a task until a limit, a target or a stop request is reached."""

    def __init__(
        self,
        config: TrainerConfig,
        device: Device,
        precision: Precision,
        group: Group,
        checkpointer: Checkpointer,
        tracker: Tracker,
        seed: int,
        run_dir: Path,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self.config = config
        self.device = device
        self.precision = precision
        self.group = group
        self.checkpointer = checkpointer
        self.tracker = tracker
        self.seed = seed
        self.run_dir = run_dir
        self.stop_requested = stop_requested
        self.progress = Progress()
        self.update: Update = (BranchFreeUpdate if device.static_shapes else HostCheckedUpdate)(
            precision, config.clip
        )
        self._graphs = 0  # compiled by the end of the warm-up
        self._began = 0.0  # when the run would have begun, had it never been away
        self.latest: Batch | None = None
        """The batch that was begun last, in training or evaluation, as it is on the host."""
        self._micro_batches: list[Batch] = []  # of the current step, for the replay bundle

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

        ``self.progress`` then holds the steps done, the wall time and the latest metrics. ``resume``
        is ``auto`` (continue where there is a sound checkpoint), ``never`` or ``must``. A stop
        request is obeyed at the next step boundary, or before the next batch of a validation, which
        the continued run makes up for.

        Raises Diverged after ``max_bad_updates`` non-finite updates in a row, or a collapse that the
        task has seen and ``on_collapse`` does not forgive; RunError for ``must`` without a sound
        checkpoint; ConfigError for an ill-formed ``config.profile``.
        """
        states: dict[str, Stateful] = {
            "task": task,
            "optimizer": optimizer,
            "average": average,
            "schedule": schedule,
            "data": data,
            "precision": self.precision,
            "progress": self.progress,
        }
        found = None
        self.group.rank_status.at(0, "resume")
        if resume != "never":
            with self.group.main_process_first():  # it sets damaged ones aside
                found = self.checkpointer.restore(states)
        if found is not None:
            self.tracker.log("resume", {"step": found})
        elif resume == "must":
            raise RunError(f"resume=must, but {self.checkpointer.root} holds no sound checkpoint")
        wrapped = self.group.wrap(task)
        self._began = time.perf_counter() - self.progress.wall_s
        return self._train(task, wrapped, data, optimizer, schedule, average, states)

    def _train(
        self,
        task: Task,
        wrapped: torch.nn.Module,
        data: DataModule,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        average: Average,
        states: dict[str, Stateful],
    ) -> str:
        """The loop, from where ``progress`` stands; how it ended."""
        profiler = StepProfiler(self.config.profile, self.run_dir)
        world = self.group.world
        per_step = world.size * self.config.accumulate
        per_epoch = data.micro_batches_per_epoch / per_step
        planned = planned_steps(self.config, per_epoch)
        validate_every = self.config.validate_every or max(1, round(per_epoch))
        save_every = self.config.save_every or validate_every
        batches = data.train(world.rank, world.size, self.config.accumulate)
        task.train()

        self.group.rank_status.at(0, "warm-up")
        if self.device.static_shapes:
            self._warm_up(
                task, wrapped, data, optimizer, average, schedule.rate(self.progress.step + 1), states
            )
        progress, interval = self.progress, Interval()
        status = self._catch_up(planned, validate_every, task, data, average, states)
        while not status:
            step = progress.step + 1
            profiler.begin(step)
            task.advance(progress.step, seed_at(self.seed, _UPDATE_DRAWS, step))
            weight, healthy, stop, late = self._accumulate(task, wrapped, batches, step, interval)
            self.group.rank_status.at(step, "update")
            rate = schedule.rate(step) * progress.rate_factor
            norm = self._step(task, optimizer, average, weight, healthy, rate)
            progress.step = step
            progress.wall_s = time.perf_counter() - self._began
            interval.steps += 1
            status = self._status(planned, stop, late)
            profiler.end(step, final=bool(status))

            validate_due = self._owes_validation(status, validate_every)
            save_due = bool(status) or step % save_every == 0
            log_due = step % self.config.log_every == 0 or validate_due or save_due
            for outcome in self.update.outcomes(log_due):
                self._count(outcome)
            if log_due:
                self._log(interval, step / per_epoch, rate, norm, planned)
                self._check_graphs()
                self._heed(task.watch(step, interval.sums.means()))
                interval = Interval()
            if validate_due:
                status = self._validate(task, data, average) or status
                progress.wall_s = time.perf_counter() - self._began
            if save_due or validate_due:
                self._save(states, task, average)
                interval.begun = time.perf_counter()  # neither belongs to the training throughput
        return status

    def _catch_up(
        self,
        planned: int | None,
        validate_every: int,
        task: Task,
        data: DataModule,
        average: Average,
        states: dict[str, Stateful],
    ) -> str:
        """Make up for what the previous start missed; return the status before the first update."""
        progress = self.progress
        status = self._status(planned, self.group.any(self.stop_requested()), self.group.any(self._is_late()))
        if progress.validated and progress.validated == progress.step and self._has_target(task):
            status = "target"  # the previous start reached it, and was killed before it wrote its result
        if self._owes_validation(status, validate_every):
            status = self._validate(task, data, average) or status
            self._save(states, task, average)
        elif status == "preempted" and not progress.step:  # stopped before the first update: save that, too
            self._save(states, task, average)
        return status

    def _warm_up(
        self,
        task: Task,
        wrapped: torch.nn.Module,
        data: DataModule,
        optimizer: torch.optim.Optimizer,
        average: Average,
        rate: float,
        states: dict[str, Stateful],
    ) -> None:
        """Have the device compile for every announced shape; the run is afterwards as it was before.

        Steps, evaluation and what a checkpoint reads, all twice: what one leaves, the next goes on from.
        """
        # weights of real batches would be a host read, and fp16, which needs them, is not for such devices
        self.progress.backward_divisor = self.progress.backward_divisor or 1.0
        begun = time.perf_counter()
        segments = {"steps": 0, "evaluation": 0, "checkpoint": 0}
        for _ in range(2):
            with self._counted(segments, "steps"), without_side_effects(task, optimizer, average):
                for shape in data.shapes() * 2:
                    task.advance(self.progress.step, seed_at(self.seed, _UPDATE_DRAWS, 0))
                    batches = itertools.repeat(padding_batch(*shape))
                    weight, healthy, _, _ = self._accumulate(task, wrapped, batches, 0, Interval())
                    self._step(task, optimizer, average, weight, healthy, rate, is_real=False)
            with self._counted(segments, "evaluation"), self._averaged(task, average):
                sets = {"warm-up": [padding_batch(*shape) for shape in data.evaluation_shapes()]}
                evaluate(task, sets, self.device, self.precision, self.group)
            with self._counted(segments, "checkpoint"):
                on_host([average.averaged_state_dict(task), *(part.state_dict() for part in states.values())])
        self.update.outcomes(True)
        self._graphs = self.device.graphs()
        counts = {"shapes": len(data.shapes()), "graphs": self._graphs}
        counts |= {f"graphs_{name}": count for name, count in segments.items()}
        self.tracker.log("warm_up", {**counts, "seconds": time.perf_counter() - begun})

    @contextlib.contextmanager
    def _counted(self, segments: dict[str, int], name: str) -> Iterator[None]:
        """A context whose compilations, its last graph's included, are added to ``segments[name]``."""
        before = self.device.graphs()
        yield
        self.device.mark_step()
        segments[name] += self.device.graphs() - before

    def _step(
        self,
        task: Task,
        optimizer: torch.optim.Optimizer,
        average: Average,
        weight: Tensor,
        healthy: Tensor,
        rate: float,
        is_real: bool = True,
    ) -> Tensor:
        """One update from a global batch of that weight (); its gradient norm ()."""
        # moved as data, so that a warm-up's graph is that of a real step; in a vector, since a backend may
        # take a lone number for another of the graph that is equal
        healthy = healthy.to(weight.dtype) * self.device.tensor(torch.tensor([float(is_real)]))[0]
        # full_like: a Python number would make a lazy tensor () fp64
        scale = torch.full_like(weight, self.progress.backward_divisor) / weight.clamp(min=1.0)
        norm = self.update(task, optimizer, average, rate, scale, healthy)
        self.device.mark_step()
        return norm

    def _check_graphs(self) -> None:
        """Report compilations since the warm-up; raise RunError above ``max_graphs``."""
        graphs, most = self.device.graphs(), self.config.max_graphs
        if most is not None and graphs > most:
            raise RunError(
                f"{graphs} graphs compiled up to step {self.progress.step}: trainer.max_graphs={most}"
            )
        if graphs > self._graphs:
            message = f"{graphs - self._graphs} more graphs compiled after the warm-up"
            self.tracker.log("warning", {"step": self.progress.step, "message": message})
            self._graphs = graphs

    def _heed(self, alarm: Alarm | None) -> None:
        """Act on what the task's ``watch`` says, as ``config.on_collapse`` wants; all ranks alike."""
        if alarm is None:
            return
        self.tracker.log("warning", {"step": self.progress.step, "message": alarm.message})
        if self.config.on_collapse == "stop":
            raise Diverged(f"{alarm.message} (seen since step {alarm.onset}; trainer.on_collapse=stop)")

    def _accumulate(
        self, task: Task, wrapped: torch.nn.Module, batches: Iterator[Batch], step: int, interval: Interval
    ) -> tuple[Tensor, Tensor, bool, bool]:
        """Forward and backward of this rank's share of a global batch.

        Returns the global weight (), whether every loss was finite () bool, and what all ranks agree
        on: whether a stop was requested, whether the time is over.
        """
        world, accumulate, rank_status = self.group.world, self.config.accumulate, self.group.rank_status
        weights, finite = [], []
        self._micro_batches = []
        for micro in range(accumulate):
            rank_status.at(step, "data")
            waiting = time.perf_counter()
            batch = next(batches)
            interval.waited_s += time.perf_counter() - waiting
            rank_status.at(step, "forward")
            # one address for each micro-batch of the run, whichever rank computes it
            address = (step, micro * world.size + world.rank)
            batch = task.prepare(batch, seed_at(self.seed, _HOST_DRAWS, *address))
            self._micro_batches.append(batch)
            self.latest = batch
            moved = self.device.move(batch)
            torch.manual_seed(seed_at(self.seed, _DEVICE_DRAWS, *address))
            last = micro + 1 == accumulate
            with nullcontext() if last else self.group.no_sync(wrapped):
                with self.precision.autocast(self.device.name):
                    loss: Loss = wrapped(moved)
                if not self.progress.backward_divisor:  # read once in the life of a run
                    size = max(1.0, float(self.group.sum(loss.weight.detach().clone())) * accumulate)
                    self.progress.backward_divisor = 2.0 ** round(math.log2(size))  # dividing by it is exact
                rank_status.at(step, "backward")
                self.precision.backward(
                    times(loss.total, 1.0 / self.progress.backward_divisor)
                )  # a power of two: exact
            weights.append(loss.weight)
            finite.append(torch.isfinite(loss.total.detach()).to(torch.float32))
            interval.add(batch, loss)
            self.device.mark_step()
        rank_status.at(step, "all-reduce")
        skip = torch.stack(finite).sum() < accumulate
        weight, stop, late, skip = self.group.all_reduce_status(
            torch.stack(weights).sum(), stop=self.stop_requested(), late=self._is_late(), skip=skip
        )
        return weight, skip.to(torch.float32) < 1, stop, late  # spelt so: ~ leaves a lazy graph

    def _count(self, outcome: StepOutcome) -> None:
        """Keep count of updates left out; raise Diverged when there were too many in a row."""
        if outcome is StepOutcome.TAKEN:
            self.progress.bad_updates = 0
        elif outcome is StepOutcome.SCALED:  # no fault of the recipe
            self.progress.scale_skips += 1
        else:
            self._refuse()

    def _refuse(self) -> None:
        """Count a non-finite update; raise Diverged, with a replay bundle, when there were too many."""
        progress = self.progress
        progress.bad_updates += 1
        progress.skipped_updates += 1
        ids = [name for batch in self._micro_batches for name in batch.ids if name]
        message = f"update {progress.step} skipped: non-finite loss or gradient (first cut {ids[:1]})"
        self.tracker.log("warning", {"step": progress.step, "message": message})
        if progress.bad_updates < self.config.max_bad_updates:
            return
        bundle = self.run_dir / "replay.pt"
        batches = [{k: v for k, v in vars(b).items() if k != "skipped"} for b in self._micro_batches]
        with contextlib.suppress(OSError, RuntimeError):  # torch reports a full disk as RuntimeError
            torch.save({"step": progress.step, "seed": self.seed, "batches": batches}, bundle)
        raise Diverged(
            f"{progress.bad_updates} non-finite updates in a row up to step {progress.step}; "
            f"lower optimizer.lr or trainer.clip, or look at the batches in {bundle}"
        )

    def _is_late(self) -> bool:
        """Whether this rank's clock says that the time is over."""
        hours = self.config.max_hours
        return hours is not None and time.perf_counter() - self._began >= hours * 3600

    def _status(self, planned: int | None, stop: bool, late: bool) -> str:
        """How the run ends after the steps done; empty while it goes on."""
        if planned is not None and self.progress.step >= planned:
            return "finished"
        if late:
            return "time"
        return "preempted" if stop else ""

    def _owes_validation(self, status: str, every: int) -> bool:
        """Whether the state after the steps done is to be evaluated before anything else.

        Leaving must not wait for it: a preempted run is saved, and evaluated when it continues.
        """
        step = self.progress.step
        is_due = bool(status) or step % every == 0
        return is_due and status != "preempted" and step > self.progress.validated

    def _log(self, interval: Interval, epoch: float, rate: float, norm: Tensor, planned: int | None) -> None:
        self.group.rank_status.at(self.progress.step, "log")
        self.device.synchronize()  # the one wait for the device, on log steps only
        seconds = max(1e-9, time.perf_counter() - interval.begun)
        interval.sums.reduce(self.group.sum)
        size, step = self.group.world.size, self.progress.step
        self.tracker.log(
            "train",
            {
                "step": step,
                "steps": planned,
                "epoch": epoch,
                **interval.sums.means(),
                "lr": rate,
                "grad_norm": float(norm.cpu()),
                "utterances_per_s": interval.utterances * size / seconds,
                "audio_s_per_s": interval.audio_s * size / seconds,
                "data_wait": interval.waited_s / seconds,
                "memory_mib": self.device.memory() / 2**20,
                **self.device.counts(),
                "eta_s": None if planned is None else (planned - step) * seconds / max(1, interval.steps),
            },
        )

    def _validate(self, task: Task, data: DataModule, average: Average) -> str:
        """Evaluate the averaged weights on every named set.

        Returns ``target`` where the target is reached, ``preempted`` where a stop request came first.
        """
        group = self.group

        def asked() -> bool:  # before every batch
            group.rank_status.at(self.progress.step, "validation")
            return group.any(self.stop_requested())

        try:
            with self._averaged(task, average):
                sets = {n: self._noting(s) for n, s in data.valid(group.world.rank, group.world.size).items()}
                outcomes = evaluate(task, sets, self.device, self.precision, group, stop_requested=asked)
        except Interrupted:
            return "preempted"
        self.report(outcomes)
        metrics = {f"{name}/{key}": value for name, o in outcomes.items() for key, value in o.metrics.items()}
        self.progress.metrics = {**first_set(outcomes), **metrics}
        self.progress.validated = self.progress.step
        return "target" if self._has_target(task) else ""

    def _noting(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """``batches``, each kept as the latest."""
        for batch in batches:
            self.latest = batch
            yield batch

    @contextlib.contextmanager
    def _averaged(self, task: Task, average: Average) -> Iterator[None]:
        """A context with the averaged weights, in graphs of their own: an update's stays as it was."""
        try:
            with average.swapped(task):
                self.device.mark_step()
                yield
        finally:
            self.device.mark_step()

    def _has_target(self, task: Task) -> bool:
        """Whether the latest validation reached ``config.target``."""
        metric, target = self.progress.metrics.get(task.metric), self.config.target
        return target is not None and metric is not None and metric <= target

    def report(self, outcomes: dict[str, Outcome]) -> None:
        """Tell the tracker of an evaluation."""
        step = self.progress.step
        for name, outcome in outcomes.items():
            self.tracker.log(
                "valid", {"step": step, "set": name, "seconds": outcome.seconds, **outcome.metrics}
            )
            rows = [vars(example) for example in outcome.examples]
            self.tracker.log("examples", {"step": step, "set": name, "rows": rows})

    def _save(self, states: dict[str, Stateful], task: Task, average: Average) -> None:
        self.group.rank_status.at(self.progress.step, "checkpoint")
        if self.group.world.rank == 0 or self.checkpointer.needs_all:
            is_validated = self.progress.validated == self.progress.step
            metric = self.progress.metrics.get(task.metric) if is_validated else None
            try:
                path = self.checkpointer.save(
                    self.progress.step, states, average.averaged_state_dict(task), metric
                )
                self.tracker.log("checkpoint", {"step": self.progress.step, "path": str(path)})
            except OSError as error:
                if self.config.on_save_error == "stop":
                    raise MachineError(f"{error}; the last good checkpoint is intact") from error
                self.tracker.log(
                    "warning", {"message": f"{error}; training goes on, trainer.on_save_error=continue"}
                )
        self.group.barrier()


def first_set(outcomes: dict[str, Outcome]) -> dict[str, float]:
    """The metrics of the first named set: what selects checkpoints and what a sweep reads."""
    return next((o.metrics for o in outcomes.values()), {})


def planned_steps(config: TrainerConfig, steps_per_epoch: float) -> int | None:
    """Updates that the limits by steps and epochs allow; None where only time or a target ends the run."""
    plans = []
    if config.max_steps is not None:
        plans.append(config.max_steps)
    if config.max_epochs is not None:
        plans.append(math.ceil(config.max_epochs * steps_per_epoch))
    return min(plans, default=None)
