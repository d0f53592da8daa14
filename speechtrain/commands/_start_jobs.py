"""Hydra's app: it composes the config of each job of a command and starts the job's run."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from speechtrain.commands._choices import refuse_bases
from speechtrain.commands._command_line import Command
from speechtrain.commands._continue_run import base_folder, continued, run_name, written_files
from speechtrain.commands._external_launch import started_together
from speechtrain.commands._hydra_app import compose, explain
from speechtrain.commands._start_run import start_run
from speechtrain.errors import ConfigError, MachineError, Preempted, SpeechtrainError, one_line
from speechtrain.run_directory import CONFIG

_CONFIG_PATH = "pkg://speechtrain.conf"


def start_jobs(command: Command) -> None:
    """Compose each job's config and start its run; a job whose run exists continues it.

    There is one job, or with ``-m`` all jobs of a sweep through Hydra's sweeper and launcher; a failed job
    of a sweep is reported and the others run. Folders that stay empty are removed. Raises ConfigError
    for what Hydra refuses, MachineError where a folder cannot be made, and the SpeechtrainError of a job.
    """
    folders, jobs = _Folders(), _Jobs(command)

    def name_of_run(*, _root_: DictConfig) -> str:
        settings = _root_.hydra
        return run_name(settings.runtime.choices, _typed(settings), command.config_dir)

    def folder_of_run(*, _root_: DictConfig) -> str:
        return folders.expect(str(_root_.run_dir or base_folder() / name_of_run(_root_=_root_)))

    def folder_of_sweep(*, _root_: DictConfig) -> str:
        return folders.expect(str(_root_.run_dir or base_folder()))

    resolvers = {"run_name": name_of_run, "run_dir": folder_of_run, "sweep_dir": folder_of_sweep}
    for name, resolver in resolvers.items():
        OmegaConf.register_new_resolver(f"speechtrain.{name}", resolver, replace=True)

    previous = sys.argv
    sys.argv = [previous[0], *command.flags, *command.overrides]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing several lines
    try:
        refuse_bases(command.overrides, command.config_dir)
        _refuse_callbacks(command)
        start = hydra.main(version_base="1.3", config_path=_CONFIG_PATH, config_name="config")
        with contextlib.suppress(_Stop):
            start(lambda config: jobs(config))()
    except SpeechtrainError:
        raise
    except Exception as error:  # it comes from composing: jobs keep theirs
        if isinstance(error, HydraException) or not isinstance(error, OSError):  # a missing choice is both
            raise explain(error, command.overrides, command.config_dir) from error
        where = f"{error.filename or 'the run directory'}: {error.strerror}"
        raise MachineError(f"{where}; set run_dir or OUTPUT_DIR to a writable folder") from error
    finally:
        sys.argv = previous
        os.environ.pop("HYDRA_FULL_ERROR", None)
        folders.remove_empty()
    jobs.conclude()


def _refuse_callbacks(command: Command) -> None:
    """Refuse ``hydra.callbacks`` in a config folder: Hydra builds a callback from any class."""
    folder = command.config_dir
    if folder is None or not Path(folder).is_dir():  # Hydra itself reports that it is missing
        return
    overrides = [o for o in command.overrides if "=" in o and not (command.is_sweep and "," in o)]
    if OmegaConf.select(compose(overrides, folder, return_hydra_config=True), "hydra.callbacks"):
        raise ConfigError(f"hydra.callbacks: {folder} sets it, but a callback can run any code; remove it")


def _typed(settings: Any) -> list[str]:
    """The overrides as typed: Hydra would resolve an interpolation in its own node."""
    return [str(o) for o in OmegaConf.to_container(settings.overrides.task, resolve=False) or ()]


def _start(job: Command, config: DictConfig, settings: Any) -> float | None:
    """Start the run of a job, which Hydra has composed; its metric, which an optimizing sweeper reads."""
    # absolute: ranks on other hosts and a resumed command must use the same folder
    run_dir = Path(settings.runtime.output_dir).resolve()
    if (run_dir / CONFIG).is_file():
        config = continued(run_dir, job)
    else:
        config.run_dir = str(run_dir)
        if job.together and config.world_size == 1:
            config.world_size = job.together.world.size
    written = written_files(settings.runtime.choices, job.config_dir)
    metric: float | None = start_run(job, config, written)["metric"]
    return metric


class _Folders:
    """The folders that Hydra makes: those that stay empty are removed when the command ends."""

    def __init__(self) -> None:
        self.missing: set[Path] = set()

    def expect(self, folder: str) -> str:
        path = Path(folder).absolute()
        self.missing |= {p for p in (path, *path.parents) if not p.exists()}
        return folder

    def remove_empty(self) -> None:
        for path in sorted(self.missing, key=lambda p: len(p.parts), reverse=True):
            with contextlib.suppress(OSError):  # not empty, or never made
                path.rmdir()


class _Stop(BaseException):
    """Exits Hydra silently: Hydra prints lines of its own for any Exception of a job."""


class _Jobs:
    """The jobs of one command, and their errors."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.process = os.getpid()
        self.count = 0
        self.errors: list[Exception] = []

    def __call__(self, config: DictConfig) -> float | None:
        settings = HydraConfig.get()
        job = replace(self.command, overrides=_typed(settings))
        self.count += 1
        try:
            if os.getpid() != self.process:
                started_together(None)  # refuses several processes for one job of a sweep
            return _start(job, config, settings)
        except Exception as error:
            if os.getpid() != self.process:  # a sweep's launcher runs it: Hydra reports to the parent
                raise
            self.errors.append(error)
            is_sweep = settings.mode == RunMode.MULTIRUN
            if not is_sweep or isinstance(error, Preempted) or not isinstance(error, SpeechtrainError):
                raise _Stop from error
            named = " ".join(job.overrides)
            print(f"speechtrain: error: job {self.count} ({named}): {one_line(str(error))}", file=sys.stderr)
            return math.nan  # an optimizing sweeper continues with its next job
        finally:
            with contextlib.suppress(OSError):  # a job of a sweep that wrote nothing keeps no folder
                Path(settings.runtime.output_dir).rmdir()

    def conclude(self) -> None:
        """Raise the jobs' error; if several failed, the first one with the number of failures."""
        if not self.errors:
            return
        last, first = self.errors[-1], self.errors[0]
        if self.count == 1 or not isinstance(last, SpeechtrainError) or isinstance(last, Preempted):
            raise last
        raise type(first)(f"{len(self.errors)} of {self.count} jobs failed; the first: {first}")
