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
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from speechtrain.config.resolved import with_whole_paths
from speechtrain.config.resume_fields import key_of
from speechtrain.config.targets import ALLOW_TARGETS
from speechtrain.errors import (
    ConfigError,
    MachineError,
    Preempted,
    RunError,
    SpeechtrainError,
    class_of,
    print_notice,
)
from speechtrain.files import read_json, say, write_json
from speechtrain.run_directory import CONFIG, RunResult, speed_text
from speechtrain.run_directory import metric as metric_text
from speechtrain.runs.auto_device import announce_auto, auto_device, check_same_device
from speechtrain.runs.command_line import Command
from speechtrain.runs.compose import compose, explain, offer_choices
from speechtrain.runs.external_launch import started_together
from speechtrain.runs.finetuned import FINETUNED
from speechtrain.runs.from_data import follow_data, typed_keys
from speechtrain.runs.recipe_needs import settle_needs
from speechtrain.runs.resume import continued
from speechtrain.runs.run_name import RunNames, base_folder
from speechtrain.runs.start import start_run
from speechtrain.runs.started_runs import require_started, state_folder
from speechtrain.runs.user_yaml import written_files
from speechtrain.study import require_optuna

if TYPE_CHECKING:
    from speechtrain.study.trial_job import TrialJob

_CONFIG_PATH = "pkg://speechtrain.conf"


def start_jobs(command: Command, names: RunNames) -> None:
    """Compose each job's config and start its run; a job whose run exists continues it.

    There is one job, or with ``-m`` all jobs of a sweep through Hydra's sweeper and launcher; a failed job
    of a sweep is reported and the others run. Folders that stay empty are removed. Raises ConfigError
    for what Hydra refuses, MachineError where a folder cannot be made, and the SpeechtrainError of a job.
    """
    folders, jobs = _Folders(), _Jobs(command)

    def name_of_run(*, _root_: DictConfig) -> str:
        trial = _root_.hydra.sweeper.get("trial")
        if trial is not None:
            return f"trial-{trial:03}"
        return _name_of_job(names, command, _root_.hydra)

    def folder_of_run(*, _root_: DictConfig) -> str:
        return folders.expect(str(_root_.run_dir or base_folder() / name_of_run(_root_=_root_)))

    def folder_of_sweep(*, _root_: DictConfig) -> str:
        jobs.sweep_dir = str(_root_.run_dir or base_folder())
        if _is_study(_root_.hydra) and not _root_.run_dir:
            jobs.sweep_dir = str(base_folder() / f"study-{_name_of_job(names, command, _root_.hydra)}")
        return folders.expect(jobs.sweep_dir, "multirun.yaml" if _root_.dry_run else "")

    resolvers = {"run_name": name_of_run, "run_dir": folder_of_run, "sweep_dir": folder_of_sweep}
    for name, resolver in resolvers.items():
        OmegaConf.register_new_resolver(f"speechtrain.{name}", resolver, replace=True)

    try:
        with _process_of(command):
            _register_study(command.overrides)
            offer_choices(command.overrides, command.config_dir)
            main = hydra.main(version_base="1.3", config_path=_CONFIG_PATH, config_name="config")
            app = main(lambda config: jobs(config))
            _run(app, command.flags)
    except SpeechtrainError:
        raise
    except Exception as error:  # Composing raises it, because jobs keep their errors.
        if isinstance(error, HydraException) or not isinstance(error, OSError):  # a missing choice is both
            raise explain(error, command.overrides, command.config_dir) from error
        if error.filename is None:  # of stdout
            raise
        message = f"{error.filename}: {error.strerror}"
        raise MachineError(f"{message}; set run_dir or OUTPUT_DIR to a writable folder") from error
    finally:
        jobs.read_outcomes()
        folders.remove_empty()
    jobs.conclude()


def _register_study(overrides: Sequence[str]) -> None:
    """Register the sweeper of studies with Hydra, whose scan misses it in an editable installation."""
    if "hydra/sweeper=study" not in overrides:
        return
    require_optuna()
    from hydra_plugins.speechtrain_study import StudySweeper

    Plugins.instance().register(StudySweeper)


def _is_study(settings: Any) -> bool:
    return "trial" in settings.sweeper


def _trial_job(settings: Any) -> TrialJob | None:
    """Return the trial that a job of a study runs, or None for another job."""
    if settings.sweeper.get("trial") is None:
        return None
    from speechtrain.study.trial_job import TrialJob, trial_settings

    folder = Path(settings.sweep.dir).resolve()
    return TrialJob(
        folder, Path(settings.runtime.output_dir).resolve(), trial_settings(settings.sweeper), state_folder()
    )


@contextlib.contextmanager
def _process_of(command: Command) -> Iterator[None]:
    """Give this process the arguments of ``command`` and the variables that Hydra needs."""
    arguments = sys.argv
    variables = {"HYDRA_FULL_ERROR": "1"}  # Hydra then raises an error instead of printing lines.
    if command.is_sweep:
        variables["PYTHONSAFEPATH"] = "1"  # for the workers of joblib and the jobs of submitit
    missing = variables.keys() - os.environ.keys()
    logging.raiseExceptions = False  # of a closed pipe, as in --info | head
    sys.argv = [arguments[0], *command.flags, *command.overrides]
    os.environ |= variables
    try:
        yield
    finally:
        sys.argv = arguments
        for name in missing:
            os.environ.pop(name, None)


def _run(app: Callable[[], object], flags: Sequence[str]) -> None:
    """Run Hydra's ``app``. Its shell completions are printed without base YAMLs."""
    if not {"--shell-completion", "-sc"} & {*flags}:
        with contextlib.suppress(_Stop):
            app()
        return
    with contextlib.redirect_stdout(io.StringIO()) as completions:
        app()
    print(re.sub(r"(?<!\S)(\S*=)?_\w+\s?", "", completions.getvalue()), end="")


def _typed(settings: Any) -> list[str]:
    """The overrides as typed: Hydra would resolve an interpolation in its own node."""
    return [str(o) for o in OmegaConf.to_container(settings.overrides.task, resolve=False) or ()]


def _name_of_job(names: RunNames, command: Command, settings: Any) -> str:
    return names.name(settings.runtime.choices, _typed(settings), _swept_keys(command, settings))


def _swept_keys(command: Command, settings: Any) -> tuple[str, ...]:
    """Return the keys of a job that its sweep varies: each key that the command does not set to one value."""
    if settings.mode != RunMode.MULTIRUN:
        return ()
    fixed_keys = set()
    for override in OverridesParser.create().parse_overrides(command.overrides):
        if not override.is_sweep_override():
            fixed_keys.add(key_of(override.input_line or ""))
    return tuple(key for key in map(key_of, _typed(settings)) if key not in fixed_keys)


def _start(job: Command, config: DictConfig, settings: Any) -> RunResult:
    """Start the run of a job, which Hydra has composed; its result."""
    # absolute: ranks on other hosts and a resumed command must use the same folder
    run_dir = Path(settings.runtime.output_dir).resolve()
    written = written_files(settings.runtime.choices, job.config_dir)
    if (run_dir / CONFIG).is_file():
        if config.run_dir is None:
            require_started(run_dir)
        config = continued(run_dir, job)
    else:
        config = _new_config(job, config, settings, run_dir)
        follow_data(config, typed_keys(job.overrides, written), is_plan=settle_needs(config))
    return start_run(job, config, written)


def _new_config(job: Command, config: DictConfig, settings: Any, run_dir: Path) -> DictConfig:
    """Return the config of a new run in ``run_dir``, without the keys that follow from its data."""
    announce_auto(settings.runtime.choices, config, job.together)
    if job.is_sweep and FINETUNED in settings.runtime.choices.values():
        config = compose(job.overrides, job.config_dir)
    config.run_dir = str(run_dir)
    _refuse_other_validation(job, config, str(settings.runtime.choices.get("data")))
    with_whole_paths(config)
    if str(config.init_from).startswith("hf:"):
        from speechtrain.interop.hub import pinned

        config.init_from = pinned(config.init_from)
    if job.together and config.world_size == 1:
        config.world_size = job.together.world.size
    return config


def _refuse_other_validation(job: Command, config: DictConfig, choice: str) -> None:
    """Refuse files in place of a corpus's training set, whose validation sets would choose the checkpoint."""
    if "data.train" not in map(key_of, job.overrides) or isinstance(config.data.train, DictConfig):
        return
    data: Any = OmegaConf.to_container(compose([f"data={choice}"], job.config_dir).data)
    if isinstance(data.get("train"), dict):
        raise ConfigError(f"data.train: data={choice} validates on recordings of its own; add data=manifest")


class _Folders:
    """What Hydra makes: folders that stay empty, and files, are removed when the command ends."""

    def __init__(self) -> None:
        self.missing: set[Path] = set()

    def expect(self, folder: str, file: str = "") -> str:
        path = Path(folder).absolute()
        self.missing |= {p for p in (path / file, path, *path.parents) if not p.exists()}
        return folder

    def remove_empty(self) -> None:
        for path in sorted(self.missing, key=lambda p: len(p.parts), reverse=True):
            with contextlib.suppress(OSError):  # not empty, or never made
                (path.unlink if path.is_file() else path.rmdir)()


class _Stop(BaseException):
    """Exits Hydra silently: Hydra prints lines of its own for any Exception of a job."""


@dataclass(frozen=True)
class _Outcome:
    """How a job of a sweep ended, with the overrides that its sweep varies."""

    overrides: str
    status: str
    metric: float | None = None
    shown: str = "-"
    error: str = ""
    exit_code: int = 0
    speed: str = ""


def _metric_text(result: RunResult) -> str:
    """Return the metric of a result with its name and unit, as ``wer 3.21 %``."""
    if result.metric is None:
        return "-"
    for name, value in (result.metrics or {}).items():
        if value == result.metric:
            return metric_text(name, value)
    return f"{result.metric:.4g}"


class _Jobs:
    """The jobs of one command, and how they ended.

    A launcher of Hydra may run the jobs of a sweep in other processes, on other hosts. Each such job
    therefore writes its outcome into a folder next to the runs, which all of them see.
    """

    def __init__(self, command: Command) -> None:
        self.command = command
        self.process = os.getpid()
        self.auto_device = auto_device().name if command.is_sweep else ""
        self.allowed = {k: v for k, v in os.environ.items() if k == ALLOW_TARGETS}
        self.error: Exception | None = None  # It ends the command.
        self.folder_name = f".sweep-{secrets.token_hex(8)}"
        self.sweep_dir: str | None = None
        self.outcomes: list[_Outcome] = []

    def __call__(self, config: DictConfig) -> float | None:
        os.environ |= self.allowed  # a job of a sweep may run in another process
        settings = HydraConfig.get()
        job = replace(self.command, overrides=_typed(settings), swept=_swept_keys(self.command, settings))
        varied = " ".join(text for text in job.overrides if key_of(text) in job.swept)
        try:
            if os.getpid() != self.process:
                started_together(None)  # refuses several processes for one job of a sweep
                check_same_device(settings.runtime.choices, self.auto_device)
            if settings.mode == RunMode.MULTIRUN:
                say(f"{_job_name(settings)}: {varied}")
            start = partial(_start, job, config, settings)
            trial = _trial_job(settings)
            result = start() if trial is None else trial.run(start)
        except Exception as error:
            return self._fail(error, varied, settings)
        finally:
            with contextlib.suppress(OSError):  # a job of a sweep that wrote nothing keeps no folder
                Path(settings.runtime.output_dir).rmdir()
        outcome = _Outcome(varied, result.status, result.metric, _metric_text(result))
        self._write(replace(outcome, speed=speed_text(result.speed)), settings)
        return result.metric

    def _fail(self, error: Exception, varied: str, settings: Any) -> float:
        """Note a job's error. Return if its sweep goes on, else stop Hydra."""
        is_fault = isinstance(error, SpeechtrainError) and not isinstance(error, Preempted)
        exit_code = getattr(error, "exit_code", 1) if is_fault else 0
        self._write(_Outcome(varied, type(error).__name__, error=str(error), exit_code=exit_code), settings)
        if is_fault and settings.mode == RunMode.MULTIRUN:
            print_notice(f"error: {_job_name(settings)} ({varied}): {error}")
            return math.nan  # an optimizing sweeper continues with its next job
        if os.getpid() != self.process and isinstance(error, Preempted) and _is_study(settings):
            return math.nan  # The study claims the trial again, which continues from its checkpoint.
        if os.getpid() != self.process:  # a sweep's launcher runs it: Hydra reports to the parent
            raise error
        self.error = error
        raise _Stop from error

    def _write(self, outcome: _Outcome, settings: Any) -> None:
        if settings.mode == RunMode.MULTIRUN and not _is_study(settings):
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
            metrics = [outcome.metric for outcome in self.outcomes if outcome.metric is not None]
            width = max(len(outcome.speed) for outcome in self.outcomes)
            heading = "speed".ljust(width + 1) if width else ""
            say(f"job      {'metric':>20}  {'status':<12} {heading}overrides")
            for number, outcome in enumerate(self.outcomes, 1):
                best = "  (best)" if metrics and outcome.metric == min(metrics) else ""
                speed = outcome.speed.ljust(len(heading))
                figures = f"{outcome.shown:>20}  {outcome.status:<12} {speed}"
                say(f"job {number:>3}  {figures}{outcome.overrides}{best}")
        if self.sweep_dir is not None and Path(self.sweep_dir, "study.journal").is_file():
            self._conclude_study(Path(self.sweep_dir))
        if self.error is not None:
            raise self.error
        failures = [outcome for outcome in self.outcomes if outcome.exit_code]
        if failures:
            message = failures[0].error
            if len(self.outcomes) > 1:
                message = f"{len(failures)} of {len(self.outcomes)} jobs failed; the first: {message}"
            raise class_of(failures[0].exit_code)(message)

    def _conclude_study(self, folder: Path) -> None:
        """Print the table of a study. Raises RunError if the command ran and no trial has completed."""
        from speechtrain.study.output import table
        from speechtrain.study.store import Study

        study = Study(folder)
        for line in table(study).splitlines():
            say(line)
        if study.best() is None and self.error is None:
            raise RunError(f"no trial of the study in {folder} has completed")


def _job_name(settings: Any) -> str:
    trial = settings.sweeper.get("trial")
    return f"job {settings.job.num + 1}" if trial is None else f"trial {trial}"
