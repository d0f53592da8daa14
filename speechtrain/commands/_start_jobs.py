"""Hydra's app: it composes the config of each job of a command and starts the job's run."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from speechtrain.commands._choices import refuse_bases
from speechtrain.commands._cli import say
from speechtrain.commands._command_line import Command
from speechtrain.commands._continue_run import continued, run_name, written_files
from speechtrain.commands._external_launch import started_together
from speechtrain.commands._find_run import base_folder
from speechtrain.commands._from_data import follow_data, is_open, typed_keys
from speechtrain.commands._hydra_app import compose, explain
from speechtrain.commands._init_from import FINETUNED, offer_finetuned
from speechtrain.commands._start_run import start_run
from speechtrain.commands._started_runs import require_started
from speechtrain.config.check import check
from speechtrain.config.resolved import with_whole_paths
from speechtrain.config.resume_fields import key_of
from speechtrain.config.targets import ALLOW_TARGETS
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
        return folders.expect(str(_root_.run_dir or base_folder()), "multirun.yaml" if _root_.dry_run else "")

    resolvers = {"run_name": name_of_run, "run_dir": folder_of_run, "sweep_dir": folder_of_sweep}
    for name, resolver in resolvers.items():
        OmegaConf.register_new_resolver(f"speechtrain.{name}", resolver, replace=True)

    previous = sys.argv
    logging.raiseExceptions = False  # of a closed pipe, as in --info | head
    sys.argv = [previous[0], *command.flags, *command.overrides]
    before, os.environ["HYDRA_FULL_ERROR"] = {**os.environ}, "1"  # it then raises, instead of printing lines
    if command.is_sweep:
        os.environ["PYTHONSAFEPATH"] = "1"  # of joblib's workers and submitit's jobs
    try:
        refuse_bases(command.overrides, command.config_dir)
        offer_finetuned(command.overrides)
        main = hydra.main(version_base="1.3", config_path=_CONFIG_PATH, config_name="config")
        app = main(lambda config: jobs(config))
        _run(app, command.flags)
    except SpeechtrainError:
        raise
    except Exception as error:  # it comes from composing: jobs keep theirs
        if isinstance(error, HydraException) or not isinstance(error, OSError):  # a missing choice is both
            raise explain(error, command.overrides, command.config_dir) from error
        if error.filename is None:  # of stdout
            raise
        where = f"{error.filename}: {error.strerror}"
        raise MachineError(f"{where}; set run_dir or OUTPUT_DIR to a writable folder") from error
    finally:
        sys.argv = previous
        for name in {"HYDRA_FULL_ERROR", "PYTHONSAFEPATH"} - before.keys():
            os.environ.pop(name, None)
        folders.remove_empty()
    jobs.conclude()


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


def _start(job: Command, config: DictConfig, settings: Any) -> dict[str, Any]:
    """Start the run of a job, which Hydra has composed; its result."""
    # absolute: ranks on other hosts and a resumed command must use the same folder
    run_dir = Path(settings.runtime.output_dir).resolve()
    written = written_files(settings.runtime.choices, job.config_dir)
    if (run_dir / CONFIG).is_file():
        if config.run_dir is None:
            require_started(run_dir)
        config = continued(run_dir, job)
    else:
        if job.is_sweep and FINETUNED in settings.runtime.choices.values():
            config = _compose_job(job)
        config.run_dir = str(run_dir)
        _refuse_other_validation(job, config, str(settings.runtime.choices.get("data")))
        with_whole_paths(config)
        if str(config.init_from).startswith("hf:"):
            from speechtrain.interop.hub import pinned

            config.init_from = pinned(config.init_from)
        if job.together and config.world_size == 1:
            config.world_size = job.together.world.size
        if is_open(config):
            check(config)  # what is wrong in it is said before the data is read
            follow_data(config, typed_keys(job.overrides, written))
    return start_run(job, config, written)


def _compose_job(job: Command) -> DictConfig:
    """Compose a job of a sweep once more, with the choice ``finetuned`` of its own ``init_from``."""
    try:
        return compose(job.overrides, job.config_dir)
    except (HydraException, OmegaConfBaseException) as error:
        raise explain(error, job.overrides, job.config_dir) from None


def _refuse_other_validation(job: Command, config: DictConfig, choice: str) -> None:
    """Refuse files in place of a corpus's training set, whose validation sets would choose the checkpoint."""
    if "data.train" not in map(key_of, job.overrides) or isinstance(config.data.train, DictConfig):
        return
    if isinstance(compose([f"data={choice}"], job.config_dir).data._get_node("train"), DictConfig):
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


class _Jobs:
    """The jobs of one command: what was typed for each alone, and its result or error."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.process = os.getpid()
        self.allowed = {k: v for k, v in os.environ.items() if k == ALLOW_TARGETS}
        self.ended: list[tuple[str, dict[str, Any] | Exception]] = []

    def __call__(self, config: DictConfig) -> float | None:
        os.environ |= self.allowed  # a job of a sweep may run in another process
        settings = HydraConfig.get()
        job = replace(self.command, overrides=_typed(settings))
        typed = OverridesParser.create().parse_overrides(self.command.overrides)
        fixed = {key_of(one.input_line or "") for one in typed if not one.is_sweep_override()}
        named = " ".join(text for text in job.overrides if key_of(text) not in fixed)
        is_sweep = settings.mode == RunMode.MULTIRUN
        try:
            if os.getpid() != self.process:
                started_together(None)  # refuses several processes for one job of a sweep
            if is_sweep:
                say(f"job {settings.job.num + 1}: {named}")
            result = _start(job, config, settings)
            self.ended.append((named, result))
            metric: float | None = result.get("metric")
            return metric
        except Exception as error:
            if os.getpid() != self.process:  # a sweep's launcher runs it: Hydra reports to the parent
                raise
            self.ended.append((named, error))
            if not is_sweep or isinstance(error, Preempted) or not isinstance(error, SpeechtrainError):
                raise _Stop from error
            line = one_line(f"job {len(self.ended)} ({named}): {error}")
            print(f"speechtrain: error: {line}", file=sys.stderr)
            return math.nan  # an optimizing sweeper continues with its next job
        finally:
            with contextlib.suppress(OSError):  # a job of a sweep that wrote nothing keeps no folder
                Path(settings.runtime.output_dir).rmdir()

    def conclude(self) -> None:
        """Print a table of several jobs. Raise their error; of several, the first with their number."""
        errors = [end for _, end in self.ended if isinstance(end, Exception)]
        for number, (named, end) in enumerate(self.ended if len(self.ended) > 1 else (), 1):
            result = {"status": type(end).__name__} if isinstance(end, Exception) else end
            score = "-" if result.get("metric") is None else f"{result['metric']:.4g}"
            say(f"job {number:>3}  {score:>8}  {result['status']:<12} {named}")
        if not errors:
            return
        last, first = errors[-1], errors[0]
        if len(self.ended) == 1 or not isinstance(last, SpeechtrainError) or isinstance(last, Preempted):
            raise last
        raise type(first)(f"{len(errors)} of {len(self.ended)} jobs failed; the first: {first}")
