"""One rank of a run: builds the objects of a resolved config, trains, and writes the result.

Every rank runs ``python -m speechtrain.rank <run>/config.yaml``. The file has been composed by the
command that started the rank, so a rank does not use Hydra.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import sys
import time
import traceback
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from speechtrain.compute_policy import apply_policy
from speechtrain.devices.out_of_memory import out_of_memory_error
from speechtrain.distributed.group import PeerLost
from speechtrain.distributed.world import World
from speechtrain.errors import (
    ConfigError,
    MachineError,
    OutOfMemory,
    SpeechtrainError,
    explain_disk_error,
    print_notice,
)
from speechtrain.files import open_append, stdout_problem, write_text
from speechtrain.launch.process_tree import kill_descendants
from speechtrain.rank.attempt import Attempt
from speechtrain.rank.batch_memory import choose_batch_memory, with_decoded_memory
from speechtrain.rank.build import (
    build_task,
    load_initial_weights,
    open_device,
    open_ranks,
    plan_updates,
    seed_everything,
    trainer_config_for,
)
from speechtrain.rank.contract import check_contract
from speechtrain.rank.hang import watch
from speechtrain.rank.logs import (
    buffer_log_lines,
    log_environment,
    log_start,
    open_tracker,
)
from speechtrain.rank.stop import StopRequest
from speechtrain.run_directory import ERROR, RESULT, RunLock, rank_folder, write_result
from speechtrain.start.build import build_data, build_optimizer
from speechtrain.start.resolved import load
from speechtrain.start.run_config import RunConfig, run_config
from speechtrain.start.targets import described_error
from speechtrain.task import Task
from speechtrain.tracking.group import is_hanging
from speechtrain.training.autotune import resolve_policy
from speechtrain.training.saving import choose_checkpoint
from speechtrain.training.trainer import Trainer


def train(
    run: RunConfig, world: World, stop: StopRequest, attempt: Attempt, is_watched: bool = False
) -> None:
    """Build the parts of a rank in the order in which they need one another, and train.

    The fields of ``attempt`` are set as soon as their values exist. ``is_watched`` starts a watchdog, which
    ends a process that hangs. Raises the error that ends the training.
    """
    settings = trainer_config_for(run, world)
    seed_everything(run.seed)
    early_lines = buffer_log_lines()

    device = run.device.build()
    device.check_settings(settings)
    precision = open_device(device, run.precision.build(), world.local_rank)
    group, checkpointer = open_ranks(settings, world, device, run_dir=run.run_dir)
    attempt.group, attempt.checkpointer = group, checkpointer
    attempt.limits, attempt.peak_memory = asdict(run.trainer), device.memory
    if is_watched:
        attempt.unwatch = watch(attempt, run.run_dir, settings.timeout_seconds).close

    task, tokenizer = build_task(run)
    # The memory of a batch depends on the policy, so the device's default policy is applied first. The final
    # policy is chosen below, when there is data for timing.
    apply_policy(task, device.policy(precision.dtype))
    run, memory_entries = choose_batch_memory(run, device, group, task=task)
    entries = _restart_entry() | memory_entries
    data = build_data(with_decoded_memory(run), tokenizer, task, stop_requested=stop)
    data.check()
    device.validate_shapes(data.shapes())

    checkpoint = choose_checkpoint(group, checkpointer, run.resume)
    if checkpoint is None:
        entries |= load_initial_weights(run, task, tokenizer)
    # A tensor of the device has the torch device as attribute.
    task.to(device.tensor(torch.zeros(())).device)
    if not world.rank:
        with device.policy(precision.dtype).autocast(device.name):
            device.check_parts(partial(check_contract, task, data, device.move, world.size))
    policy, policy_record = resolve_policy(
        device, precision, group, run_dir=run.run_dir, task=task, data=data
    )

    schedule, planned_updates = plan_updates(run, settings, data)
    encoder = getattr(task, "encoder", None)
    crowded = data.crowded_transcripts(encoder.frames) if encoder else ""
    if crowded:
        logging.getLogger(__name__).warning(crowded)
    optimizer = build_optimizer(run, task.parameter_groups(), **device.facts.optimizer_flags)
    # The device may replace modules, and the group replicates (DDP) or shards (FSDP) the parameters.
    module, optimizer = device.prepare(task, optimizer)
    assert isinstance(module, Task)
    gather_dtype = policy.autocast_dtype if device.facts.narrow_gathers else None
    group.shard(module, optimizer, gather_dtype)

    attempt.computes = policy_record["computes"]
    attempt.metric, attempt.metric_mode = task.metric, task.metric_mode
    attempt.content = data.content()
    tracker = open_tracker(run, world, early_lines)
    attempt.tracker = tracker
    if not world.rank:
        tokenizer.save(str(run.run_dir))
    log_environment(run.run_dir, world, device, tracker)
    tracker.log("device", policy_record)
    if checkpoint is None:
        new_entries = {"warm-up steps": schedule.warmup, "from data": run.from_data}
        entries |= {name: value for name, value in new_entries.items() if value}
    entries |= {"ranks": world.size, "accumulate": settings.accumulate, "steps": planned_updates}
    if settings.max_hours:
        entries["hours"] = settings.max_hours
    entries["target"] = settings.target
    log_start(run, task, data, tracker, entries)

    trainer = Trainer(
        config=settings,
        device=device,
        precision=precision,
        policy=policy,
        group=group,
        checkpointer=checkpointer,
        tracker=tracker,
        seed=run.seed,
        run_dir=rank_folder(run.run_dir, world.rank),
        stop_requested=stop,
    )
    attempt.progress = trainer.progress
    try:
        with contextlib.closing(data):
            attempt.status = trainer.fit(module, data, optimizer, schedule=schedule, checkpoint=checkpoint)
    except (RuntimeError, MemoryError) as error:
        memory_error = out_of_memory_error(
            device, error, trainer.latest_batch, task.footprint(), classes=tokenizer.size
        )
        if memory_error is None:
            raise
        raise memory_error from error


def main(argv: list[str] | None = None, is_watched: bool = False) -> int:
    """Run one rank, write its outcome to ``result.json`` and return the exit code.

    ``argv`` is ``[RUN/config.yaml]``. Rank 0 acquires the lock of the run and writes to the run directory.
    Each other rank writes its outcome and its output to its own folder in ``RUN/ranks``. With ``is_watched``,
    this function does not return if the rank hangs, because the watchdog ends the process.
    """
    path = Path(*(sys.argv[1:] if argv is None else argv))
    if not path.is_file():
        print_notice(f"error: {path} does not exist on {platform.node()}. The start of a run writes it")
        return ConfigError.exit_code
    stop = StopRequest()
    lock = RunLock(path.parent)
    try:
        world = World.from_environment(os.environ)
        if world.size > 1:  # Torch and vendors' libraries read torchrun's variables.
            os.environ.update(world.variables())
        if not world.rank:
            lock.acquire()
    except (SpeechtrainError, OSError) as error:  # Another process may train the run and write its result.
        print_notice(f"error: {error}")
        return error.exit_code if isinstance(error, SpeechtrainError) else MachineError.exit_code
    if world.rank:
        with contextlib.suppress(OSError):  # If the disk is full, ``_attempt`` reports it.
            _redirect_output(rank_folder(path.parent, world.rank) / "output.log")
    try:
        return _attempt(path, stop, world, is_watched=is_watched)
    finally:
        lock.release()


def _redirect_output(path: Path) -> None:
    """Append stdout and stderr of this process and its children to a file from now on."""
    with open_append(path) as log:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(log.fileno(), stream.fileno())


def _attempt(path: Path, stop: StopRequest, world: World, is_watched: bool) -> int:
    """Train with the config at ``path``, write the outcome to the rank's folder and return the exit code."""
    folder = rank_folder(path.parent, world.rank)
    attempt, exit_code = Attempt(), 0
    for earlier_file in (folder / ERROR, folder / RESULT):
        earlier_file.unlink(missing_ok=True)
    try:
        train(run_config(load(path)), world, stop, attempt=attempt, is_watched=is_watched)
        result = attempt.result()
        attempt.group.rank_status.begin_phase(attempt.progress.step, "end")
        attempt.group.close()
        attempt.unwatch()
    except Exception as error:  # The process ends here. The parent reads the result.
        # The watchdog is stopped first. If it has found a hang, it writes its diagnosis as the result, and
        # ``unwatch`` does not return.
        attempt.unwatch()
        result = _failed_result(attempt, error, world.rank)
        exit_code = result["exit_code"]
        with contextlib.suppress(OSError):  # A full disk must not hide the cause of the failure.
            write_text(folder / ERROR, traceback.format_exc(), durable=False)
    try:
        write_result(folder, {**result, "limits": attempt.limits})
    except OSError as error:
        print_notice(f"error: {folder / RESULT} cannot be written: {error}")
        exit_code = exit_code or MachineError.exit_code
    # The trackers are closed after the result is written, because closing may take seconds, in which the
    # launcher may kill this process.
    attempt.end(result)
    return exit_code


def _failed_result(attempt: Attempt, error: Exception, rank: int) -> dict[str, Any]:
    """Return the content of ``result.json`` after ``error``."""
    cause = explain_disk_error(attempt.group.explain_error(error))
    exit_code = cause.exit_code if isinstance(cause, SpeechtrainError) else 1
    attempt.status = "failed"
    # PeerLost means that another rank has failed before, which is the cause.
    failure = {"rank": rank, "failed_at": time.time(), "is_cause": not isinstance(cause, PeerLost)}
    failure["is_out_of_memory"] = isinstance(cause, OutOfMemory)
    return {**attempt.result(), "error": _message(cause), "exit_code": exit_code, **failure}


def _message(error: Exception) -> str:
    """Return the message of a failed rank. If torchrun restarts the ranks, the message says so."""
    message = str(error)
    if not isinstance(error, SpeechtrainError):
        message = described_error(error)
    for restart in _restart_entry(failures=1).values():
        message = f"{message.strip()} (restart {restart} follows)"
    return message.strip()


def _restart_entry(failures: int = 0) -> dict[str, str]:
    """Return ``{"restart": "N of LIMIT"}`` for torchrun's restart number N after ``failures`` more failures.

    The mapping is empty if torchrun has not restarted the ranks, or will not restart them.
    """
    number = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) + failures
    limit = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    return {"restart": f"{number} of {limit}"} if 0 < number <= limit else {}


def end_process(code: int) -> NoReturn:
    """End the process with the exit code ``code``.

    Two kinds of ranks end without the exit handlers of Python, which may wait forever: a failed rank among
    several, whose collectives may never end, and a rank with a tracker that hangs, whose library may wait for
    a server.
    """
    if is_hanging() or (code and "RANK" in os.environ):
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        kill_descendants(os.getpid())
        os._exit(code)
    stdout_problem()  # A full disk below stdout must not change the exit code.
    sys.exit(code)
