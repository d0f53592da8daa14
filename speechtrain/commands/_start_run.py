"""From a composed config to a finished run: check, run directory, ranks, outcome."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from speechtrain import errors
from speechtrain.checkpoint.whole import Checkpointer
from speechtrain.commands._command_line import Command
from speechtrain.commands._external_launch import RENDEZVOUS
from speechtrain.config.build import build_device, build_launcher, build_precision, dry_build
from speechtrain.config.check import check
from speechtrain.config.migrations import migrate_limits
from speechtrain.config.resolved import dump
from speechtrain.config.targets import ALLOW_TARGETS
from speechtrain.errors import ConfigError, DataError, MachineError, Preempted, RunError, SpeechtrainError
from speechtrain.files import atomic, write_json
from speechtrain.launcher import AGENT, NETWORK_VARIABLES, Job, Result
from speechtrain.run_directory import (
    ABOUT,
    CONFIG,
    DEVICE,
    ERROR,
    RANKS,
    RESULT,
    RunLock,
    about,
    rank_folder,
    read_about,
    read_failure,
    read_result,
)

_FIXABLE = (ConfigError, DataError, MachineError)
"""Errors that the user corrects: the files of a new run that ends with one at its start are removed."""

_ENDED = ("finished", "target", "time")
_MIN_FREE = 256 * 2**20  # bytes that a run needs on its disk


def start_run(command: Command, config: DictConfig, written: Mapping[str, str]) -> dict[str, Any]:
    """Start the run whose directory ``config`` names, or continue it; return its result when it has ended.

    A new run keeps ``written``, the user's own YAML files. A finished run returns its result at once, unless
    other limits are set now.
    Raises the SpeechtrainError that stopped the run, here or in a rank.
    """
    run_dir = Path(config.run_dir)
    plain = check(config)
    dry_build(config)
    device, launcher = build_device(config), command.together or build_launcher(config)
    device.check_precision(build_precision(config))
    environment = device.environment(config.world_size)
    environment |= {name: value for name, value in os.environ.items() if name == ALLOW_TARGETS}
    environment[NETWORK_VARIABLES] = " ".join(device.facts.network_variables)
    forwarded, size = device.facts.forwarded_variables, int(config.world_size)
    job = Job(run_dir / CONFIG, run_dir, world_size=size, environment=environment, forwarded=forwarded)
    launcher.check(job)
    _check_disk(run_dir)
    if config.dry_run:
        print(launcher.render(job))
        return {"status": "dry run", "metric": None}
    if launcher.is_here(job):
        device.check(job.world_size)
    done = read_result(run_dir)
    if done and _is_complete(done, run_dir) and migrate_limits(done.get("limits")) == plain["trainer"]:
        print(f"{run_dir} is done: {_describe(done)}")
        return done

    is_new = not (run_dir / CONFIG).exists()
    start = {**about(command.argv), "seed": config.seed, "device": device.name}
    first = {**start, "overrides": command.overrides, "written": dict(written)}
    _write(config, job, first if is_new else {**read_about(run_dir), "latest": start})
    try:
        ended = launcher.launch(job)
    except SpeechtrainError:  # no process was started
        if is_new:
            _discard(run_dir)
        raise
    if ended.submitted:
        print(ended.submitted)
        return {"status": "submitted", "metric": None}

    result = _outcome(ended, run_dir)
    if result["status"] == "failed":
        error = _error_of(result, run_dir)
        if is_new and result.get("is_cause", True) and isinstance(error, _FIXABLE):
            _discard(run_dir)
        raise error
    result["limits"] = plain["trainer"]
    write_json(run_dir / RESULT, result)
    if result["status"] == "preempted":
        raise Preempted(f"saved at step {result['steps']} in {run_dir}; the same command continues")
    print(f"{run_dir}: {_describe(result)}")
    return result


def _is_complete(result: Mapping[str, Any], run_dir: Path) -> bool:
    """True for the result of a run that has ended, if its last checkpoint is there."""
    saved = {folder.name for folder in Checkpointer(run_dir).folders()}
    return result.get("status") in _ENDED and f"step-{str(result.get('steps')).zfill(8)}" in saved


def _write(config: DictConfig, job: Job, story: dict[str, Any]) -> None:
    """Write the files that the ranks of a start read, ``story`` as ``run.json``; remove earlier results."""
    job.run_dir.mkdir(parents=True, exist_ok=True)
    lock = RunLock(job.run_dir).acquire()
    # first: without its overrides, the same command would be refused as another config
    write_json(job.run_dir / ABOUT, story)
    with atomic(job.config) as temporary:
        temporary.write_text(dump(config))
    for path in (job.run_dir / RESULT, *(job.run_dir / RANKS).glob(f"*/{RESULT}")):
        path.unlink(missing_ok=True)
    lock.release()  # rank 0 takes it over
    if simulated := config.trainer.simulate_world:
        share = f"world_size {job.world_size} × accumulate {simulated // job.world_size}"
        print(f"trainer.simulate_world={simulated}: {share}", flush=True)


def _outcome(ended: Result, run_dir: Path) -> dict[str, Any]:
    """The result of a run whose processes have ended.

    Raises MachineError if something outside ended them, RunError if no rank wrote a result.
    """
    result = read_result(run_dir)
    if result is None or result["status"] == "failed":
        result = read_failure(run_dir)
    if ended.cause and (result is None or result["status"] == "failed"):
        raise MachineError(ended.cause)
    if result is None and ended.returncode < 0:
        saved = Checkpointer(run_dir).folders()
        begin = f"from {saved[-1].name}" if saved else "from its beginning"
        name = signal.Signals(-ended.returncode).name
        memory = " (out of memory? dmesg tells)" if name == "SIGKILL" else ""
        raise MachineError(f"the run was ended by {name}{memory}; the same command continues {begin}")
    if result is None:
        raise RunError(f"the ranks ended with code {ended.returncode} and wrote no {run_dir / RESULT}")
    return result


def _check_disk(run_dir: Path) -> None:
    folder = next(p for p in (run_dir, *run_dir.parents) if p.exists())
    if not os.access(folder, os.W_OK):
        raise MachineError(f"{folder} is not writable; set run_dir or OUTPUT_DIR to a folder that is")
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    if free < _MIN_FREE:
        raise MachineError(
            f"{folder} has {free >> 20} MiB free, a run needs {_MIN_FREE >> 20}; free some or set run_dir"
        )


def _discard(run_dir: Path) -> None:
    """Remove the files of a run that a user's error ended before its first step, if there are no others."""
    begun = {CONFIG, ABOUT, DEVICE, RESULT, ERROR, "lock", AGENT, RENDEZVOUS}
    if {path.name for path in run_dir.iterdir()} <= {*begun, RANKS}:
        shutil.rmtree(run_dir / RANKS, ignore_errors=True)
        for name in begun:
            (run_dir / name).unlink(missing_ok=True)


def _error_of(result: dict[str, Any], run_dir: Path) -> SpeechtrainError:
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, SpeechtrainError)]
    by_code = {c.exit_code: c for c in classes}
    found = by_code.get(result["exit_code"], SpeechtrainError)
    folder = rank_folder(run_dir, int(result.get("rank", 0)))
    trace = f" (trace in {folder / ERROR})" if found is SpeechtrainError else ""
    if not result.get("is_cause", True):  # killed, or its host was lost: it wrote no error
        trace = f" (which one, and how it ended: {run_dir / AGENT}; the same command continues)"
    return found(result["error"] + trace)


def _describe(result: dict[str, Any]) -> str:
    metrics = result.get("metrics", {})
    named = ", ".join(f"{k} {v:.4f}" for k, v in metrics.items() if "/" not in k and isinstance(v, float))
    return f"{result['status']} at step {result.get('steps')}{', ' + named if named else ''}"
