"""From a composed config to a finished run: check, run directory, ranks, outcome."""

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
from speechtrain.config.resolved import dump, resolved
from speechtrain.config.resume_fields import key_of
from speechtrain.config.targets import ALLOW_TARGETS, target_class
from speechtrain.data.base import DataModule
from speechtrain.devices.base import Device
from speechtrain.errors import ConfigError, DataError, MachineError, Preempted, RunError, SpeechtrainError
from speechtrain.files import atomic, read_text, say, write_json, write_text
from speechtrain.launcher import AGENT, NETWORK_VARIABLES, RANK_MEMORY, Job, Launcher, Result, holds_secret
from speechtrain.report.advice import advice
from speechtrain.run_directory import ABOUT, CONFIG, DEVICE, ERROR, RANKS, RESULT, About, RunLock, RunResult
from speechtrain.runs.command_line import Command
from speechtrain.runs.on_host import host_environment, refuse
from speechtrain.runs.recipe_needs import plannable
from speechtrain.runs.resume import new_run_line
from speechtrain.runs.started_runs import remember, start_id
from speechtrain.text.vocabulary import NoText

_FIXABLE = (ConfigError, DataError, MachineError)
"""Errors that the user corrects: the files of a new run that ends with one at its start are removed."""

_BEGUN = (CONFIG, ABOUT, DEVICE, RESULT, ERROR, "lock", RANKS, "tokenizer.model", "tokenizer.json")
"""What a run writes before its first step, beside its launcher's files."""
_ENDED = ("finished", "target", "time")
_MIN_FREE = 256 * 2**20  # bytes that a run needs on its disk


def start_run(command: Command, config: DictConfig, written: Mapping[str, str]) -> RunResult:
    """Start the run whose directory ``config`` names, or continue it; return its result when it has ended.

    A new run keeps ``written``, the user's own YAML files. A finished run returns its result at once, unless
    other limits are set now.
    Raises the SpeechtrainError that stopped the run, here or in a rank.
    """
    run_dir = Path(config.run_dir)
    plain = check(config)
    _settle_resume(config)
    _warn_of_unused_folder(plain["data"])
    memory = dry_build(plannable(config))
    device, launcher = build_device(config), command.together or build_launcher(config)
    device.check_precision(build_precision(config))
    if config.data.get("shapes") == 0:
        device.validate_shapes([])
    job = _job(config, device, memory)
    launcher.check(job)
    _check_place(run_dir, launcher.files)
    is_dry = config.dry_run
    if launcher.is_here(job):
        refuse(device.absence(job.world_size), is_warning=is_dry)
        here = host_environment(device, job.world_size, memory, run_dir=run_dir, is_dry=is_dry)
        job = replace(job, environment={**job.environment, **here})
    refuse(launcher.lacking(job), is_warning=is_dry)
    if is_dry:
        _print_start(config, job, launcher)
        return RunResult("dry run")
    earlier_result = _finished(config, command)
    if earlier_result:
        return earlier_result

    is_new = not (run_dir / CONFIG).exists()
    start = {**run_directory.origin(command.argv), "seed": config.seed, "device": device.name}
    about = _about(run_dir, start, command, written)
    _write(config, job, about, is_named=command.run_dir is not None)
    remember(run_dir)
    try:
        ended = launcher.launch(job)
    except SpeechtrainError:  # no process was started
        if is_new:
            _discard(run_dir, launcher)
        raise
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_continues(run_dir)) from None
    if ended.submitted:
        say(ended.submitted)
        return RunResult("submitted")

    result = _outcome(ended, run_dir)
    if result.status == "failed":
        error = _error_of(result, run_dir, ended.log)
        if is_new and result.is_cause and isinstance(error, _FIXABLE):
            _discard(run_dir, launcher)
        raise error
    result = replace(result, limits=plain["trainer"])
    run_directory.write_result(run_dir, asdict(result))
    if result.status == "preempted":
        raise Preempted(f"saved at step {result.steps} in {run_dir}; the same command continues")
    say(f"{run_dir}: {_describe(result)}")
    _conclude(config, command, result)
    return result


def _print_start(config: DictConfig, job: Job, launcher: Launcher) -> None:
    """Print the lines that start a run. Warn of too few encoder frames, if its data can be read here."""
    with contextlib.suppress(SpeechtrainError, RuntimeError):
        with torch.device("meta"):
            encoder = build_encoder(config)
        data = build_data(config, build_tokenizer(config))
        refuse(data.crowded(encoder.frames), is_warning=True)
    lines = f"{_config_lines(config, job)}{launcher.render(job)}\n"
    print(errors.printable(lines, keep=f"\n\t{errors.SPELLING}"), end="", flush=True)  # one write


def _warn_of_unused_folder(data: Any) -> None:
    """Warn if ``DATASET_DIR`` is set, and ``data``, a resolved node, does not have it."""
    folder = os.environ.get("DATASET_DIR", "").rstrip("/")
    if folder not in str(data):
        choice = f"data=fsdd, or data=manifest data.train={folder}"
        refuse(f"DATASET_DIR={folder} is set, but this run reads other data; add {choice}", is_warning=True)


def _settle_resume(config: DictConfig) -> None:
    """Replace ``resume=never`` by ``auto``, because a restart of the ranks by their launcher continues.

    Raises RunError if ``resume`` does not allow to begin, or to continue, the run.
    """
    checkpointer = Checkpointer(Path(config.run_dir))
    count = len(checkpointer.folders())
    if (config.resume == "never" and count) or (config.resume == "must" and not count):
        line = f"resume={config.resume}, but {checkpointer.root} holds {count} checkpoints"
        raise RunError(f"{line}. Correct run_dir")
    if config.resume == "never":
        config.resume = "auto"


def _finished(config: DictConfig, command: Command) -> RunResult | None:
    """Return the result of a run to which ``config`` adds no update, and print it, else None.

    Raises DataError if its training set has changed since. A set that cannot be read here is not compared.
    """
    run_dir = Path(config.run_dir)
    result = run_directory.read_result(run_dir)
    if result is None or not _is_complete(result, run_dir):
        return None
    reason = ""
    max_steps = config.trainer.max_steps
    if max_steps is not None and max_steps < (result.steps or 0):
        reason = f" with {result.steps} updates, so trainer.max_steps={max_steps} adds none"
    elif result.limits != resolved(config)["trainer"]:
        return None
    before: Mapping[str, Any] = result.data or {}
    after = before
    with contextlib.suppress(SpeechtrainError):
        data: DataModule = build(config, "data", tokenizer=NoText())
        after = data.content()
    if before and after != before:
        line = new_run_line(run_directory.read_about(run_dir), command)
        counts = f"{before['recordings']} recordings then, {after['recordings']} now"
        raise DataError(f"data.train has changed since {run_dir} ended ({counts}). This is a new run: {line}")
    say(f"{run_dir} is done{reason}: {_describe(result)}")
    return result


def _config_lines(config: DictConfig, job: Job) -> str:
    """Return the lines for a shell that write the ranks' config. They are empty if it is there."""
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


def _about(run_dir: Path, start: dict[str, Any], command: Command, user_files: Mapping[str, str]) -> About:
    """Return the content of ``run.json``: the first start of a run, and the latest start if it continues."""
    if (run_dir / CONFIG).exists():
        about = replace(run_directory.read_about(run_dir), latest=start)
    else:
        about = About(**start, **command.identity(user_files))
    return replace(about, start_id=start_id(run_dir))


def _job(config: DictConfig, device: Device, memory: int) -> Job:
    """What the launcher starts; a rank needs ``memory`` bytes."""
    run_dir = Path(config.run_dir)
    environment = {name: value for name, value in os.environ.items() if name == ALLOW_TARGETS}
    environment |= {NETWORK_VARIABLES: " ".join(device.facts.network_variables), RANK_MEMORY: str(memory)}
    forwarded, size = device.facts.forwarded_variables, int(config.world_size)
    return Job(run_dir / CONFIG, run_dir, world_size=size, environment=environment, forwarded=forwarded)


def _conclude(config: DictConfig, command: Command, result: RunResult) -> None:
    """Write the report of a finished run; print its path, and what may be done next."""
    for line in advice(result, run_directory.read_metrics(Path(config.run_dir)).rows):
        say(line)
    if "console" in (config.tracking.get("trackers") or {}):  # people follow this run
        from speechtrain.report import page, run  # half a second of imports

        path = Path(config.run_dir) / "report.html"
        try:
            runs = [run.read_run(path.parent)]
            write_text(path, page.page(runs), private=run.hold_secrets(runs))
            print(errors.printable(f"report: {path}"))
        except Exception as error:  # the run itself has ended well
            print(f"no report: {type(error).__name__}: {errors.one_line(str(error))}")
    if _is_example(config.data.get("train")) and not command.is_sweep:
        machine = ("device", "precision", "launcher", "world_size")
        kept = [o for o in command.overrides if key_of(o).partition(".")[0] in machine]
        own = ["recipe=scratch", "data.train=FOLDER_OR_MANIFEST", "trainer.max_hours=0.5"]
        line = f"your own recordings: {shlex.join(['speechtrain', 'train', *own, *kept])}"
        print(errors.printable(line))


def _is_example(train: Any) -> bool:
    """True for a source that shows that training works, and not how well."""
    if not OmegaConf.is_dict(train) or "_target_" not in train:
        return False
    return bool(getattr(target_class(train._target_, "data.train"), "is_example", False))


def _is_complete(result: RunResult, run_dir: Path) -> bool:
    """True for the whole result of a run that has ended, if its last checkpoint is there."""
    saved = {folder.name for folder in Checkpointer(run_dir).folders()}
    is_saved = f"step-{str(result.steps).zfill(8)}" in saved
    return result.metrics is not None and is_saved and result.status in _ENDED


def _write(config: DictConfig, job: Job, about: About, *, is_named: bool) -> None:
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
                raise RunError(f"{line}; run_dir={job.run_dir} uses it all the same")
            say(line)
        tokenizer = build_tokenizer(config)
        tokenizer.save(str(job.run_dir))  # ranks on other hosts may not see where it was
        config.tokenizer.update(tokenizer.saved(str(job.run_dir)))
        text = dump(config)
        content = asdict(about)
        private = holds_secret(f"{text}\n{content}")
        # first: without its overrides, the same command would be refused as another config
        write_json(job.run_dir / ABOUT, content, private=private)
        write_text(job.config, text, private=private)
        run_directory.remove_results(job.run_dir)
    finally:
        lock.release()  # rank 0 takes it over
    if simulated := config.trainer.simulate_world:
        share = f"world_size {job.world_size} × accumulate {simulated // job.world_size}"
        say(f"trainer.simulate_world={simulated}: {share}")


def _outcome(ended: Result, run_dir: Path) -> RunResult:
    """The result of a run whose processes have ended.

    Raises MachineError if something outside ended them, RunError if no rank wrote a result.
    """
    result = run_directory.read_result(run_dir)
    if result is None or result.status == "failed":
        result = run_directory.read_failure(run_dir)
    if ended.cause and (result is None or result.status == "failed"):
        raise MachineError(ended.cause)
    if result is None and ended.returncode == Preempted.exit_code:
        raise Preempted("stopped before the ranks had started; the same command continues")
    if result is None and ended.returncode < 0:
        name = signal.Signals(-ended.returncode).name
        memory = " (out of memory? dmesg tells)" if name == "SIGKILL" else ""
        raise MachineError(f"the run was ended by {name}{memory}; {_continues(run_dir)}")
    if result is None:
        message = f"the ranks ended with code {ended.returncode} and wrote no {run_dir / RESULT}"
        log = run_dir / ended.log
        if log.exists():  # launcher=local has none
            message = f"{message}; see {log}"
        with atomic(run_dir / RESULT) as temporary:  # a full disk explains it: then this raises OSError
            temporary.write_text(message)
            raise RunError(message)
    return result


def _continues(run_dir: Path) -> str:
    saved = Checkpointer(run_dir).folders()
    return f"the same command continues from {saved[-1].name if saved else 'its beginning'}"


def _check_place(run_dir: Path, files: Iterable[str]) -> None:
    folder = next(p for p in (run_dir, *run_dir.parents) if p.exists())
    if not os.access(folder, os.W_OK):
        raise MachineError(f"{folder} is not writable; set run_dir or OUTPUT_DIR to a folder that is")
    found = {p.name for p in run_dir.glob("[!.]*") if p.suffix not in (".log", ".txt", ".out", ".err")}
    if found and not found & {*_BEGUN, *files, "checkpoints", "metrics.jsonl"}:
        raise RunError(f"{run_dir} holds other files ({min(found)}, …); set run_dir to a folder of its own")
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    if free < _MIN_FREE:
        raise MachineError(
            f"{folder} has {free >> 20} MiB free, a run needs {_MIN_FREE >> 20}; free some or set run_dir"
        )


def _discard(run_dir: Path, launcher: Launcher) -> None:
    """Empty the folder of a run that a user's error ended before its first step, if all in it is our own."""
    found = list(run_dir.iterdir())
    if all(any(fnmatchcase(path.name, pattern) for pattern in (*_BEGUN, *launcher.files)) for path in found):
        shutil.rmtree(run_dir / RANKS, ignore_errors=True)
        for path in {*found} - {run_dir / RANKS}:
            path.unlink()


def _error_of(result: RunResult, run_dir: Path, log: str = AGENT) -> SpeechtrainError:
    error_class = errors.class_of(result.exit_code or 1)
    folder = run_directory.rank_folder(run_dir, result.rank)
    trace = f" (trace in {folder / ERROR})" if error_class is SpeechtrainError else ""
    if not result.is_cause:  # killed, or its host was lost: it wrote no error
        trace = f" (which one, and how it ended: {run_dir / log}; the same command continues)"
    return error_class(f"{result.error}{trace}")


def _describe(result: RunResult) -> str:
    figures = (result.metrics, result.last_metrics, result.checkpoint, result.speed)
    return f"{result.status} at step {result.steps}, {run_directory.outcome(*figures)}".rstrip(", ")
