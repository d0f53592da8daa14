"""The jobs of ``speechtrain train``: Hydra composes the config of each job, then the run of the job starts.

A command has one job. With ``-m`` it is a sweep, which has several jobs.
"""

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
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from speechtrain.checkpoint.best_metric import signed, sort_key
from speechtrain.errors import (
    ConfigError,
    MachineError,
    MissingPackage,
    Preempted,
    SpeechtrainError,
    class_of,
    print_notice,
)
from speechtrain.files import print_line, read_json, table_lines, write_json
from speechtrain.launch.supervise import stop_signals
from speechtrain.launch.sweep import ending_with, stop_ranks
from speechtrain.overrides import key_of_override
from speechtrain.run_directory import CONFIG, RunResult, metric_text, speed_text
from speechtrain.start.auto_device import announce_auto, auto_device, check_same_device, may_be_auto
from speechtrain.start.choices import option_value
from speechtrain.start.command_line import Command
from speechtrain.start.completion import print_completions
from speechtrain.start.compose import compose, compose_with_choices, explain, offer_choices, settle
from speechtrain.start.external_launch import find_external_launch
from speechtrain.start.finetuned import FINETUNED
from speechtrain.start.from_data import explicit_keys, follow_data
from speechtrain.start.on_host import raise_or_warn
from speechtrain.start.recipe_needs import settle_needs
from speechtrain.start.resolved import with_absolute_paths
from speechtrain.start.resume import config_to_continue, continue_own_run
from speechtrain.start.run_name import base_folder, run_name
from speechtrain.start.start import start_run
from speechtrain.start.study_jobs import is_study, job_name, register_study, run_job, trial_of
from speechtrain.start.targets import ALLOW_TARGETS
from speechtrain.start.user_yaml import user_yaml_files
from speechtrain.study import trial_folder

_CONFIG_PATH = "pkg://speechtrain.conf"


def start_jobs(command: Command) -> None:
    """Compose the config of each job of ``command`` and start its run. A run that exists continues.

    Hydra's sweeper and launcher run the jobs of a sweep. If one of these jobs fails, its error is printed and
    the remaining jobs run. At the end, the empty folders that Hydra has made are removed.

    Raises ConfigError if Hydra refuses the command, MachineError if a folder cannot be made, and the
    SpeechtrainError of a job that failed.
    """
    folders = _Folders()
    jobs = _Jobs(command)
    _register_resolvers(command, folders, jobs)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_process_of(command))
            if command.is_sweep:
                stack.enter_context(stop_signals(jobs.stop))
            register_study(command.overrides)
            if "hydra.verbose" in map(key_of_override, command.overrides):
                raise ConfigError(
                    "hydra.verbose: Hydra prints no log here. --info=all prints how it composes"
                )
            if option_value(command.flags, "--cfg", "-c") == "job":
                _print_config(command)
                return
            is_completion = bool({"--shell-completion", "-sc"} & {*command.flags})
            # A completion reads no device, so it does not load the drivers of accelerators.
            offer_choices(["device=cpu"] if is_completion else command.overrides, command.config_dir)
            main = hydra.main(version_base="1.3", config_path=_CONFIG_PATH, config_name="config")
            app = main(lambda config: jobs(config))  # Hydra needs a function, and not a callable object.
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


def _print_config(command: Command) -> None:
    """Print the config of a job as YAML. Hydra would print it with the values that ``settle`` removes."""
    config, _, notices = compose_with_choices(command.overrides, command.config_dir)
    for notice in notices:
        print_notice(notice)
    if "--resolve" in command.flags:
        OmegaConf.resolve(config)
    package = option_value(command.flags, "--package", "-p")
    node: Any = OmegaConf.select(config, package) if package else config
    if not OmegaConf.is_config(node):
        raise ConfigError(f"--package {package}: the config has no such group")
    heading = f"# @package {package}\n" if package else ""
    print(heading + OmegaConf.to_yaml(node), end="")


def _register_resolvers(command: Command, folders: _Folders, jobs: _Jobs) -> None:
    """Register the resolvers of run names and folders.

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

    def run_dir(*, _root_: DictConfig) -> str:
        if _root_.run_dir:
            return folders.note_missing(str(_root_.run_dir))
        return folders.note_missing(str(base_folder() / name_of_run(_root_=_root_)))

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

    resolvers = {"run_name": name_of_run, "run_dir": run_dir, "sweep_dir": sweep_dir}
    for name, resolver in resolvers.items():
        OmegaConf.register_new_resolver(f"speechtrain.{name}", resolver, replace=True)


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
    if settings.mode != RunMode.MULTIRUN:
        return ()
    fixed_keys = set()
    for override in OverridesParser.create().parse_overrides(command.overrides):
        if not override.is_sweep_override():
            fixed_keys.add(key_of_override(override.input_line or ""))
    job_keys = map(key_of_override, _overrides(settings))
    return tuple(key for key in job_keys if key not in fixed_keys)


def _start(job: Command, config: DictConfig, settings: Any) -> RunResult:
    """Start or continue the run of a job, and return its result.

    ``job`` is the command with the overrides of this job, and ``config`` is what Hydra has composed from it.
    """
    # The path is absolute, because ranks on other hosts and a resumed command must use the same folder.
    run_dir = Path(settings.runtime.output_dir).resolve()
    user_files = user_yaml_files(settings.runtime.choices, job.config_dir)
    if (run_dir / CONFIG).is_file():
        if config.run_dir is None:  # The run was found by its name, not named by the user.
            config = continue_own_run(run_dir, job, config)
        else:
            config = config_to_continue(run_dir, job)
    else:
        config = _new_config(job, config, settings, run_dir)
        is_plan = settle_needs(config)  # A dry run with missing data only prints a plan.
        keys = explicit_keys(job.overrides, user_files)
        if job.external_launch:  # Another program has started the ranks.
            keys.add("world_size")
        follow_data(config, keys, is_plan=is_plan)
    return start_run(job, config, user_files)


def _new_config(job: Command, config: DictConfig, settings: Any, run_dir: Path) -> DictConfig:
    """Return the config of a new run in ``run_dir``. ``follow_data`` sets the keys that its data decides."""
    choices = dict(settings.runtime.choices)
    announce_auto(choices, config, job.external_launch)
    if job.is_sweep and FINETUNED in choices.values():
        # Hydra has composed with the first init_from of the sweep. Compose again with this job's init_from.
        config, _, notices = compose_with_choices(job.overrides, job.config_dir)
    else:
        notices = settle(config, choices, job.overrides, job.config_dir)
    config.run_dir = str(run_dir)
    _refuse_other_validation(job, config, str(choices.get("data")))
    for notice in notices:
        print_notice(notice)
    with_absolute_paths(config)
    if str(config.init_from).startswith("hf:"):
        from speechtrain.interop.hub import pinned

        try:
            config.init_from = pinned(config.init_from)
        except MissingPackage as error:
            raise_or_warn(str(error), is_warning=config.dry_run)
    if job.external_launch and config.world_size == 1:
        config.world_size = job.external_launch.world.size
    return config


def _refuse_other_validation(job: Command, config: DictConfig, choice: str) -> None:
    """Raise ConfigError if the user's files replace only the training set of a corpus that is a class.

    Such a run would validate, and choose its best checkpoint, on recordings of the corpus. ``choice`` is the
    value of ``data=``.
    """
    is_train_explicit = "data.train" in map(key_of_override, job.overrides)
    if not is_train_explicit or isinstance(config.data.train, DictConfig):
        return
    data: Any = OmegaConf.to_container(compose([f"data={choice}"], job.config_dir).data)
    if isinstance(data.get("train"), dict):
        raise ConfigError(f"data.train: data={choice} validates on its own recordings. Add data=manifest")


class _Folders:
    """The paths that did not exist before Hydra made them.

    When the command ends, its empty folders and Hydra's files are removed.
    """

    def __init__(self) -> None:
        self.missing: set[Path] = set()

    def note_missing(self, path: str) -> str:
        """Store ``path`` and its parents, as far as they do not exist yet, and return ``path``."""
        absolute_path = Path(path).absolute()
        for member in (absolute_path, *absolute_path.parents):
            if not member.exists():
                self.missing.add(member)
        return path

    def remove_empty(self) -> None:
        """Remove the files, and the folders that are empty, the deepest first."""
        for path in sorted(self.missing, key=lambda path: len(path.parts), reverse=True):
            with contextlib.suppress(OSError):  # The folder is not empty, or Hydra has not made it.
                if path.is_file():
                    path.unlink()
                else:
                    path.rmdir()


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
    """The jobs of one command and their results. Hydra calls this object with the config of each job.

    A launcher of Hydra may run the jobs of a sweep in other processes, on other hosts. It pickles this object
    for them. Each job of a sweep therefore writes its result into a folder next to the runs, which all hosts
    can read.
    """

    def __init__(self, command: Command) -> None:
        self.command = command
        self.command_pid = os.getpid()
        self.command_session = _session()
        self.auto_device = ""  # the device that ``auto`` means on the host of the command
        if command.is_sweep and may_be_auto(command.overrides):
            self.auto_device = auto_device().name
        self.inherited_variables = {name: text for name, text in os.environ.items() if name == ALLOW_TARGETS}
        self.error: Exception | None = None  # the error that ends the command
        self.results_name = f".sweep-{secrets.token_hex(8)}"  # name of the folder of the results
        self.sweep_dir: str | None = None  # folder of the runs of a sweep. The resolver of Hydra sets it.
        self.results: list[_JobResult] = []

    def __call__(self, config: DictConfig) -> _Return:
        """Start the run of a job and return its metric, which an optimizing sweeper of Hydra reads.

        The sweeper of studies reads the result of the job, or its error.
        """
        # Jobs of a batch system have another session, and outlive the command.
        if self._is_in_command() or self.command_session != _session():
            return self._start_run(config)
        with ending_with(self.command_pid):
            return self._start_run(config)

    def _start_run(self, config: DictConfig) -> _Return:
        os.environ |= self.inherited_variables  # The job may run in another process.
        settings = HydraConfig.get()
        job = replace(self.command, overrides=_overrides(settings), swept=_swept_keys(self.command, settings))
        swept_overrides = " ".join(text for text in job.overrides if key_of_override(text) in job.swept)
        try:
            if not self._is_in_command():
                find_external_launch(None)  # Raises if several processes were started for this job.
                check_same_device(settings.runtime.choices, self.auto_device)
            if settings.mode == RunMode.MULTIRUN:
                print_line(f"{job_name(settings)}: {swept_overrides}")
            result = run_job(partial(_start, job, config, settings), settings)
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
        if is_failure and settings.mode == RunMode.MULTIRUN:
            print_notice(f"error: {job_name(settings)} ({swept_overrides}): {error}")
            if is_study(settings):
                return class_of(exit_code)(
                    str(error)
                )  # Hydra's launcher cannot pickle all classes of errors.
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
        if settings.mode == RunMode.MULTIRUN and not is_study(settings):
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
        rows = [["job", "metric", "status", "speed" if has_speeds else "", "overrides"]]
        if has_policies:
            rows[0].append("computes")
        for number, (job_result, key) in enumerate(zip(self.results, keys, strict=True), 1):
            is_best = job_result.metric is not None and key == min(keys) and keys.count(key) == 1
            overrides = f"{job_result.overrides}  (best)" if is_best else job_result.overrides
            rows.append(
                [f"job {number}", job_result.metric_text, job_result.status, job_result.speed, overrides]
            )
            if has_policies:
                rows[-1].append(job_result.computes)
        for line in table_lines(rows):
            print_line(line)
