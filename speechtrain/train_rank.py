"""The composition root: a resolved config becomes objects, and the objects train.

Every rank runs ``python -m speechtrain.train_rank <run>/config.yaml``. No Hydra composition happens
here: the file is the whole truth.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import faulthandler
import logging
import math
import os
import platform
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from logging.handlers import MemoryHandler
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, cast

import numpy as np
import torch
from omegaconf import DictConfig

from speechtrain.batch import Footprint
from speechtrain.checkpoint.whole import Checkpointer, validated
from speechtrain.compute_policy import apply_policy, usable_cpus
from speechtrain.config.build import (
    build,
    build_data,
    build_device,
    build_encoder,
    build_model,
    build_optimizer,
    build_precision,
    build_schedule,
    build_tokenizer,
    rank_bytes,
)
from speechtrain.config.check import part_class
from speechtrain.config.resolved import dump, load, resolved
from speechtrain.counter_rng import RunStream, seed_at
from speechtrain.data.base import DataModule
from speechtrain.devices.base import Device
from speechtrain.distributed.group import Group, PeerLost, SingleProcess, open_group
from speechtrain.distributed.watchdog import MARGIN_SECONDS, HangDiagnosis, HangReport, Stuck, Watch
from speechtrain.errors import (
    ConfigError,
    MachineError,
    RunError,
    SpeechtrainError,
    disk_explained,
    escape_output,
    one_line,
    print_notice,
)
from speechtrain.files import finite, lost_output, open_append, whole_path, write_json, write_text
from speechtrain.launcher import PARENT, Job, World, forwarded_environment, is_number
from speechtrain.optim.ema import EMA, NoEMA
from speechtrain.optim.schedules import Schedule
from speechtrain.precision import FP32, Precision
from speechtrain.run_directory import (
    CONFIG,
    ERROR,
    RESULT,
    STUCK,
    RunLock,
    note_environment,
    rank_folder,
    run_of,
)
from speechtrain.supervision.process_tree import ancestors_of, is_running, kill, kill_descendants, siblings_of
from speechtrain.task import Task
from speechtrain.text.vocabulary import Tokenizer
from speechtrain.tracking.base import Tracker
from speechtrain.tracking.console import TextLog
from speechtrain.tracking.group import Trackers, is_hanging
from speechtrain.trainer_config import TrainerConfig, is_planned_by_time, planned_steps
from speechtrain.training.autotune import resolve_policy
from speechtrain.training.recompute import checkpoint_layers
from speechtrain.training.run_state import Progress
from speechtrain.training.trainer import Trainer

_LOG = logging.getLogger("speechtrain.train_rank")  # where this module is run, its own name is another
_RANK0_HEAD_START_SECONDS = 1.0  # other ranks wait so long: rank 0 prints before torchrun kills all
_BATCH_SHARE = 0.5  # predictions are within a factor of 2
_MOST_EARLY = 1000  # warnings kept until the trackers exist
_ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT", "LD_PRELOAD", "OMP_*", "KMP_*", "CCL_*", "I_MPI_PIN*")
"""Patterns of the variables that are logged with the device's own."""


class _Warnings(logging.Handler):
    """Sends what the parts log (a skipped recording, a lost worker) to the trackers as warnings."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__(logging.WARNING)
        self.tracker = tracker

    def emit(self, record: logging.LogRecord) -> None:
        self.tracker.log("warning", {"message": record.getMessage()})


class StopRequest:
    """True after the first SIGTERM or SIGINT; the loop acts on it at the next step boundary.

    The launcher started this process with both signals blocked; the constructor unblocks them. The end of
    ``command``, a process of this host, counts as a signal.
    """

    def __init__(self) -> None:
        self.received = False
        self.command: int | None = None
        numbers = (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            signal.signal(number, self._receive)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True

    def __call__(self) -> bool:
        if self.command is not None and not is_running(self.command):
            self.received = True
        return self.received


def open_device(config: DictConfig, local_rank: int) -> tuple[Device, Precision]:
    """Claim the device; return it with the precision, fp32 if the chip lacks instructions for the other.

    Raises MachineError if device and precision do not fit, ConfigError for a device that cannot recompute.
    """
    device, precision = build_device(config), build_precision(config)
    if config.trainer.get("checkpoint_layers") and device.static_shapes:
        raise ConfigError(
            f"trainer.checkpoint_layers=true: device={device.name} records graphs, which compute nothing "
            "twice; set trainer.checkpoint_layers=false"
        )
    device.check_precision(precision)
    device.open(local_rank)
    if reason := device.precision_fallback_reason(precision.dtype):
        _LOG.warning(f"precision={precision.name}: {reason}")
        precision = FP32()
    return device, precision


def build_task(config: DictConfig) -> tuple[Task, Tokenizer]:
    """The task, its weights drawn from the run's seed, and its tokenizer."""
    tokenizer = build_tokenizer(config)
    torch.manual_seed(seed_at(config.seed, RunStream.INITIAL_WEIGHTS))
    task = build_model(config, tokenizer, build_encoder(config))
    if config.trainer.get("checkpoint_layers"):
        checkpoint_layers(task)
    return task, tokenizer


def read_config(run_dir: Path) -> DictConfig:
    """Load a run's stored config, with the paths of the tokenizer's copy in the run."""
    config = load(run_dir / CONFIG)
    tokenizer_class = cast("type[Tokenizer]", part_class("tokenizer", config.tokenizer))
    config.tokenizer.update(tokenizer_class.saved(str(run_dir.resolve())))
    return config


def _begin_with(config: DictConfig, task: Task, tokenizer: Tokenizer) -> dict[str, Any]:
    """Give a new run the weights at ``init_from``; what came from there and what is fresh.

    Tensors whose shape depends on the vocabulary stay fresh, unless the weights' run has the same one.
    """
    if not (path := config.init_from):
        return {}
    from speechtrain.interop.weights import initialise, read_labels, read_weights

    weights, fresh = read_weights(path), set[str]()
    run = None if path.startswith("hf:") else run_of(whole_path(path).resolve())
    labels = build_tokenizer(read_config(run)).labels if run else read_labels(path)
    if labels not in ([], tokenizer.labels):
        longer = copy.copy(tokenizer)
        longer.labels = tokenizer.labels * 2
        other = build_model(config, longer, build_encoder(config)).state_dict()
        fresh = {name for name, value in task.state_dict().items() if value.shape != other[name].shape}
    found = initialise(task, weights, path, fresh)
    lost = ", ".join(sorted(fresh & weights.keys()))
    note = {"fresh for another vocabulary": lost} if lost else {}
    return {"tensors taken over": len(found.loaded), "fresh": len(found.fresh), **note}


def seed_everything(seed: int) -> None:
    """Seed the generators that libraries may use on their own; ours are addressed, not carried."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@dataclass
class Attempt:
    """One process's part of a run. It holds the progress even if the process fails."""

    status: str = "failed"
    progress: Progress = field(default_factory=Progress)
    metric: str = "loss"
    checkpointer: Checkpointer | None = None
    tracker: Tracker | None = None
    group: Group = field(default_factory=SingleProcess)
    watch: Watch | None = None
    content: Mapping[str, str | int] = field(default_factory=dict)  # of the training set

    def result(self) -> dict[str, Any]:
        """The content of ``result.json``; its metrics are those of the best checkpoint, if there is one."""
        best, least = self.checkpointer.best() if self.checkpointer else (None, math.inf)
        last: dict[str, Any] = finite(self.progress.metrics)
        metrics = last if best is None else validated(best) or {self.metric: least}
        return {
            "status": self.status,
            "metric": metrics.get(self.metric),
            "metrics": metrics,
            "checkpoint": best and best.name,
            "last_metrics": last,
            "steps": self.progress.step,
            "wall_s": round(self.progress.wall_s, 3),
            "skipped_updates": self.progress.skipped_updates,
            "scale_skips": self.progress.scale_skips,
            "speed": self.progress.speed(),
            "data": dict(self.content),
        }

    def unwatch(self) -> None:
        """Stop the watchdog; if it is about to end the process, this does not return."""
        if self.watch is not None:
            self.watch.close()

    def end(self, result: dict[str, Any]) -> None:
        """Report the result to the trackers and close them."""
        if self.tracker is not None:
            self.tracker.log("end", result)
            self.tracker.close()


def trainer_config_for(config: DictConfig, world: World) -> TrainerConfig:
    """The trainer's settings on so many ranks. Raises ConfigError or MachineError if they do not fit."""
    if world.size != config.world_size:
        raise MachineError(
            f"WORLD_SIZE={world.size} in the environment, but the run has world_size={config.world_size}; "
            "unset RANK and WORLD_SIZE, or start that many processes"
        )
    settings = TrainerConfig(**{str(k): v for k, v in config.trainer.items()})
    if settings.simulate_world is not None:
        if settings.simulate_world % world.size:
            raise ConfigError(
                f"trainer.simulate_world={settings.simulate_world} is not a multiple of "
                f"world_size={world.size}"
            )
        settings.accumulate = settings.simulate_world // world.size
    return settings


def watch(attempt: Attempt, run_dir: Path, seconds: float) -> Watch:
    """Start this rank's watchdog; all ranks must call it.

    Its reports go to a folder named after the time of rank 0's start, which differs between attempts.
    """
    group, world = attempt.group, attempt.group.world
    own = 0.0 if world.rank else float(int(time.time()))
    begun = float(group.sum(torch.tensor([own], dtype=torch.float64))[0])
    folder = run_dir / STUCK / time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(begun))

    def stop(diagnosis: HangDiagnosis, report: HangReport) -> None:
        _exit_stuck(attempt, rank_folder(run_dir, world.rank), diagnosis, report=report)

    found = Watch(group.rank_status, world.rank, world.size, folder=folder, seconds=seconds, leave=stop)
    return found.start()


def _exit_stuck(attempt: Attempt, folder: Path, diagnosis: HangDiagnosis, report: HangReport) -> NoReturn:
    """End this rank, whatever its main thread hangs in; its result names the stuck rank."""
    reporter = diagnosis.rank  # the stuck rank reports; if it does not answer, the next one that does
    while reporter in diagnosis.silent:
        reporter += 1
    is_cause = report.rank == reporter % attempt.group.world.size
    message = diagnosis.message if is_cause else f"{report}: rank {diagnosis.rank} is stuck"
    failure = {"rank": report.rank, "failed_at": time.time(), "is_cause": is_cause}
    result = {**attempt.result(), "error": message, "exit_code": Stuck.exit_code, **failure}
    with contextlib.suppress(OSError):
        write_text(folder / ERROR, f"{diagnosis.message}\n\n{report.others}{report.stack}", durable=False)
        write_json(folder / RESULT, result)
    with contextlib.suppress(OSError, ValueError):
        stack = f"speechtrain: the stack of rank {diagnosis.rank}:\n{diagnosis.stack}"
        print(stack, file=sys.stderr, flush=True)
    if report.rank:
        time.sleep(_RANK0_HEAD_START_SECONDS)
    kill_descendants(os.getpid())
    for pid, environment in siblings_of(os.getpid()).items():
        with contextlib.suppress(MachineError):
            if World.from_environment(environment).rank in diagnosis.silent:
                kill(pid)
    os._exit(Stuck.exit_code)


def open_ranks(
    settings: TrainerConfig, world: World, device: Device, run_dir: Path
) -> tuple[Group, Checkpointer]:
    """The group of this run's ranks and its checkpointer, both sharded if ``trainer.shard`` says so.

    Raises ConfigError if the device cannot shard.
    """
    timeout = settings.timeout_seconds + MARGIN_SECONDS
    if settings.shard == "none" or world.size == 1:
        return open_group(world, device.facts, timeout), Checkpointer(run_dir, settings.keep)
    if not device.facts.fsdp:
        raise ConfigError(
            f"trainer.shard={settings.shard}: device={device.name} needs whole parameters; "
            "use trainer.shard=none"
        )
    from speechtrain.checkpoint.sharded import ShardedCheckpointer  # a second of imports
    from speechtrain.distributed.fsdp import ShardedGroup  # a second of imports

    group = ShardedGroup(world, device.facts, timeout)
    return group, ShardedCheckpointer(run_dir, settings.keep, group)


def train(
    config: DictConfig, world: World, stop: StopRequest, attempt: Attempt, is_watched: bool = False
) -> None:
    """Build everything and train; ``attempt`` holds the outcome. Raises what stopped the training."""
    run_dir = Path(config.run_dir)
    settings = trainer_config_for(config, world)
    seed_everything(config.seed)
    early = _keep_log_lines()
    device, precision = open_device(config, world.local_rank)
    group, checkpointer = open_ranks(settings, world, device, run_dir=run_dir)
    attempt.group, attempt.checkpointer = group, checkpointer
    if is_watched:
        attempt.watch = watch(attempt, run_dir, settings.timeout_seconds)
    task, tokenizer = build_task(config)
    apply_policy(task, device.policy(precision.dtype))  # before the data: the model's memory depends on it
    begun = _restart() | _choose_batch_memory(config, device, group, task=task)
    data = build_data(config, tokenizer, task)
    with group.main_process_first():  # rank 0 indexes a large set; the others find the index in the cache
        data.check()
    device.validate_shapes(data.shapes())
    begun |= _begin_with(config, task, tokenizer) if not checkpointer.folders() else {}
    task.to(device.tensor(torch.zeros(())).device)
    policy, chosen = resolve_policy(device, precision, group, run_dir=run_dir, task=task, data=data)

    schedule, planned = _plan(config, settings, data)
    _warn_of_crowded_labels(data, task)
    if not checkpointer.folders():
        begun |= _first_facts(config, schedule)
    optimizer = build_optimizer(config, task.parameter_groups(), **device.facts.optimizer_flags)
    module, optimizer = device.prepare(task, optimizer)
    assert isinstance(module, Task)
    group.shard(module, optimizer, policy.autocast_dtype if device.facts.narrow_gathers else None)
    data.obey(stop)
    attempt.metric, attempt.content = task.metric, data.content()
    attempt.tracker = tracker = _open_tracker(config, world, early)
    if not world.rank:
        tokenizer.save(str(run_dir))
    _log_environment(run_dir, world, device, tracker)
    tracker.log("device", chosen)
    counts = {"ranks": world.size, "accumulate": settings.accumulate, "steps": planned}
    _log_start(config, task, data, tracker, {**begun, **counts, "target": settings.target})
    trainer = Trainer(
        config=settings,
        device=device,
        precision=precision,
        policy=policy,
        group=group,
        checkpointer=checkpointer,
        tracker=tracker,
        seed=config.seed,
        run_dir=rank_folder(run_dir, world.rank),
        stop_requested=stop,
    )
    attempt.progress = trainer.progress
    with contextlib.closing(data), _explained(device, trainer, tokenizer.size):
        average = EMA(task, settings.ema) if settings.ema > 0 else NoEMA()
        attempt.status = trainer.fit(
            module, data, optimizer, schedule=schedule, average=average, resume=config.resume
        )


def fill_batch_memory(config: DictConfig, gib: Callable[[], float]) -> float:
    """Replace ``memory_gib=auto`` of the data's batches by ``gib``; the number, 0 where none is ``auto``."""
    limits: list[Any] = [config.data.get(name) or {} for name in ("batch", "valid_batch")]
    open_limits = [each for each in limits if each.get("memory_gib") == "auto"]
    found = gib() if open_limits else 0.0
    for each in open_limits:
        each.memory_gib = found
    return found


def free_batch_memory(config: DictConfig, device: Device, task: Task) -> float:
    """GiB for a batch: half of what the device has free beside a rank's weights, gradients and their like.

    Raises MachineError where nothing is left.
    """
    free = device.free_memory(int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1))
    needed = rank_bytes(config, sum(p.numel() for p in task.parameters()))
    if free <= needed:
        sizes = f"{needed / 2**30:.2f} GiB of weights, gradients and state, {free / 2**30:.2f} GiB free"
        raise MachineError(f"data.batch.memory_gib=auto: {sizes}; use a smaller model or another machine")
    return round(_BATCH_SHARE * (free - needed) / 2**30, 3)


def _choose_batch_memory(config: DictConfig, device: Device, group: Group, *, task: Task) -> dict[str, Any]:
    """Set ``memory_gib=auto`` to rank 0's choice, which the run's config keeps; a note for the start line."""

    def shared() -> float:
        own = 0.0 if group.world.rank else free_batch_memory(config, device, task)
        return float(group.sum(torch.tensor([own], dtype=torch.float64))[0])

    if not (chosen := fill_batch_memory(config, shared)):
        return {}
    if not group.world.rank:
        path = Path(config.run_dir) / CONFIG
        stored = load(path)
        fill_batch_memory(stored, lambda: chosen)
        write_text(path, dump(stored))
    return {"memory of a batch": f"{chosen} GiB"}


def _log_environment(run_dir: Path, world: World, device: Device, tracker: Tracker) -> None:
    """Log this rank's environment without secrets. The first rank of a host stores it."""
    job = Job(run_dir / CONFIG, run_dir, forwarded=device.facts.forwarded_variables)
    environment = {
        **forwarded_environment(job, (*_ENVIRONMENT, *device.facts.network_variables)),
        "threads": str(torch.get_num_threads()),
        "cpus": str(len(usable_cpus())),
    }
    if not world.local_rank:
        note_environment(rank_folder(run_dir, world.rank), platform.node(), environment)
    tracker.log("environment", {"host": platform.node(), **environment})


def _log_start(config: DictConfig, task: Task, data: DataModule, tracker: Tracker, facts: Any) -> None:
    """Log the data pipeline with the number of its recordings, and the start with its ``facts``."""
    nodes = resolved(config)
    features = {"sample_rate": task.sample_rate, **nodes["encoder"].get("features", {})}
    parameters = features | nodes["augment"]
    del parameters["_target_"]
    updates = data.micro_batches_per_epoch / (facts["ranks"] * facts["accumulate"])
    tracker.log("data", {**data.counts(), "updates_per_epoch": max(1, round(updates)), **parameters})
    facts |= {"parameters": sum(p.numel() for p in task.parameters()), "shapes": data.shapes()}
    tracker.log("start", facts | data.report())


def _keep_log_lines() -> MemoryHandler:
    """Keep what is logged until there are trackers."""
    early = MemoryHandler(_MOST_EARLY, flushLevel=sys.maxsize)
    logging.getLogger("speechtrain").handlers[:] = [early]
    logging.getLogger("speechtrain").propagate = False  # lhotse gives the root logger a handler
    return early


def _first_facts(config: DictConfig, schedule: Schedule) -> dict[str, Any]:
    """Return the facts that the start line of a new run adds."""
    facts: dict[str, Any] = {"warm-up steps": schedule.warmup, "from data": config.from_data}
    return {name: value for name, value in facts.items() if value}


def _warn_of_crowded_labels(data: DataModule, task: Task) -> None:
    encoder = getattr(task, "encoder", None)
    line = data.crowded(encoder.frames) if encoder else ""
    if line:
        _LOG.warning(line)


def _plan(config: DictConfig, settings: TrainerConfig, data: DataModule) -> tuple[Schedule, int | None]:
    """The schedule and the number of planned updates; warns where they or the data cannot do their work."""
    per_epoch = data.micro_batches_per_epoch / (config.world_size * settings.accumulate)
    planned = planned_steps(settings, per_epoch)
    is_open = is_planned_by_time(settings)  # the trainer plans, and fits the schedule
    schedule = build_schedule(config, max(1, round(per_epoch)), 1 if is_open else planned)
    for warning in data.warnings():
        _LOG.warning(warning)
    if not data.valid():
        _LOG.warning("data.valid is empty: nothing chooses the best checkpoint; add data.valid.NAME=FILE")
    if planned and planned <= schedule.warmup:
        _LOG.warning(f"the warm-up takes {schedule.warmup} of {planned} updates; change schedule.warmup_*")
    return schedule, planned


def _open_tracker(config: DictConfig, world: World, early: MemoryHandler) -> Tracker:
    """The trackers, which get the warnings so far and all later ones; other ranks have logs of their own."""
    tracker = Trackers()
    if not world.rank:
        part: Tracker = build(config, "tracking")
        tracker = part if isinstance(part, Trackers) else Trackers({"tracking": part})
        tracker.add("output.log", TextLog(config.run_dir))
    logging.getLogger("speechtrain").handlers[:] = [_Warnings(tracker)]
    early.setTarget(_Warnings(tracker))
    early.close()
    return tracker


@contextlib.contextmanager
def _explained(device: Device, trainer: Trainer, classes: int) -> Iterator[None]:
    """A context that turns a lack of the device's memory into an error that names the batch."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        footprint = trainer.parts.task.footprint() if trainer.parts else Footprint(0.0)
        if explained := device.explain(error, trainer.latest, footprint, classes=classes):
            raise explained from error
        raise


def _stop_with_parent(stop: StopRequest) -> None:
    """Stop as on a SIGTERM when the command that started this process on this host has ended (Linux).

    The kernel signals the end of this process's own parent. Agents between it and the command may outlive
    the command (Intel's mpirun is a script around one), so ``stop`` checks the command in every step.
    """
    command = os.environ.pop(PARENT, "")
    if not command:
        return
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    except (OSError, AttributeError):
        return
    if is_number(command) and int(command) in ancestors_of(os.getpid()):
        stop.command = int(command)
    else:  # it ended before the kernel was asked
        stop.received = True


def main(argv: list[str] | None = None, is_watched: bool = False) -> int:
    """Run one rank, write its outcome to ``result.json`` and return the exit code.

    With ``is_watched``, a rank that hangs does not return: the process ends. Rank 0 holds the run's lock;
    the other ranks write their outcome and what they print to folders of their own.
    """
    arguments = sys.argv[1:] if argv is None else argv
    path = _config_path(arguments)
    if path is None:
        return ConfigError.exit_code
    stop = StopRequest()
    _stop_with_parent(stop)
    run_dir = path.parent
    with contextlib.suppress(MachineError):  # a malformed variable is reported below
        world = World.from_environment(os.environ)
        if world.size > 1:
            os.environ.update(world.variables())
    rank = os.environ.get("RANK", "0")
    if is_number(rank) and int(rank):  # a malformed RANK is reported by World.from_environment
        with contextlib.suppress(OSError):  # a full disk is reported by what follows
            _print_to(rank_folder(run_dir, int(rank)) / "output.log")
        return _attempt(path, stop, int(rank), is_watched=is_watched)
    lock = RunLock(run_dir)
    try:
        lock.acquire()
    except (RunError, OSError) as error:  # another process runs it, and owns its result
        print_notice(f"error: {error}")
        return error.exit_code if isinstance(error, RunError) else MachineError.exit_code
    try:
        return _attempt(path, stop, is_watched=is_watched)
    finally:
        lock.release()


def _config_path(arguments: Sequence[str]) -> Path | None:
    """Return the path of the config that the arguments name. Without one, print a line and return None."""
    line = "usage: python -m speechtrain.train_rank RUN/config.yaml"
    if len(arguments) == 1:
        path = Path(arguments[0])
        if path.is_file():
            return path
        line = f"speechtrain: error: {path} does not exist on {platform.node()}. The start of a run writes it"
    print(one_line(line), file=sys.stderr)
    return None


def _print_to(path: Path) -> None:
    """Append what this process and its children print to a file."""
    with open_append(path) as log:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(log.fileno(), stream.fileno())


def _attempt(path: Path, stop: StopRequest, rank: int = 0, is_watched: bool = False) -> int:
    """Train by the config at ``path``, write the outcome to the rank's folder and return the exit code."""
    folder = rank_folder(path.parent, rank)
    attempt, code, trace = Attempt(), 0, folder / ERROR
    for before in (trace, folder / RESULT):
        before.unlink(missing_ok=True)
    try:
        train(load(path), World.from_environment(os.environ), stop, attempt=attempt, is_watched=is_watched)
        result = attempt.result()
        attempt.group.rank_status.at(attempt.progress.step, "end")
        attempt.group.close()
        attempt.unwatch()
    except Exception as raised:  # the boundary of the process: the parent reads the result
        attempt.unwatch()  # first: if the watchdog reports a hang, its diagnosis wins over this error
        error = disk_explained(attempt.group.explained(raised))
        code = error.exit_code if isinstance(error, SpeechtrainError) else 1
        attempt.status = "failed"
        # of several failures, the first is the cause
        failure = {"rank": rank, "failed_at": time.time(), "is_cause": not isinstance(error, PeerLost)}
        result = {**attempt.result(), "error": _message(error), "exit_code": code, **failure}
        with contextlib.suppress(OSError):  # a full disk must not hide what went wrong
            write_text(trace, traceback.format_exc(), durable=False)
    try:
        write_json(folder / RESULT, result)
    except OSError as error:
        print_notice(f"error: {folder / RESULT} cannot be written: {error}")
        code = code or MachineError.exit_code
    attempt.end(result)  # last: a tracker may take seconds, in which the launcher may kill this process
    return code


def _message(error: Exception) -> str:
    """The error of a failed rank, with the restart that follows."""
    message = str(error) if isinstance(error, SpeechtrainError) else f"{type(error).__name__}: {error}"
    for restart in _restart(failures=1).values():
        message = f"{message.strip()} (restart {restart} follows)"
    return message.strip()


def _restart(failures: int = 0) -> dict[str, str]:
    """The number of torchrun's start of all ranks after ``failures`` of this one, if it starts them again."""
    number = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) + failures
    limit = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    return {"restart": f"{number} of {limit}"} if 0 < number <= limit else {}


def _exit(code: int) -> NoReturn:
    """End the process.

    A failed rank ends at once, since its collectives may never end. So does one with a tracker that hangs,
    since the tracker's library may wait for the same answer when Python exits.
    """
    if is_hanging() or (code and "RANK" in os.environ):
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        kill_descendants(os.getpid())
        os._exit(code)
    lost_output()  # a full disk below stdout must not change the code
    sys.exit(code)


if __name__ == "__main__":
    escape_output()
    faulthandler.enable()  # prints the stack if a backend aborts
    _exit(main(is_watched=True))
