"""Hydra's app: it composes the config of each job of a command and starts the job's run."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from speechtrain.config.resolved import with_absolute_paths
from speechtrain.config.resume_fields import key_of_override
from speechtrain.config.targets import ALLOW_TARGETS
from speechtrain.errors import ConfigError, MachineError, Preempted, SpeechtrainError, class_of, print_notice
from speechtrain.files import print_line, read_json, write_json
from speechtrain.run_directory import CONFIG, RunResult, metric_text, speed_text
from speechtrain.runs.auto_device import announce_auto, auto_device, check_same_device
from speechtrain.runs.command_line import Command
from speechtrain.runs.compose import compose, explain, offer_choices
from speechtrain.runs.external_launch import find_external_launch
from speechtrain.runs.finetuned import FINETUNED
from speechtrain.runs.from_data import explicit_keys, follow_data
from speechtrain.runs.recipe_needs import settle_needs
from speechtrain.runs.resume import config_to_continue
from speechtrain.runs.run_name import RunNames, base_folder
from speechtrain.runs.start import start_run
from speechtrain.runs.started_runs import require_started
from speechtrain.runs.study_jobs import conclude_study, is_study, job_name, register_study, run_job, trial_of
from speechtrain.runs.user_yaml import user_yaml_files

_CONFIG_PATH = "pkg://speechtrain.conf"


def start_jobs(command: Command, names: RunNames) -> None:
    """Compose the config of each job of ``command`` and start its run. A run that exists continues.

    There is one job, or with ``-m`` all jobs of a sweep, through Hydra's sweeper and launcher. If a job of a
    sweep fails, it is reported and the others run. Raises ConfigError if Hydra refuses the command,
    MachineError if a folder cannot be made, and the SpeechtrainError of a job. Empty folders are removed.
    """
    folders = _Folders()
    jobs = _Jobs(command)
    _register_resolvers(command, names, folders, jobs)
    try:
        with _process_of(command):
            register_study(command.overrides)
            offer_choices(command.overrides, command.config_dir)
            main = hydra.main(version_base="1.3", config_path=_CONFIG_PATH, config_name="config")
            app = main(lambda config: jobs(config))
            _run(app, command.flags)
    except SpeechtrainError:
        raise
    except Exception as error:  # Composing has raised it. The errors of jobs end in ``jobs``.
        # The error of a missing choice is an OSError and a HydraException.
        if isinstance(error, HydraException) or not isinstance(error, OSError):
            raise explain(error, command.overrides, command.config_dir) from error
        if error.filename is None:  # The error is one of stdout.
            raise
        cause = f"{error.filename}: {error.strerror}"
        raise MachineError(f"{cause}. Set run_dir or OUTPUT_DIR to a writable folder") from error
    finally:
        jobs.read_outcomes()
        folders.remove_empty()
    jobs.conclude()


def _register_resolvers(command: Command, names: RunNames, folders: _Folders, jobs: _Jobs) -> None:
    """Register the resolvers of run names and folders, which the settings of Hydra in the config use."""

    def run_name(*, _root_: DictConfig) -> str:
        settings = _root_.hydra
        trial = trial_of(settings)
        if trial is not None:
            return f"trial-{trial:03}"
        return names.name(settings.runtime.choices, _overrides(settings), _swept_keys(command, settings))

    def run_dir(*, _root_: DictConfig) -> str:
        return folders.expect(str(_root_.run_dir or base_folder() / run_name(_root_=_root_)))

    def sweep_dir(*, _root_: DictConfig) -> str:
        folder = str(_root_.run_dir or base_folder())
        if is_study(_root_.hydra) and not _root_.run_dir:
            folder = f"{folder}/study-{run_name(_root_=_root_)}"
        jobs.sweep_dir = folder
        if _root_.dry_run:
            folders.expect(f"{folder}/multirun.yaml")
        return folders.expect(folder)

    for resolver in (run_name, run_dir, sweep_dir):
        OmegaConf.register_new_resolver(f"speechtrain.{resolver.__name__}", resolver, replace=True)


@contextlib.contextmanager
def _process_of(command: Command) -> Iterator[None]:
    """Give this process the arguments of ``command`` and the environment variables that Hydra needs."""
    arguments = sys.argv
    variables = {"HYDRA_FULL_ERROR": "1"}  # Hydra then raises an error instead of printing lines.
    if command.is_sweep:
        variables["PYTHONSAFEPATH"] = "1"  # The workers of joblib and the jobs of submitit need it.
    missing = variables.keys() - os.environ.keys()
    logging.raiseExceptions = False  # logging would print an error for a closed pipe, as in --info | head.
    sys.argv = [arguments[0], *command.flags, *command.overrides]
    os.environ |= variables
    try:
        yield
    finally:
        sys.argv = arguments
        for name in missing:
            os.environ.pop(name, None)


def _run(app: Callable[[], object], flags: Sequence[str]) -> None:
    """Run Hydra's ``app``. If it prints shell completions, they are printed without base YAMLs."""
    if not {"--shell-completion", "-sc"} & {*flags}:
        with contextlib.suppress(_Stop):
            app()
        return
    with contextlib.redirect_stdout(io.StringIO()) as completions:
        app()
    print(re.sub(r"(?<!\S)(\S*=)?_\w+\s?", "", completions.getvalue()), end="")


def _overrides(settings: Any) -> list[str]:
    """Return the explicit overrides of a job. An interpolation in them stays as it is."""
    overrides = OmegaConf.to_container(settings.overrides.task, resolve=False)
    return [str(override) for override in overrides or ()]


def _swept_keys(command: Command, settings: Any) -> tuple[str, ...]:
    """Return the keys of a job that its sweep varies: each key that the command does not set to one value."""
    if settings.mode != RunMode.MULTIRUN:
        return ()
    fixed_keys = set()
    for override in OverridesParser.create().parse_overrides(command.overrides):
        if not override.is_sweep_override():
            fixed_keys.add(key_of_override(override.input_line or ""))
    return tuple(key for key in map(key_of_override, _overrides(settings)) if key not in fixed_keys)


def _start(job: Command, config: DictConfig, settings: Any) -> RunResult:
    """Start or continue the run of a job from its composed ``config``, and return its result."""
    # The path is absolute, because ranks on other hosts and a resumed command must use the same folder.
    run_dir = Path(settings.runtime.output_dir).resolve()
    user_files = user_yaml_files(settings.runtime.choices, job.config_dir)
    if (run_dir / CONFIG).is_file():
        if config.run_dir is None:
            require_started(run_dir)
        config = config_to_continue(run_dir, job)
    else:
        config = _new_config(job, config, settings, run_dir)
        follow_data(config, explicit_keys(job.overrides, user_files), is_plan=settle_needs(config))
    return start_run(job, config, user_files)


def _new_config(job: Command, config: DictConfig, settings: Any, run_dir: Path) -> DictConfig:
    """Return the config of a new run in ``run_dir``. The keys that follow from its data are still open."""
    announce_auto(settings.runtime.choices, config, job.external_launch)
    if job.is_sweep and FINETUNED in settings.runtime.choices.values():
        config = compose(job.overrides, job.config_dir)
    config.run_dir = str(run_dir)
    _refuse_other_validation(job, config, str(settings.runtime.choices.get("data")))
    with_absolute_paths(config)
    if str(config.init_from).startswith("hf:"):
        from speechtrain.interop.hub import pinned

        config.init_from = pinned(config.init_from)
    if job.external_launch and config.world_size == 1:
        config.world_size = job.external_launch.world.size
    return config


def _refuse_other_validation(job: Command, config: DictConfig, choice: str) -> None:
    """Raise ConfigError if files replace the training set of a corpus.

    The validation sets of the corpus would then choose the best checkpoint. ``choice`` is the value of
    ``data=``.
    """
    if "data.train" not in map(key_of_override, job.overrides) or isinstance(config.data.train, DictConfig):
        return
    data: Any = OmegaConf.to_container(compose([f"data={choice}"], job.config_dir).data)
    if isinstance(data.get("train"), dict):
        raise ConfigError(f"data.train: data={choice} validates on its own recordings. Add data=manifest")


class _Folders:
    """The folders and files that Hydra makes. Files and empty folders are removed when the command ends."""

    def __init__(self) -> None:
        self.missing: set[Path] = set()

    def expect(self, path: str) -> str:
        """Return ``path``, which Hydra may make, and note it and its parents if they are missing."""
        absolute = Path(path).absolute()
        self.missing |= {member for member in (absolute, *absolute.parents) if not member.exists()}
        return path

    def remove_empty(self) -> None:
        """Remove the folders that are empty, the deepest first, and the files."""
        for path in sorted(self.missing, key=lambda path: len(path.parts), reverse=True):
            with contextlib.suppress(OSError):  # The folder is not empty, or Hydra has not made it.
                if path.is_file():
                    path.unlink()
                else:
                    path.rmdir()


class _Stop(BaseException):
    """Ends Hydra silently. For an Exception of a job, Hydra would print more lines."""


@dataclass(frozen=True)
class _Outcome:
    """The outcome of a job of a sweep, as its file holds it."""

    overrides: str  # the overrides that the sweep varies
    status: str  # the status of the result, or the class of the error
    metric: float | None = None
    metric_text: str = "-"  # with name and unit
    error: str = ""
    exit_code: int = 0
    speed: str = ""


def _metric_text(result: RunResult) -> str:
    """Return the metric that chose the checkpoint, with its name and unit, such as ``wer 3.21 %``."""
    if result.metric is None:
        return "-"
    for name, value in (result.metrics or {}).items():
        if value == result.metric:
            return metric_text(name, value)
    return f"{result.metric:.4g}"


class _Jobs:
    """The jobs of one command and their outcomes. Hydra calls it with the config of each job.

    A launcher of Hydra may run the jobs of a sweep in other processes, on other hosts. Each job of a sweep
    therefore writes its outcome into a folder next to the runs, which all hosts see.
    """

    def __init__(self, command: Command) -> None:
        self.command = command
        self.process = os.getpid()
        self.auto_device = auto_device().name if command.is_sweep else ""
        self.inherited_variables = {name: text for name, text in os.environ.items() if name == ALLOW_TARGETS}
        self.error: Exception | None = None  # the error that ends the command
        self.folder_name = f".sweep-{secrets.token_hex(8)}"
        self.sweep_dir: str | None = None
        self.outcomes: list[_Outcome] = []

    def __call__(self, config: DictConfig) -> float | None:
        """Start the run of a job and return its metric, which an optimizing sweeper of Hydra reads."""
        os.environ |= self.inherited_variables  # The job may run in another process.
        settings = HydraConfig.get()
        job = replace(self.command, overrides=_overrides(settings), swept=_swept_keys(self.command, settings))
        varied = " ".join(text for text in job.overrides if key_of_override(text) in job.swept)
        try:
            if os.getpid() != self.process:
                find_external_launch(None)  # This refuses several processes for one job of a sweep.
                check_same_device(settings.runtime.choices, self.auto_device)
            if settings.mode == RunMode.MULTIRUN:
                print_line(f"{job_name(settings)}: {varied}")
            result = run_job(partial(_start, job, config, settings), settings)
        except Exception as error:
            return self._handle_error(error, varied, settings)
        finally:
            with contextlib.suppress(OSError):  # The folder stays unless it is empty.
                Path(settings.runtime.output_dir).rmdir()
        outcome = _Outcome(varied, result.status, result.metric, _metric_text(result))
        self._write_outcome(replace(outcome, speed=speed_text(result.speed)), settings)
        return result.metric

    def _handle_error(self, error: Exception, varied: str, settings: Any) -> float:
        """Store the error of a job. Return NaN if its sweep goes on, else end Hydra.

        ``varied`` holds the overrides that the sweep varies.
        """
        is_fault = isinstance(error, SpeechtrainError) and not isinstance(error, Preempted)
        exit_code = getattr(error, "exit_code", 1) if is_fault else 0
        outcome = _Outcome(varied, type(error).__name__, error=str(error), exit_code=exit_code)
        self._write_outcome(outcome, settings)
        if is_fault and settings.mode == RunMode.MULTIRUN:
            print_notice(f"error: {job_name(settings)} ({varied}): {error}")
            return math.nan  # An optimizing sweeper continues with its next job.
        if os.getpid() != self.process and is_study(settings) and isinstance(error, Preempted):
            return math.nan  # The study claims the trial again, which continues from its checkpoint.
        if os.getpid() != self.process:  # A launcher of Hydra runs the job and reports to the parent.
            raise error
        self.error = error
        raise _Stop from error

    def _write_outcome(self, outcome: _Outcome, settings: Any) -> None:
        """Write the outcome of a sweep's job to the file of its number."""
        if settings.mode == RunMode.MULTIRUN and not is_study(settings):
            folder = Path(settings.sweep.dir, self.folder_name)
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / f"{settings.job.num:06}.json", asdict(outcome))

    def read_outcomes(self) -> None:
        """Read the outcomes of a sweep's jobs in the order of the jobs, and remove their folder."""
        if self.sweep_dir is not None:
            folder = Path(self.sweep_dir, self.folder_name)
            for path in sorted(folder.glob("*.json")):
                self.outcomes.append(_Outcome(**read_json(path)))
            shutil.rmtree(folder, ignore_errors=True)

    def conclude(self) -> None:
        """Print a table of several jobs. Raise the error of the command, or of the first job that failed."""
        if len(self.outcomes) > 1:
            self._print_table()
        if self.error is not None:
            raise self.error
        if self.sweep_dir is not None:
            conclude_study(Path(self.sweep_dir))
        failures = [outcome for outcome in self.outcomes if outcome.exit_code]
        if failures:
            message = failures[0].error
            if len(self.outcomes) > 1:
                message = f"{len(failures)} of {len(self.outcomes)} jobs failed, first: {message}"
            raise class_of(failures[0].exit_code)(message)

    def _print_table(self) -> None:
        metrics = [outcome.metric for outcome in self.outcomes if outcome.metric is not None]
        width = max(len(outcome.speed) for outcome in self.outcomes)
        heading = "speed".ljust(width + 1) if width else ""
        print_line(f"job      {'metric':>20}  {'status':<12} {heading}overrides")
        for number, outcome in enumerate(self.outcomes, 1):
            best = "  (best)" if metrics and outcome.metric == min(metrics) else ""
            speed = outcome.speed.ljust(len(heading))
            figures = f"{outcome.metric_text:>20}  {outcome.status:<12} {speed}"
            print_line(f"job {number:>3}  {figures}{outcome.overrides}{best}")
