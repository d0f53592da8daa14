"""What Hydra itself does: it starts the jobs of a sweep, and prints for options such as ``--info``."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import platform
import secrets
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from speechtrain.checkpoint.best_metric import signed, sort_key
from speechtrain.errors import (
    MachineError,
    Preempted,
    SpeechtrainError,
    class_of,
    print_notice,
)
from speechtrain.files import print_line, read_json, table_lines, write_json
from speechtrain.launch.supervise import stop_signals
from speechtrain.launch.sweep_end import ending_with, stop_ranks
from speechtrain.overrides import key_of_override
from speechtrain.run_directory import RunResult, metric_text, speed_text
from speechtrain.start.auto_device import auto_device, check_same_device, may_be_auto
from speechtrain.start.command_line import Command
from speechtrain.start.completion import print_completions
from speechtrain.start.compose import explain, offer_choices
from speechtrain.start.external_launch import find_external_launch
from speechtrain.start.job import NewFolders, start_job
from speechtrain.start.run_name import base_folder, run_name
from speechtrain.start.study_jobs import is_study, job_name, register_study, run_job, trial_of
from speechtrain.start.targets import ALLOW_TARGETS
from speechtrain.study import trial_folder

_CONFIG_PATH = "pkg://speechtrain.conf"


def run_hydra(command: Command) -> None:
    """Let Hydra start the jobs of a sweep, complete a word of the shell, or print what it composes.

    If a job fails, its error is printed and the remaining jobs run. At the end, the empty folders that Hydra
    has made are removed.

    Raises ConfigError if Hydra refuses the command, MachineError if a folder cannot be made, and the
    SpeechtrainError of a job that failed.
    """
    folders = NewFolders()
    jobs = _Jobs(command)
    _register_resolvers(command, folders, jobs)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_process_of(command))
            if command.is_sweep:
                stack.enter_context(stop_signals(jobs.stop))
            register_study(command.overrides)
            is_completion = bool({"--shell-completion", "-sc"} & {*command.flags})
            # A completion reads no device, so it does not load the drivers of accelerators.
            offer_choices(["device=cpu"] if is_completion else command.overrides, command.config_dir)
            main = hydra.main(version_base="1.3", config_path=_CONFIG_PATH, config_name="config")
            app = main(lambda _: jobs())  # Hydra needs a function, and not a callable object.
            if is_completion:
                print_completions(app)
                return
            with contextlib.suppress(_Stop):
                app()
    except SpeechtrainError:
        raise
    except Exception as error:  # Hydra raised it while composing. ``jobs`` catches the errors of jobs.
        # An OSError is about a folder, except Hydra's error of a missing choice, which has both types.
        if isinstance(error, HydraException) or not isinstance(error, OSError):
            raise explain(error, command.overrides, command.config_dir) from error
        if error.filename is None:  # stdout cannot be written.
            raise
        cause = f"{error.filename}: {error.strerror}"
        raise MachineError(f"{cause}. Set run_dir or OUTPUT_DIR to a writable folder") from error
    finally:
        jobs.read_results()
        folders.remove_empty()
    jobs.conclude()


def _register_resolvers(command: Command, folders: NewFolders, jobs: _Jobs) -> None:
    """Register the resolvers of the folders of a sweep and of its runs.

    The settings of Hydra in conf/config.yaml use them as ``${speechtrain.run_name:}``. OmegaConf passes the
    whole config to a resolver as ``_root_``.
    """

    def name_of_run(*, _root_: DictConfig) -> str:
        settings = _root_.hydra
        trial_number = trial_of(settings)
        if trial_number is not None:
            return trial_folder(trial_number)
        choices, swept_keys = settings.runtime.choices, _swept_keys(command, settings)
        return run_name(choices, _overrides(settings), command.config_dir, swept_keys)

    def sweep_dir(*, _root_: DictConfig) -> str:
        folder = str(_root_.run_dir or base_folder())
        if is_study(_root_.hydra) and not _root_.run_dir:
            folder = f"{folder}/study-{name_of_run(_root_=_root_)}"
        scheduler = str(_root_.hydra.runtime.choices["hydra/launcher"])
        if jobs.sweep_dir is None and scheduler.startswith("submitit"):
            print_line(f"hydra/launcher={scheduler}: the logs of the jobs are in {folder}/.submitit")
        jobs.sweep_dir = folder
        if _root_.dry_run:
            # Hydra writes this file in a dry run also, which must leave no files.
            folders.note_missing(f"{folder}/multirun.yaml")
        return folders.note_missing(folder)

    OmegaConf.register_new_resolver("speechtrain.run_name", name_of_run, replace=True)
    OmegaConf.register_new_resolver("speechtrain.sweep_dir", sweep_dir, replace=True)


@contextlib.contextmanager
def _process_of(command: Command) -> Iterator[None]:
    """Return a context with the ``sys.argv`` and the environment variables that Hydra needs for ``command``.

    Its end restores both.
    """
    original_argv = sys.argv
    variables = {"HYDRA_FULL_ERROR": "1"}  # With it, Hydra raises an error instead of printing lines.
    if command.is_sweep:
        # The workers of joblib and the jobs of submitit inherit it: no imports from the current folder.
        variables["PYTHONSAFEPATH"] = "1"
    new_names = variables.keys() - os.environ.keys()
    logging.raiseExceptions = False  # logging would print an error for a closed pipe, as in --info | head.
    sys.argv = [original_argv[0], *command.flags, *command.overrides]
    os.environ |= variables
    try:
        yield
    finally:
        sys.argv = original_argv
        for name in new_names:
            os.environ.pop(name, None)


def _overrides(settings: Any) -> list[str]:
    """Return the overrides of a job as the user wrote them, with interpolations unresolved.

    ``settings`` is the node ``hydra`` of the config, here and below.
    """
    overrides = OmegaConf.to_container(settings.overrides.task, resolve=False)
    return [str(override) for override in overrides or ()]


def _swept_keys(command: Command, settings: Any) -> tuple[str, ...]:
    """Return the keys whose values the sweep of a job varies.

    They are the keys of the job's overrides that ``command`` does not set to a single value.
    """
    fixed_keys = set()
    for override in OverridesParser.create().parse_overrides(command.overrides):
        if not override.is_sweep_override():
            fixed_keys.add(key_of_override(override.input_line or ""))
    job_keys = map(key_of_override, _overrides(settings))
    return tuple(key for key in job_keys if key not in fixed_keys)


_Return = float | RunResult | Exception | None
"""What a job returns to Hydra's sweeper."""


class _Stop(BaseException):
    """Ends Hydra silently. It is not an Exception, because Hydra would print lines about an Exception."""


@dataclass(frozen=True)
class _JobResult:
    """The result of one job of a sweep. The job writes it to a JSON file for the table at the end."""

    overrides: str  # the overrides that the sweep varies, separated by blanks
    status: str  # RunResult.status, or the class name of the error
    metric: float | None = None  # the metric of the best checkpoint
    metric_mode: str = ""  # max: a higher metric is better
    metrics: dict[str, float | None] = field(default_factory=dict)  # all metrics of this checkpoint
    metric_text: str = "-"  # the metric with name and unit
    error: str = ""  # the message of the error
    exit_code: int = 0  # the exit code of a failure, 0 for success and for a preempted job
    speed: str = ""  # the speed with units
    computes: str = ""  # ``RunResult.computes``


def _session() -> tuple[str, int]:
    """Return the host and the session of this process."""
    return platform.node(), os.getsid(0)


def _metric_text(result: RunResult) -> str:
    """Return the metric that chose the checkpoint, with its name and unit, such as ``wer 3.21 %``."""
    if result.metric is None:
        return "-"
    for name, value in (result.metrics or {}).items():
        if value == result.metric:
            return metric_text(name, value)
    return f"{result.metric:.4g}"


class _Jobs:
    """The jobs of a sweep and their results. Hydra calls this object for each job.

    A launcher of Hydra may run the jobs of a sweep in other processes, on other hosts. It pickles this object
    for them. Each job of a sweep therefore writes its result into a folder next to the runs, which all hosts
    can read.
    """

    def __init__(self, command: Command) -> None:
        self.command = command
        self.command_pid = os.getpid()
        self.command_session = _session()
        self.auto_device = ""  # the device that ``auto`` means on the host of the command
        if may_be_auto(command.overrides):
            self.auto_device = auto_device().name
        self.inherited_variables = {name: text for name, text in os.environ.items() if name == ALLOW_TARGETS}
        self.error: Exception | None = None  # the error that ends the command
        self.results_name = f".sweep-{secrets.token_hex(8)}"  # name of the folder of the results
        self.sweep_dir: str | None = None  # folder of the runs of a sweep. The resolver of Hydra sets it.
        self.results: list[_JobResult] = []

    def __call__(self) -> _Return:
        """Start the run of a job and return its metric, which an optimizing sweeper of Hydra reads.

        The sweeper of studies reads the result of the job, or its error.
        """
        # Jobs of a batch system have another session, and outlive the command.
        if self._is_in_command() or self.command_session != _session():
            return self._start_run()
        with ending_with(self.command_pid):
            return self._start_run()

    def _start_run(self) -> _Return:
        os.environ |= self.inherited_variables  # The job may run in another process.
        settings = HydraConfig.get()
        job = replace(self.command, overrides=_overrides(settings), swept=_swept_keys(self.command, settings))
        swept_overrides = " ".join(text for text in job.overrides if key_of_override(text) in job.swept)
        try:
            if not self._is_in_command():
                find_external_launch(None)  # Raises if several processes were started for this job.
                check_same_device(settings.runtime.choices, self.auto_device)
            print_line(f"{job_name(settings)}: {swept_overrides}")
            result = run_job(partial(start_job, job, Path(settings.runtime.output_dir)), settings)
        except Exception as error:
            return self._handle_error(error, swept_overrides, settings)
        finally:
            with contextlib.suppress(OSError):  # rmdir removes an empty folder only.
                Path(settings.runtime.output_dir).rmdir()
        if is_study(settings):
            return result
        job_result = _JobResult(
            swept_overrides,
            result.status,
            result.metric,
            result.metric_mode,
            result.metrics or {},
            _metric_text(result),
            speed=speed_text(result.speed),
            computes=result.computes,
        )
        self._write_result(job_result, settings)
        # Hydra's optimizing sweepers minimise by default.
        return None if result.metric is None else signed(result.metric, result.metric_mode)

    def _is_in_command(self) -> bool:
        """Return whether this process is the command itself and not a process of Hydra's launcher."""
        return os.getpid() == self.command_pid

    def stop(self) -> None:
        """Handle a stop signal to the command of a sweep: wait until the ranks have saved, and end Hydra.

        While a run trains in this process, its launcher handles the signals. A second signal does not wait.
        """
        if self.error is not None:
            raise KeyboardInterrupt
        self.error = Preempted("stopped by a signal. The same command continues")
        stop_ranks()
        raise _Stop

    def _handle_error(self, error: Exception, swept_overrides: str, settings: Any) -> _Return:
        """Store the error of a job. Return a value for the sweeper if the sweep continues, else end Hydra."""
        is_failure = isinstance(error, SpeechtrainError) and not isinstance(error, Preempted)
        exit_code = getattr(error, "exit_code", 1) if is_failure else 0
        job_result = _JobResult(swept_overrides, type(error).__name__, error=str(error), exit_code=exit_code)
        self._write_result(job_result, settings)
        if is_failure:
            print_notice(f"error: {job_name(settings)} ({swept_overrides}): {error}")
            if is_study(settings):
                # Hydra's launcher cannot pickle all classes of errors.
                return class_of(exit_code)(str(error))
            return math.nan  # An optimizing sweeper continues with its next job.
        if self._is_in_command():
            self.error = error
            raise _Stop from error
        if is_study(settings) and isinstance(error, Preempted):
            return error  # The study starts the trial again, which continues from its checkpoint.
        raise error  # Hydra's launcher passes the error from this process to the command.

    def _write_result(self, job_result: _JobResult, settings: Any) -> None:
        """Write the result of a sweep's job to a file that is named by the number of the job.

        The results of a study's trials are in the study.
        """
        if not is_study(settings):
            folder = Path(settings.sweep.dir, self.results_name)
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / f"{settings.job.num:06}.json", asdict(job_result))

    def read_results(self) -> None:
        """Read the results of a sweep's jobs in the order of the jobs, and remove their folder."""
        if self.sweep_dir is not None:
            folder = Path(self.sweep_dir, self.results_name)
            for path in sorted(folder.glob("*.json")):
                self.results.append(_JobResult(**read_json(path)))
            shutil.rmtree(folder, ignore_errors=True)

    def conclude(self) -> None:
        """Print a table of the results if there are several. Raise the error that ended the command, if any.

        Otherwise raise an error if jobs of a sweep failed. It has the exit code of the first of them.
        """
        if len(self.results) > 1:
            self._print_table()
        if self.error is not None:
            raise self.error
        failures = [job_result for job_result in self.results if job_result.exit_code]
        if failures:
            message = failures[0].error
            if len(self.results) > 1:
                message = f"{len(failures)} of {len(self.results)} jobs failed, first: {message}"
            raise class_of(failures[0].exit_code)(message)

    def _print_table(self) -> None:
        """Print one line per job. The column of speeds is omitted if no job has a speed.

        If the jobs computed with different policies, the last column has them. The job that is better than
        all others is marked.
        """
        keys = [sort_key(job.metric, job.metrics, job.metric_mode) for job in self.results]
        has_speeds = any(job_result.speed for job_result in self.results)
        has_policies = len({job_result.computes for job_result in self.results} - {""}) > 1
        names = ["job", "metric", "status", "speed" if has_speeds else "", "overrides"]
        rows = [[*names, "computes" if has_policies else ""]]
        for number, (job_result, key) in enumerate(zip(self.results, keys, strict=True), 1):
            is_best = job_result.metric is not None and key == min(keys) and keys.count(key) == 1
            overrides = f"{job_result.overrides}  (best)" if is_best else job_result.overrides
            cells = [f"job {number}", job_result.metric_text, job_result.status, job_result.speed, overrides]
            rows.append([*cells, job_result.computes if has_policies else ""])
        for line in table_lines(rows):
            print_line(line)
