"""Starting of a run from its composed config: checks, run directory, ranks and result."""

from __future__ import annotations

import contextlib
import copy
import os
import shlex
import shutil
import signal
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from speechtrain import errors, run_directory
from speechtrain.checkpoint.whole import Checkpointer
from speechtrain.config.build import (
    build,
    build_data,
    build_device,
    build_encoder,
    build_launcher,
    build_precision,
    build_tokenizer,
    dry_build,
)
from speechtrain.config.check import check
from speechtrain.config.resolved import dump, resolve
from speechtrain.config.resume_fields import key_of_override
from speechtrain.config.targets import ALLOW_TARGETS, target_class
from speechtrain.data.base import DataModule
from speechtrain.devices.base import Device
from speechtrain.errors import ConfigError, DataError, MachineError, Preempted, RunError, SpeechtrainError
from speechtrain.files import atomic, print_line, read_text, write_json, write_text
from speechtrain.launcher import (
    AGENT,
    NETWORK_VARIABLES,
    RANK_MEMORY,
    Job,
    Launcher,
    LaunchResult,
    holds_secret,
)
from speechtrain.report.advice import advice
from speechtrain.run_directory import ABOUT, CONFIG, DEVICE, ERROR, RANKS, RESULT, About, RunLock, RunResult
from speechtrain.runs.command_line import Command
from speechtrain.runs.on_host import host_environment, raise_or_warn
from speechtrain.runs.recipe_needs import config_for_plan
from speechtrain.runs.resume import new_run_line
from speechtrain.runs.started_runs import remember, start_id
from speechtrain.text.vocabulary import NoText

_FIXABLE = (ConfigError, DataError, MachineError)
"""Errors that the user corrects. If a new run ends with one before its first step, its files are removed."""

_FIRST_FILES = (CONFIG, ABOUT, DEVICE, RESULT, ERROR, "lock", RANKS, "tokenizer.model", "tokenizer.json")
"""The files that a run writes before its first step. Its launcher's files are not among them."""
_COMPLETE = ("finished", "target", "time")
"""The statuses of a run that has ended by itself."""
_MIN_FREE = 256 * 2**20  # bytes that a run needs on its disk


def start_run(command: Command, config: DictConfig, user_files: Mapping[str, str]) -> RunResult:
    """Start the run whose directory ``config`` names, or continue it. Return its result when it has ended.

    A new run stores ``user_files``, the user's own YAML files. A finished run returns its result at once if
    its limits have not changed. Raises the SpeechtrainError that stopped the run, here or in a rank.
    """
    values = check(config)
    _settle_resume(config)
    _warn_of_unused_folder(values["data"])
    rank_bytes = dry_build(config_for_plan(config))
    device = build_device(config)
    launcher = command.external_launch or build_launcher(config)
    job = _checked_job(config, device, launcher, rank_bytes)
    if config.dry_run:
        _print_start(config, job, launcher)
        return RunResult("dry run")
    earlier_result = _earlier_result(config, command)
    if earlier_result:
        return earlier_result

    run_dir = job.run_dir
    is_new = not job.config.exists()
    about = _about(config, device, command, user_files)
    _write_files(config, job, about, is_named=command.run_dir is not None)
    remember(run_dir)
    result = _launch(job, launcher, is_new=is_new)
    if result.status == "submitted":
        return result
    result = replace(result, limits=values["trainer"])
    run_directory.write_result(run_dir, asdict(result))
    if result.status == "preempted":
        raise Preempted(f"saved at step {result.steps} in {run_dir}. The same command continues")
    print_line(f"{run_dir}: {_describe(result)}")
    _conclude(config, command, result)
    return result


def _checked_job(config: DictConfig, device: Device, launcher: Launcher, rank_bytes: int) -> Job:
    """Return the job of a run in which a rank needs ``rank_bytes`` of memory for its model.

    If all ranks run on this host, the job has the environment of the device. Raises the SpeechtrainError of
    the first check of device, launcher or run directory that fails.
    """
    device.check_precision(build_precision(config))
    if config.data.get("shapes") == 0:
        device.validate_shapes(
            []
        )  # The shapes vary. A device that compiles a graph for each shape refuses it.
    job = _job(config, device, rank_bytes)
    launcher.check(job)
    _check_run_dir(job.run_dir, launcher.files)
    is_dry = config.dry_run
    if launcher.is_here(job):
        problem = device.absence(job.world_size)
        raise_or_warn(problem, is_warning=is_dry)
        variables = host_environment(device, job.world_size, rank_bytes, run_dir=job.run_dir, is_dry=is_dry)
        job = replace(job, environment={**job.environment, **variables})
    raise_or_warn(launcher.missing_program(job), is_warning=is_dry)
    return job


def _launch(job: Job, launcher: Launcher, *, is_new: bool) -> RunResult:
    """Start the ranks of ``job`` and return the result of the run when they have ended.

    The status is ``submitted`` if the ranks run without this command. Raises the SpeechtrainError of a
    failure. The files of a new run are removed if no process was started, or if the user must correct an
    error.
    """
    run_dir = job.run_dir
    try:
        end = launcher.launch(job)
    except SpeechtrainError:  # No process was started.
        if is_new:
            _discard_files(run_dir, launcher)
        raise
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"the same command continues from {_last_saved(run_dir)}") from None
    if end.stop_hint:
        print_line(end.stop_hint)
        return RunResult("submitted")
    result = _run_result(end, run_dir)
    if result.status == "failed":
        error = _error_of(result, run_dir, end.log)
        if is_new and result.is_cause and isinstance(error, _FIXABLE):
            _discard_files(run_dir, launcher)
        raise error
    return result


def _print_start(config: DictConfig, job: Job, launcher: Launcher) -> None:
    """Print the shell lines that start a run.

    Warn if recordings have too few encoder frames for their labels. This needs data that can be read here.
    """
    with contextlib.suppress(SpeechtrainError, RuntimeError):
        with torch.device("meta"):
            encoder = build_encoder(config)
        data = build_data(config, build_tokenizer(config))
        raise_or_warn(data.crowded_transcripts(encoder.frames), is_warning=True)
    lines = f"{_config_lines(config, job)}{launcher.render(job)}\n"
    print(errors.escape_controls(lines, keep=f"\n\t{errors.SPELLING}"), end="", flush=True)


def _warn_of_unused_folder(data: Any) -> None:
    """Warn if ``DATASET_DIR`` is set and does not occur in ``data``, the resolved group of the config."""
    folder = os.environ.get("DATASET_DIR", "").rstrip("/")
    if folder and folder not in str(data):
        choice = f"data=fsdd, or data=manifest data.train={folder}"
        raise_or_warn(
            f"DATASET_DIR={folder} is set, but this run reads other data. Add {choice}", is_warning=True
        )


def _settle_resume(config: DictConfig) -> None:
    """Replace ``resume=never`` by ``auto``, because ranks that their launcher restarts continue the run.

    Raises RunError if ``resume=never`` meets a run with checkpoints, or ``resume=must`` one without.
    """
    checkpointer = Checkpointer(Path(config.run_dir))
    count = len(checkpointer.folders())
    if (config.resume == "never" and count) or (config.resume == "must" and not count):
        line = f"resume={config.resume}, but {checkpointer.root} holds {count} checkpoints"
        raise RunError(f"{line}. Correct run_dir")
    if config.resume == "never":
        config.resume = "auto"


def _earlier_result(config: DictConfig, command: Command) -> RunResult | None:
    """Return and print the result of a run that is complete. It is None if ``config`` adds updates to it.

    Raises DataError if the training set has changed since. It is not compared if it cannot be read here.
    """
    run_dir = Path(config.run_dir)
    result = run_directory.read_result(run_dir)
    if result is None or not _is_complete(result, run_dir):
        return None
    reason = ""
    max_steps = config.trainer.max_steps
    if max_steps is not None and max_steps < (result.steps or 0):
        reason = f" with {result.steps} updates, so trainer.max_steps={max_steps} adds none"
    elif result.limits != resolve(config)["trainer"]:
        return None
    if result.data:
        _check_content(config, command, result.data)
    print_line(f"{run_dir} is done{reason}: {_describe(result)}")
    return result


def _check_content(config: DictConfig, command: Command, former_content: Mapping[str, Any]) -> None:
    """Raise DataError if the training set can be read here and differs from ``former_content``."""
    try:
        data: DataModule = build(config, "data", tokenizer=NoText())
        content = data.content()
    except SpeechtrainError:
        return
    if content.get("digest") != former_content.get("digest"):
        run_dir = Path(config.run_dir)
        line = new_run_line(run_directory.read_about(run_dir), command)
        counts = f"{former_content['recordings']} recordings then, {content['recordings']} now"
        cause = f"data.train has changed since {run_dir} ended ({counts})"
        raise DataError(f"{cause}. This command starts a new run: {line}")


def _config_lines(config: DictConfig, job: Job) -> str:
    """Return shell lines that write the config of the ranks, or an empty text if the file has it already."""
    config = copy.deepcopy(config)
    config.dry_run = False
    text = dump(config)
    if job.config.is_file() and text == read_text(job.config):
        return ""
    end = "END_OF_CONFIG"
    while end in text:
        end += "_"
    folder, path = shlex.quote(str(job.run_dir)), shlex.quote(str(job.config))
    return f"mkdir -p {folder} && cat > {path} <<'{end}'\n{text}{end}\n"


def _about(config: DictConfig, device: Device, command: Command, user_files: Mapping[str, str]) -> About:
    """Return the content of ``run.json``.

    For a new run, it describes this start as the first start. Otherwise it keeps the first start and stores
    this start as the latest one.
    """
    run_dir = Path(config.run_dir)
    start = {**run_directory.origin(command.argv), "seed": config.seed, "device": device.name}
    if (run_dir / CONFIG).exists():
        about = replace(run_directory.read_about(run_dir), latest=start)
    else:
        about = About(**start, **command.identity(user_files))
    return replace(about, start_id=start_id(run_dir))


def _job(config: DictConfig, device: Device, rank_bytes: int) -> Job:
    """Return the job of the launcher, in which a rank needs ``rank_bytes`` of memory for its model."""
    run_dir = Path(config.run_dir)
    environment = {name: value for name, value in os.environ.items() if name == ALLOW_TARGETS}
    environment |= {NETWORK_VARIABLES: " ".join(device.facts.network_variables), RANK_MEMORY: str(rank_bytes)}
    forwarded, size = device.facts.forwarded_variables, int(config.world_size)
    return Job(
        run_dir / CONFIG, run_dir, world_size=size, environment=environment, forwarded_variables=forwarded
    )


def _conclude(config: DictConfig, command: Command, result: RunResult) -> None:
    """Print advice on a complete run. If ``config.tracking`` has the console, write the run's report.

    Without the console, nobody watches the run, so it has no report. After a run on example data, print the
    command that trains on the user's recordings.
    """
    run_dir = Path(config.run_dir)
    for line in advice(result, run_directory.read_metrics(run_dir).rows):
        print_line(line)
    if "console" in (config.tracking.get("trackers") or {}):
        _write_report(run_dir)
    if _is_example(config.data.get("train")) and not command.is_sweep:
        words = ["speechtrain", "train", "recipe=scratch", "data.train=FOLDER_OR_MANIFEST"]
        words.append("trainer.max_hours=0.5")
        for override in command.overrides:
            group = key_of_override(override).partition(".")[0]
            if group in ("device", "precision", "launcher", "world_size"):
                words.append(override)
        print(errors.escape_controls(f"your own recordings: {shlex.join(words)}"))


def _write_report(run_dir: Path) -> None:
    """Write ``report.html`` and print its path. A failure is one line, because the run has ended well."""
    from speechtrain.report import page, run  # The import takes half a second.

    path = run_dir / "report.html"
    try:
        runs = [run.read_run(run_dir)]
        write_text(path, page.page(runs), private=run.hold_secrets(runs))
        print(errors.escape_controls(f"report: {path}"))
    except Exception as error:
        print(f"no report: {type(error).__name__}: {errors.one_line(str(error))}")


def _is_example(train: Any) -> bool:
    """Return whether ``data.train`` is example data, which only shows that training works."""
    if not OmegaConf.is_dict(train) or "_target_" not in train:
        return False
    return bool(getattr(target_class(train._target_, "data.train"), "is_example", False))


def _is_complete(result: RunResult, run_dir: Path) -> bool:
    """Return whether a run has ended by itself, with metrics and with a checkpoint of its last step."""
    checkpoints = {folder.name for folder in Checkpointer(run_dir).folders()}
    is_saved = f"step-{str(result.steps).zfill(8)}" in checkpoints
    return result.metrics is not None and is_saved and result.status in _COMPLETE


def _write_files(config: DictConfig, job: Job, about: About, *, is_named: bool) -> None:
    """Write the files that the ranks of a start read, and remove earlier results.

    Raises RunError if another user owns the folder and the command does not name it.
    """
    job.run_dir.mkdir(parents=True, exist_ok=True)
    lock = RunLock(job.run_dir).acquire()
    try:
        owner = run_directory.other_owner(job.run_dir)
        if owner is not None:
            line = f"{job.run_dir} belongs to user {owner}, who can change what it executes"
            if not is_named:
                raise RunError(f"{line}. run_dir={job.run_dir} uses it all the same")
            print_line(line)
        tokenizer = build_tokenizer(config)
        tokenizer.save(str(job.run_dir))  # Ranks on other hosts may not see its source.
        config.tokenizer.update(tokenizer.saved_arguments(str(job.run_dir)))
        text = dump(config)
        content = asdict(about)
        private = holds_secret(f"{text}\n{content}")
        # run.json comes first. With a config but without run.json, the same command would be refused, because
        # its overrides would seem to be new.
        write_json(job.run_dir / ABOUT, content, private=private)
        write_text(job.config, text, private=private)
        run_directory.remove_results(job.run_dir)
    finally:
        lock.release()  # Rank 0 acquires it next.
    simulated = config.trainer.simulate_world
    if simulated:
        accumulate = simulated // job.world_size
        print_line(
            f"trainer.simulate_world={simulated}: world_size {job.world_size} × accumulate {accumulate}"
        )


def _run_result(end: LaunchResult, run_dir: Path) -> RunResult:
    """Return the result of a run whose processes have ended.

    Raises MachineError if they were ended from outside, and RunError if no rank wrote a result.
    """
    result = run_directory.read_result(run_dir)
    if result is None or result.status == "failed":
        result = run_directory.read_failure(run_dir)
    if end.cause and (result is None or result.status == "failed"):
        raise MachineError(end.cause)
    if result is not None:
        return result
    if end.returncode == Preempted.exit_code:
        raise Preempted("stopped before the ranks had started. The same command continues")
    if end.returncode < 0:
        name = signal.Signals(-end.returncode).name
        hint = " (out of memory? dmesg shows it)" if name == "SIGKILL" else ""
        continuation = f"The same command continues from {_last_saved(run_dir)}"
        raise MachineError(f"the run was ended by {name}{hint}. {continuation}")
    message = f"the ranks ended with code {end.returncode} and wrote no {run_dir / RESULT}"
    log = run_dir / end.log
    if log.exists():  # launcher=local has none.
        message = f"{message}. See {log}"
    # A full disk may be the reason that no result exists. Then this write raises OSError, which names it. The
    # error below removes the file again.
    with atomic(run_dir / RESULT) as temporary:
        temporary.write_text(message)
        raise RunError(message)


def _last_saved(run_dir: Path) -> str:
    """Return the name of the last checkpoint, or ``its beginning``, as a part of a message."""
    checkpoints = Checkpointer(run_dir).folders()
    return checkpoints[-1].name if checkpoints else "its beginning"


def _check_run_dir(run_dir: Path, launcher_files: Iterable[str]) -> None:
    """Raise MachineError or RunError if a run cannot write to ``run_dir``, or if it holds other files.

    Logs and texts are not other files, because a batch system may write them there before the run.
    """
    folder = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    if not os.access(folder, os.W_OK):
        raise MachineError(f"{folder} is not writable. Set run_dir or OUTPUT_DIR to a folder that is")
    names = set()
    for path in run_dir.glob("[!.]*"):
        if path.suffix not in (".log", ".txt", ".out", ".err"):
            names.add(path.name)
    if names and not names & {*_FIRST_FILES, *launcher_files, "checkpoints", "metrics.jsonl"}:
        raise RunError(f"{run_dir} holds other files ({min(names)}, …). Set run_dir to another folder")
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if free < _MIN_FREE:
        need = f"{folder} has {free >> 20} MiB free, and a run needs {_MIN_FREE >> 20}"
        raise MachineError(f"{need}. Delete files or set run_dir")


def _discard_files(run_dir: Path, launcher: Launcher) -> None:
    """Empty the folder of a run that ended before its first step, unless it holds a file of someone else."""
    patterns = (*_FIRST_FILES, *launcher.files)
    paths = list(run_dir.iterdir())
    for path in paths:
        if not any(fnmatchcase(path.name, pattern) for pattern in patterns):
            return
    for path in paths:
        if path.name == RANKS:
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _error_of(result: RunResult, run_dir: Path, log: str = AGENT) -> SpeechtrainError:
    """Return the error that the rank which failed first has written into ``result``."""
    error_class = errors.class_of(result.exit_code or 1)
    folder = run_directory.rank_folder(run_dir, result.rank)
    source = f" (trace in {folder / ERROR})" if error_class is SpeechtrainError else ""
    if not result.is_cause:  # The rank was killed, or its host was lost, so it wrote no error.
        source = f" (which rank, and how it ended: {run_dir / log}. The same command continues)"
    return error_class(f"{result.error}{source}")


def _describe(result: RunResult) -> str:
    """Return status, last step, metrics and speed as a line."""
    metrics = run_directory.outcome_text(result.metrics, result.last_metrics, result.checkpoint, result.speed)
    return f"{result.status} at step {result.steps}, {metrics}".rstrip(", ")
