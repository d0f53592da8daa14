"""From a composed config to a finished run: check, run directory, ranks, outcome."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from speechtrain import errors
from speechtrain.commands._external_launch import RENDEZVOUS, ExternalLaunch, world_of
from speechtrain.config.build import build, dry_build
from speechtrain.config.check import check
from speechtrain.config.migrations import migrate_limits
from speechtrain.config.resolved import dump
from speechtrain.config.targets import ALLOW_TARGETS
from speechtrain.devices.base import Device
from speechtrain.errors import ConfigError, DataError, MachineError, Preempted, RunError, SpeechtrainError
from speechtrain.files import atomic, write_json
from speechtrain.launcher import AGENT, NETWORK_VARIABLES, Job, Launcher, Result
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

_USERS = (ConfigError, DataError, MachineError)
_ENDED = ("finished", "target", "time")
_MIN_FREE = 256 * 2**20  # bytes that a run needs on its disk


def launch(
    configure: Callable[[], DictConfig], run_dir: Path, argv: list[str], began: Mapping[str, Any]
) -> dict[str, Any]:
    """Start the run in ``run_dir``, or continue it, and return its result.

    ``configure`` makes the config; ranks that were started together learn of its error, too.
    ``began`` (overrides and the user's YAML files) is kept with a new run. A finished run returns its
    result at once. Raises the SpeechtrainError that stopped the run, here or in a rank.
    """
    run_dir, world = run_dir.resolve(), world_of(argv)
    if world.size == 1:
        return _launched(configure(), run_dir, argv, began, None)
    together = ExternalLaunch(world)
    with together.telling(run_dir):
        config = configure()
        if config.world_size == 1:
            config.world_size = world.size
        return _launched(config, run_dir, argv, began, together)


def _launched(
    config: DictConfig, run_dir: Path, argv: list[str], began: Mapping[str, Any], together: Launcher | None
) -> dict[str, Any]:
    config.run_dir = str(run_dir)
    plain = check(config)
    dry_build(config)
    device, launcher = _parts(config)
    launcher = together or launcher
    environment, forwarded = _environment(device, config.world_size), device.facts.forwarded_variables
    job = Job(run_dir / CONFIG, run_dir, config.world_size, environment, forwarded)
    launcher.check(job)
    _check_disk(run_dir)
    if config.dry_run:
        print(launcher.render(job))
        return {"status": "dry run", "metric": None}
    if launcher.is_here(job):
        device.check(job.world_size)
    done = read_result(run_dir)
    if done and done.get("status") in _ENDED and migrate_limits(done.get("limits")) == plain["trainer"]:
        print(f"{run_dir} is done: {_describe(done)}")
        return done
    is_new = not (run_dir / CONFIG).exists()
    run_dir.mkdir(parents=True, exist_ok=True)
    lock = RunLock(run_dir).acquire()
    # before the config: a run that has only a config would refuse its own command
    _write_about(run_dir, is_new, {**about(argv), "seed": config.seed, "device": device.name}, began)
    with atomic(run_dir / CONFIG) as temporary:
        temporary.write_text(dump(config))
    for rank in range(max(job.world_size, _ranks_before(run_dir))):
        (rank_folder(run_dir, rank) / RESULT).unlink(missing_ok=True)
    lock.release()  # rank 0 takes it over
    simulated = config.trainer.simulate_world
    if simulated is not None:
        share = f"world_size {job.world_size} × accumulate {simulated // job.world_size}"
        print(f"trainer.simulate_world={simulated}: {share}", flush=True)
    try:
        ended = launcher.launch(job)
    except SpeechtrainError:  # no process was started
        if is_new:
            _discard(run_dir)
        raise
    if ended.submitted:
        print(ended.submitted)
        return {"status": "submitted", "metric": None}
    result = _outcome(ended, run_dir, is_new)
    result["limits"] = plain["trainer"]
    write_json(run_dir / RESULT, result)
    if result["status"] == "preempted":
        raise Preempted(f"saved at step {result['steps']} in {run_dir}; the same command continues")
    print(f"{run_dir}: {_describe(result)}")
    return result


def _outcome(ended: Result, run_dir: Path, is_new: bool) -> dict[str, Any]:
    """The result of a run whose processes have ended. Raises the error that stopped it."""
    result = read_result(run_dir)
    if result is None or result["status"] == "failed":
        result = read_failure(run_dir)
    if ended.cause and (result is None or result["status"] == "failed"):
        raise MachineError(ended.cause)
    if result is None:
        raise RunError(f"the ranks ended with code {ended.returncode} and wrote no {run_dir / RESULT}")
    if result["status"] == "failed":
        error = _error_of(result, run_dir)
        if is_new and result.get("is_cause", True) and isinstance(error, _USERS):
            _discard(run_dir)
        raise error
    return result


def _parts(config: DictConfig) -> tuple[Device, Launcher]:
    device: Device = build(config, "device")
    device.check_precision(build(config, "precision"))
    return device, build(config, "launcher")


def _environment(device: Device, world_size: int) -> dict[str, str]:
    environment = device.environment(world_size)
    environment[NETWORK_VARIABLES] = " ".join(device.facts.network_variables)
    if ALLOW_TARGETS in os.environ:
        environment[ALLOW_TARGETS] = os.environ[ALLOW_TARGETS]
    return environment


def _check_disk(run_dir: Path) -> None:
    folder = next(p for p in (run_dir, *run_dir.parents) if p.exists())
    if not os.access(folder, os.W_OK):
        raise MachineError(f"{folder} is not writable; set run_dir or OUTPUT_DIR to a folder that is")
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    if free < _MIN_FREE:
        raise MachineError(
            f"{folder} has {free >> 20} MiB free, a run needs {_MIN_FREE >> 20}; free some or set run_dir"
        )


def _ranks_before(run_dir: Path) -> int:
    """One more than the highest rank that has a folder in this run."""
    return 1 + max((int(p.name) for p in (run_dir / RANKS).glob("*") if p.name.isdigit()), default=0)


def _write_about(run_dir: Path, is_new: bool, start: dict[str, Any], began: Mapping[str, Any]) -> None:
    """Write ``run.json``: the first start, and the latest one as ``latest``."""
    first = {**start, **began} if is_new else {**read_about(run_dir), "latest": start}
    write_json(run_dir / ABOUT, first)


def _discard(run_dir: Path) -> None:
    """Remove the files of a run that a user's error ended before its first step, if there are no others."""
    begun = {CONFIG, ABOUT, DEVICE, RESULT, ERROR, "lock", AGENT, RENDEZVOUS}
    if {path.name for path in run_dir.iterdir()} <= {*begun, RANKS}:
        shutil.rmtree(run_dir / RANKS, ignore_errors=True)
        for name in begun:
            (run_dir / name).unlink(missing_ok=True)


def _error_of(result: dict[str, Any], run_dir: Path) -> SpeechtrainError:
    by_code = {
        c.exit_code: c
        for c in vars(errors).values()
        if isinstance(c, type) and issubclass(c, SpeechtrainError)
    }
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
