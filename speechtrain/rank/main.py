"""One rank of a run: a resolved config becomes objects, and the objects train.

Every rank runs ``python -m speechtrain.train_rank <run>/config.yaml``. No Hydra composition happens
here: the file is the whole truth.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import torch
from omegaconf import DictConfig

from speechtrain.batch import Footprint
from speechtrain.compute_policy import apply_policy
from speechtrain.config.build import build_data, build_optimizer
from speechtrain.config.resolved import load
from speechtrain.devices.base import Device
from speechtrain.devices.out_of_memory import out_of_memory_error
from speechtrain.distributed.group import PeerLost
from speechtrain.errors import (
    ConfigError,
    MachineError,
    RunError,
    SpeechtrainError,
    disk_explained,
    print_notice,
)
from speechtrain.files import lost_output, open_append, write_text
from speechtrain.launcher import World, is_number
from speechtrain.optim.ema import EMA, NoEMA
from speechtrain.rank.attempt import Attempt
from speechtrain.rank.batch_memory import choose_batch_memory
from speechtrain.rank.build import (
    build_task,
    load_initial_weights,
    open_device,
    open_ranks,
    plan_updates,
    seed_everything,
    trainer_config_for,
)
from speechtrain.rank.hang import watch
from speechtrain.rank.logs import (
    first_facts,
    keep_log_lines,
    log_environment,
    log_start,
    open_tracker,
    warn_of_crowded_labels,
)
from speechtrain.rank.stop import StopRequest, stop_with_parent
from speechtrain.run_directory import ERROR, RESULT, RunLock, rank_folder, write_result
from speechtrain.supervision.process_tree import kill_descendants
from speechtrain.task import Task
from speechtrain.tracking.group import is_hanging
from speechtrain.training.autotune import resolve_policy
from speechtrain.training.trainer import Trainer


def train(
    config: DictConfig, world: World, stop: StopRequest, attempt: Attempt, is_watched: bool = False
) -> None:
    """Build everything and train; ``attempt`` holds the outcome. Raises what stopped the training."""
    run_dir = Path(config.run_dir)
    settings = trainer_config_for(config, world)
    seed_everything(config.seed)
    early = keep_log_lines()
    device, precision = open_device(config, world.local_rank)
    group, checkpointer = open_ranks(settings, world, device, run_dir=run_dir)
    attempt.group, attempt.checkpointer = group, checkpointer
    if is_watched:
        attempt.watch = watch(attempt, run_dir, settings.timeout_seconds)
    task, tokenizer = build_task(config)
    apply_policy(task, device.policy(precision.dtype))  # before the data: the model's memory depends on it
    begun = _restart() | choose_batch_memory(config, device, group, task=task)
    data = build_data(config, tokenizer, task)
    with group.main_process_first():  # rank 0 indexes a large set; the others find the index in the cache
        data.check()
    device.validate_shapes(data.shapes())
    begun |= load_initial_weights(config, task, tokenizer) if not checkpointer.folders() else {}
    task.to(device.tensor(torch.zeros(())).device)
    policy, chosen = resolve_policy(device, precision, group, run_dir=run_dir, task=task, data=data)

    schedule, planned = plan_updates(config, settings, data)
    warn_of_crowded_labels(data, task)
    if not checkpointer.folders():
        begun |= first_facts(config, schedule)
    optimizer = build_optimizer(config, task.parameter_groups(), **device.facts.optimizer_flags)
    module, optimizer = device.prepare(task, optimizer)
    assert isinstance(module, Task)
    group.shard(module, optimizer, policy.autocast_dtype if device.facts.narrow_gathers else None)
    data.obey(stop)
    attempt.metric, attempt.content = task.metric, data.content()
    attempt.tracker = tracker = open_tracker(config, world, early)
    if not world.rank:
        tokenizer.save(str(run_dir))
    log_environment(run_dir, world, device, tracker)
    tracker.log("device", chosen)
    counts = {"ranks": world.size, "accumulate": settings.accumulate, "steps": planned}
    log_start(config, task, data, tracker, {**begun, **counts, "target": settings.target})
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


@contextlib.contextmanager
def _explained(device: Device, trainer: Trainer, classes: int) -> Iterator[None]:
    """A context that turns a lack of the device's memory into an error that names the batch."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        batch, footprint = None, Footprint(0.0)
        if trainer.parts is not None:
            batch, footprint = trainer.parts.latest, trainer.parts.task.footprint()
        memory_error = out_of_memory_error(device, error, batch, footprint, classes=classes)
        if memory_error is not None:
            raise memory_error from error
        raise


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
    stop_with_parent(stop)
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
        line = f"error: {path} does not exist on {platform.node()}. The start of a run writes it"
    print_notice(line)
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
        write_result(folder, result)
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


def end_process(code: int) -> NoReturn:
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
