"""Starting of a run from its composed config: checks, run directory, ranks and result."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import shlex
import shutil
import signal
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from speechtrain import errors, run_directory
from speechtrain.checkpoint.checkpointer import Checkpointer, read_state
from speechtrain.data.base import DataModule
from speechtrain.devices.base import Device
from speechtrain.errors import (
    ConfigError,
    DataError,
    MachineError,
    MissingPackage,
    Preempted,
    RunError,
    SpeechtrainError,
)
from speechtrain.files import atomic, holds_secret, print_line, read_text, write_json, write_text
from speechtrain.launch.launcher import (
    AGENT,
    NETWORK_VARIABLES,
    RANK_MEMORY,
    Job,
    Launcher,
    LaunchResult,
    here_document,
)
from speechtrain.overrides import key_of_override
from speechtrain.report.advice import advice
from speechtrain.run_directory import (
    ABOUT,
    CONFIG,
    DEVICE,
    ERROR,
    RANKS,
    RESULT,
    SIDES,
    TEACHER,
    About,
    RunLock,
    RunResult,
)
from speechtrain.start.build import StartParts, dry_build
from speechtrain.start.check_keys import check
from speechtrain.start.command_line import Command
from speechtrain.start.on_host import host_environment, raise_or_warn
from speechtrain.start.own_code import copy_modules, own_code, refuse_changes
from speechtrain.start.recipe_needs import config_for_plan
from speechtrain.start.resolved import dump, resolve
from speechtrain.start.resume import new_run_line
from speechtrain.start.run_config import part_of, run_config
from speechtrain.start.stored import read_config
from speechtrain.start.targets import ALLOW_TARGETS, target_class
from speechtrain.start.untranscribed import print_gain
from speechtrain.text.vocabulary import Tokenizer

_FIXABLE = (ConfigError, DataError, MachineError)
"""Errors that the user corrects. If a new run ends with such an error before its first step, the files that
it has written are removed."""

_FIRST_FILES = (
    CONFIG,
    ABOUT,
    DEVICE,
    RESULT,
    ERROR,
    "lock",
    RANKS,
    "parts",
    "tokenizer.model",
    "tokenizer.json",
    SIDES,
)
"""The files and folders that a run writes before its first step. The files of its launcher are in
``Launcher.files``."""
_COMPLETE_STATUSES = ("finished", "target", "time")
"""The statuses of a run that was neither interrupted nor failed."""
_MIN_FREE_BYTES = 256 * 2**20
"""Free space that the disk of the run directory must have before a start."""


def start_run(command: Command, config: DictConfig, user_files: Mapping[str, str]) -> RunResult:
    """Start or continue the run in ``config.run_dir``, wait for its end, and return its result.

    ``user_files`` holds the texts of the user's own YAML files by ``group/choice``. A new run stores them. A
    complete run returns its stored result at once if its limits have not changed. With ``dry_run``, the shell
    lines of the start are printed and no process is started. Raises the SpeechtrainError that stopped the
    run, in this process or in a rank.
    """
    values = check(config)  # The values are resolved: they contain no interpolations.
    _check_resume(config)
    _warn_of_unused_folder(values["data"])
    parts = _built_parts(config)
    device = part_of(config, "device").build()
    launcher = command.external_launch or part_of(config, "launcher").build()
    job = _checked_job(config, device, launcher, parts.rank_bytes if parts else 0)
    if config.dry_run:
        _print_start(config, job, launcher, parts)
        return RunResult("dry run")
    assert parts is not None
    if launcher.is_here:  # Other hosts may have the data at other places.
        _check_moved_data(config, parts.data)
    earlier_result = _earlier_result(config, command, parts.data)
    if earlier_result:
        return earlier_result

    run_dir = job.run_dir
    is_new = not job.config.exists()
    about = _about(config, device, command, user_files)
    _write_files(
        config, job, about, parts.tokenizer, is_new=is_new, is_run_dir_explicit=command.run_dir is not None
    )
    result = _launch(job, launcher, is_new=is_new)
    if result.status == "submitted":
        return result
    if result.status == "preempted":
        raise Preempted(f"saved at step {result.steps} in {run_dir}. The same command continues")
    print_line(f"{run_dir}: {_describe(result)}")
    _conclude(config, command, result)
    return result


def _built_parts(config: DictConfig) -> StartParts | None:
    """Build the parts of the run for their errors, and return them.

    In a dry run, a missing package is only a warning. The result is then None. Placeholders replace a missing
    tokenizer and missing data of a dry run.
    """
    try:
        return dry_build(run_config(config_for_plan(config)))
    except MissingPackage as error:
        raise_or_warn(str(error), is_warning=config.dry_run)
        return None


def _checked_job(config: DictConfig, device: Device, launcher: Launcher, rank_bytes: int) -> Job:
    """Return the job of a run after the checks of its device, launcher and run directory.

    ``rank_bytes`` is the memory that each rank needs for its model. If all ranks run on this host, the
    environment of the job has the variables of the device. On other hosts, ``start.on_host`` sets these
    variables. Raises the SpeechtrainError of the first check that fails. In a dry run, a missing device or
    program is only a warning, because another machine may execute the printed lines.
    """
    device.check_precision(part_of(config, "precision").build())
    if config.data.get("shapes") == 0:
        # An empty list says that the shapes of the batches vary. A device that compiles a graph for each
        # shape refuses them.
        device.validate_shapes([])
    run_dir = Path(config.run_dir)
    environment = {
        NETWORK_VARIABLES: " ".join(device.facts.network_variables),
        RANK_MEMORY: str(rank_bytes),
    }
    if ALLOW_TARGETS in os.environ:
        environment[ALLOW_TARGETS] = os.environ[ALLOW_TARGETS]
    # config.yaml keeps references to the environment, such as ``${oc.env:NUM_STEPS,null}``. On a host without
    # the variable, a rank would use the default.
    references = re.findall(r"\$\{oc\.env:(\w+)", OmegaConf.to_yaml(config))
    job = Job(
        run_dir / CONFIG,
        run_dir,
        world_size=int(config.world_size),
        environment=environment,
        forwarded_variables=(*device.facts.forwarded_variables, *references),
    )
    launcher.check(job)
    _check_run_dir(run_dir, launcher.files)
    is_dry_run = config.dry_run
    if launcher.is_here:
        raise_or_warn(device.absence(job.world_size), is_warning=is_dry_run)
        environment |= host_environment(
            device, job.world_size, rank_bytes, run_dir=run_dir, is_dry=is_dry_run
        )
    raise_or_warn(launcher.missing_program(), is_warning=is_dry_run)
    return replace(job, environment=environment)


def _launch(job: Job, launcher: Launcher, *, is_new: bool) -> RunResult:
    """Start the ranks of ``job``, wait for their end, and return the result of the run.

    If the ranks run without this command, as in a batch system, the status is ``submitted`` at once. Raises
    the SpeechtrainError of a failure. The files of a new run are removed if no process was started, or if
    the run failed before its first step with an error that the user must correct.
    """
    run_dir = job.run_dir
    try:
        launch_result = launcher.launch(job)
    except SpeechtrainError:  # No process was started.
        if is_new:
            _discard_files(run_dir, launcher)
        raise
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"the same command continues from {_last_saved(run_dir)}") from None
    if launch_result.stop_hint:
        print_line(launch_result.stop_hint)
        return RunResult("submitted")
    result = _run_result(launch_result, run_dir)
    if result.status == "failed":
        error = _error_of(result, run_dir, launch_result.log)
        if is_new and result.is_cause and isinstance(error, _FIXABLE):
            _discard_files(run_dir, launcher)
        raise error
    return result


def _print_start(config: DictConfig, job: Job, launcher: Launcher, parts: StartParts | None) -> None:
    """Print the shell lines that write the config and start the ranks.

    The number of accumulated micro-batches is printed on stderr.

    If the data can be read on this host, also print a warning about recordings that have fewer encoder frames
    than their labels need.
    """
    if config.trainer.simulate_world:
        errors.print_notice(_factors_line(config))
    # The placeholder of a missing tokenizer has another class and other labels.
    tokenizer_class = part_of(config, "tokenizer").part_class
    if parts and parts.encoder and isinstance(parts.tokenizer, tokenizer_class):
        with contextlib.suppress(SpeechtrainError, RuntimeError):
            if problem := parts.data.crowded_transcripts(parts.encoder.frames):
                errors.print_notice(f"warning: {problem}")
    lines = f"{launcher.render(job)}\n"
    stored = copy.deepcopy(config)
    stored.dry_run = False
    text = dump(stored)
    if not job.config.is_file() or text != read_text(job.config):
        write = f"cat > {shlex.quote(str(job.config))}"
        lines = f"mkdir -p {shlex.quote(str(job.run_dir))} && {here_document(write, text)}{lines}"
    print(errors.escape_controls(lines, keep=f"\n\t{errors.FORMAT_CHARACTERS}"), end="", flush=True)


def _warn_of_unused_folder(data: Any) -> None:
    """Warn if ``DATASET_DIR`` is set, but no value of ``data`` contains it.

    ``data`` is the resolved group ``data`` of the config.
    """
    folder = os.environ.get("DATASET_DIR", "").rstrip("/")
    if folder and folder not in str(data):
        overrides = f"data=fsdd, or data=manifest data.train={folder}"
        errors.print_notice(
            f"warning: DATASET_DIR={folder} is set, but this run reads other data. Add {overrides}"
        )


def _check_resume(config: DictConfig) -> None:
    """Raise RunError if the checkpoints in the run directory contradict ``config.resume``.

    ``resume=never`` requires that there are none, ``resume=must`` that there are some. After this check,
    ``never`` becomes ``auto``, so that ranks which their launcher restarts continue from a checkpoint.
    """
    checkpointer = Checkpointer(Path(config.run_dir))
    count = len(checkpointer.folders())
    if (config.resume == "never" and count) or (config.resume == "must" and not count):
        problem = f"resume={config.resume}, but {checkpointer.root} holds {count} checkpoints"
        raise RunError(f"{problem}. Correct run_dir")
    if config.resume == "never":
        config.resume = "auto"


def _check_moved_data(config: DictConfig, data: DataModule) -> None:
    """Raise DataError if ``data`` is at another place than the run's data was, and differs from it."""
    run_dir = Path(config.run_dir)
    folders = Checkpointer(run_dir).folders()
    if not folders:
        return
    former = read_config(run_dir).data
    if any(former.get(key) != config.data.get(key) for key in ("train", "valid")):
        data.load_state_dict(read_state(folders[-1])["data"])


def _earlier_result(config: DictConfig, command: Command, data: DataModule) -> RunResult | None:
    """Return the stored result of a complete run, and print it.

    A run is complete if it ended normally, with metrics and with a checkpoint of its last step. The result is
    None if the run is not complete, or if its limits have changed so that more updates follow. Raises
    DataError if the training set has changed since the run ended.
    """
    run_dir = Path(config.run_dir)
    result = run_directory.read_result(run_dir)
    if result is None or result.metrics is None or result.status not in _COMPLETE_STATUSES:
        return None
    saved_steps = {folder.name for folder in Checkpointer(run_dir).folders()}
    if f"step-{str(result.steps).zfill(8)}" not in saved_steps:
        return None
    reason = ""
    max_steps = config.trainer.max_steps
    if max_steps is not None and max_steps < (result.steps or 0):
        reason = f" with {result.steps} updates, so trainer.max_steps={max_steps} adds none"
    elif result.limits != resolve(config)["trainer"]:
        return None
    content = data.content() if result.data else {}
    if result.data and content.get("digest") != result.data.get("digest"):
        new_command = new_run_line(run_directory.read_about(run_dir), command)
        counts = f"{result.data['recordings']} recordings then, {content['recordings']} now"
        cause = f"data.train has changed since {run_dir} ended ({counts})"
        raise DataError(f"{cause}. This command starts a new run: {new_command}")
    print_line(f"{run_dir} is done{reason}: {_describe(result)}")
    return result


def _about(config: DictConfig, device: Device, command: Command, user_files: Mapping[str, str]) -> About:
    """Return the new content of ``run.json``.

    Its main fields describe the first start of the run. If the run exists already, these fields stay, and
    ``latest`` describes this start. Raises RunError if the run's own code has changed.
    """
    run_dir = Path(config.run_dir)
    start = {**run_directory.origin(command.argv), "seed": config.seed, "device": device.name}
    parts = own_code(config)
    if (run_dir / CONFIG).exists():
        about = replace(run_directory.read_about(run_dir), latest=start)
        if not config.accept_code:
            refuse_changes(about.parts, parts, run_dir)
    else:
        about = About(**start, overrides=command.overrides, folder=os.getcwd(), written=dict(user_files))
    return replace(about, parts=parts)


def _conclude(config: DictConfig, command: Command, result: RunResult) -> None:
    """Print advice on a complete run, and write its report if the console is one of its trackers.

    A run without the console is part of a script or a benchmark, where nobody opens a report. After a run on
    example data, print the command that trains on the user's recordings.
    """
    run_dir = Path(config.run_dir)
    try:
        events = run_directory.read_metrics(run_dir).rows
    except OSError as error:  # The log is too large, or its disk is gone.
        errors.print_notice(f"warning: no advice: {error.filename}: {error.strerror}")
    else:
        for line in advice(result, events):
            print_line(line)
    print_gain(run_dir)
    if "console" in (config.tracking.get("trackers") or {}):
        _write_report(run_dir)
    train = config.data.get("train")
    is_example = False
    if OmegaConf.is_dict(train) and "_target_" in train:
        is_example = getattr(target_class(train._target_, "data.train"), "is_example", False)
    if is_example and not command.is_sweep:
        next_command = ["speechtrain", "train", "recipe=scratch", "data.train=FOLDER_OR_MANIFEST"]
        next_command.append("trainer.max_hours=0.5")
        for override in command.overrides:
            group = key_of_override(override).partition(".")[0]
            if group in ("device", "precision", "launcher", "world_size"):
                next_command.append(override)
        print(errors.escape_controls(f"your own recordings: {shlex.join(next_command)}"))


def _write_report(run_dir: Path) -> None:
    """Write ``report.html`` and print its path.

    If the report cannot be written, only one line is printed, because the training itself has succeeded.
    """
    from speechtrain.report import page, run  # The import takes half a second.

    path = run_dir / "report.html"
    try:
        runs = [run.read_run(run_dir)]
        write_text(path, page.page(runs), private=run.hold_secrets(runs))
        print(errors.escape_controls(f"report: {path}"))
    except Exception as error:
        print(f"no report: {type(error).__name__}: {errors.one_line(str(error))}")


def _write_files(
    config: DictConfig,
    job: Job,
    about: About,
    tokenizer: Tokenizer,
    *,
    is_new: bool,
    is_run_dir_explicit: bool,
) -> None:
    """Write the files of the run directory that the ranks read, and remove the results of earlier starts.

    Raises RunError if another user owns the run directory, unless the command contains ``run_dir=``, and if
    another command has started the run since this command found that it ``is_new``.
    """
    job.run_dir.mkdir(parents=True, exist_ok=True)
    lock = RunLock(job.run_dir).acquire()
    try:
        if is_new and job.config.exists():  # The rank 0 of that command has not acquired the lock yet.
            raise RunError(f"another command has just started {job.run_dir}. Wait for it, or set run_dir")
        owner = run_directory.other_owner(job.run_dir)
        if owner is not None:
            problem = f"{job.run_dir} belongs to user {owner}, who can change what it executes"
            if not is_run_dir_explicit:
                raise RunError(f"{problem}. run_dir={job.run_dir} uses it all the same")
            print_line(problem)
        # The ranks load this copy. Those on other hosts may have no access to the original file.
        tokenizer.save(str(job.run_dir))
        config.tokenizer.update(tokenizer.saved_arguments(str(job.run_dir)))
        text = dump(config)
        content = asdict(about)
        is_private = holds_secret(f"{text}\n{content}")
        # run.json is written first. If a kill left a config without run.json, the same command would be
        # refused, because all its overrides would seem to be new.
        write_json(job.run_dir / ABOUT, content, private=is_private)
        copy_modules(about.parts, job.run_dir)
        write_text(job.config, text, private=is_private)
        run_directory.remove_results(job.run_dir)
    finally:
        lock.release()  # Rank 0 acquires the lock next.
    if config.trainer.simulate_world:
        print_line(_factors_line(config))


def _factors_line(config: DictConfig) -> str:
    """Return the factors of ``trainer.simulate_world``, the number of micro-batches per update, as a line."""
    simulate_world, world_size = config.trainer.simulate_world, config.world_size
    factors = f"world_size {world_size} × accumulate {simulate_world // world_size}"
    return f"trainer.simulate_world={simulate_world}: {factors}"


def _run_result(launch_result: LaunchResult, run_dir: Path) -> RunResult:
    """Return the result of a run whose processes have ended.

    If a rank failed, it is the result of the rank that failed first. Raises MachineError if the
    processes were ended from outside, and RunError if no rank wrote a result.
    """
    result = run_directory.read_result(run_dir)
    if result is None or result.status == "failed":
        result = run_directory.read_failure(run_dir)
    if launch_result.cause and (result is None or result.status == "failed"):
        raise MachineError(launch_result.cause)
    exit_code = launch_result.returncode
    # Ranks save and stop when their agent is killed. The kill is then the outcome of the run.
    is_agent_killed = exit_code < 0 and result is not None and result.status == "preempted"
    if result is not None and not is_agent_killed:
        return result
    if exit_code == Preempted.exit_code:
        raise Preempted("stopped before the ranks had started. The same command continues")
    if exit_code < 0:  # The code of a process that a signal has ended is the negative signal number.
        signal_name = signal.Signals(-exit_code).name
        hint = " (out of memory? dmesg shows it)" if signal_name == "SIGKILL" else ""
        continuation = f"The same command continues from {_last_saved(run_dir)}"
        raise MachineError(f"the run was ended by {signal_name}{hint}. {continuation}")
    if exit_code == RunError.exit_code:
        # If rank 0 was refused because another command trains the run, the lock raises the same error.
        RunLock(run_dir).acquire().release()
    message = f"the ranks ended with code {exit_code} and wrote no {run_dir / RESULT}"
    log = run_dir / launch_result.log
    if log.exists():  # launcher=local writes no log.
        message = f"{message}. See {log}"
    # A full disk may be the reason that no result exists. To find out, a temporary file is written, which
    # raises OSError if the disk is full. The RunError ends the block before the file is renamed to
    # result.json, and so removes the file.
    with atomic(run_dir / RESULT) as temporary:
        temporary.write_text(message)
        raise RunError(message)


def _last_saved(run_dir: Path) -> str:
    """Return the name of the last checkpoint, or ``its beginning`` without one, for a message."""
    checkpoints = Checkpointer(run_dir).folders()
    return checkpoints[-1].name if checkpoints else "its beginning"


def _check_run_dir(run_dir: Path, launcher_files: Iterable[str]) -> None:
    """Raise an error if ``run_dir`` is not a folder for a run.

    MachineError: it is not writable, or its disk is almost full. RunError: it has files, and none of them is
    a run's. Logs and texts do not count, because a batch system may write them there before the run.
    """
    nearest_folder = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    if not os.access(nearest_folder, os.W_OK):
        raise MachineError(f"{nearest_folder} is not writable. Set run_dir or OUTPUT_DIR to a folder that is")
    names = set()
    for path in run_dir.glob("[!.]*"):
        if path.suffix not in (".log", ".txt", ".out", ".err"):
            names.add(path.name)
    run_files = {*_FIRST_FILES, *launcher_files, "checkpoints", "metrics.jsonl", TEACHER}
    if names and not names & run_files:
        raise RunError(f"{run_dir} holds other files ({min(names)}, …). Set run_dir to another folder")
    disk = os.statvfs(nearest_folder)
    free_bytes = disk.f_bavail * disk.f_frsize
    if free_bytes < _MIN_FREE_BYTES:
        free_mib, min_mib = free_bytes // 2**20, _MIN_FREE_BYTES // 2**20
        problem = f"{nearest_folder} has {free_mib} MiB free, and a run needs {min_mib}"
        raise MachineError(f"{problem}. Delete files or set run_dir")


def _discard_files(run_dir: Path, launcher: Launcher) -> None:
    """Remove the files of a run that ended before its first step.

    If the folder also has a file that neither the run nor the launcher writes, nothing is removed.
    """
    patterns = (*_FIRST_FILES, *launcher.files)
    paths = list(run_dir.iterdir())
    for path in paths:
        if not any(fnmatchcase(path.name, pattern) for pattern in patterns):
            return
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _error_of(result: RunResult, run_dir: Path, log: str = AGENT) -> SpeechtrainError:
    """Return the error of the failed rank whose result is ``result``, with the file that has details."""
    error_class = errors.class_of(result.exit_code or 1)
    folder = run_directory.rank_folder(run_dir, result.rank)
    # The class SpeechtrainError itself is for unexpected exceptions, whose message alone explains little.
    details = f" (trace in {folder / ERROR})" if error_class is SpeechtrainError else ""
    if not result.is_cause:  # The rank was killed, or its host was lost, so it wrote no error.
        details = f" (which rank, and how it ended: {run_dir / log}. The same command continues)"
    return error_class(f"{result.error}{details}")


def _describe(result: RunResult) -> str:
    """Return status, last step, metrics and speed as a line."""
    outcome = run_directory.result_text(result.metrics, result.last_metrics, result.checkpoint, result.speed)
    # A run without metrics and speed has an empty outcome.
    return f"{result.status} at step {result.steps}, {outcome}".rstrip(", ")
