"""The run directory: its lock, and the readers and writers of its files. This module imports no torch.

A run directory may come from a stranger, so its files are not trusted. Each file has one reader, and all
readers are in this module. A reader follows no link, checks the size of the file and the type of each field,
and returns a frozen dataclass. For a JSON file that is missing or malformed, it returns None or an empty
record. A warning names a malformed file once.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from importlib import metadata
from itertools import islice
from pathlib import Path
from types import UnionType
from typing import IO, Any, TypeVar, get_args, get_origin, get_type_hints

import yaml

from speechtrain.errors import DISK, MALFORMED, ConfigError, RunError, one_line
from speechtrain.files import (
    YAML_LOADER,
    json_lines,
    log_lines,
    open_append,
    parse_json,
    print_line,
    read_text,
    remove_temporaries,
    write_json,
    yaml_text,
)

CONFIG = "config.yaml"
RESULT = "result.json"
ABOUT = "run.json"
DEVICE = "device.json"
METRICS = "metrics.jsonl"
MLPERF = "mlperf.log"
SKIPPED = "skipped.jsonl"
TEACHER = "teacher"  # the run directory of the teacher (see ``start.untranscribed``)
LEDGER = "untranscribed.jsonl"  # the texts of the teacher
SIDES = "recordings.bin"  # the recordings that the run trains on and holds out (see ``data.hold_out``)
CHECKPOINT = "checkpoint.json"
BEST = "checkpoints/best.json"
ERROR = "error.log"
RANKS = "ranks"
STUCK = "stuck"
"""Folder with a subfolder for each time that a rank hung: the phase and the stacks of all ranks."""
_FOLDERS = ("checkpoints", RANKS, STUCK, "tensorboard", "parts")  # folders into which a run writes
_MAX_VALUE_CHARACTERS = 30_000
"""Limit for one value in a config. An alphabet of all Chinese characters has 21,000."""
_MAX_ROWS = 600_000
"""Limit for the rows of a log that are read. With short rows, they take a GB of memory."""
_ONE_PER_STEP = ("train", "epoch", "valid", "examples", "checkpoint")
"""Events of ``metrics.jsonl`` with at most one record per step and validation set."""
DATE = "%Y-%m-%d %I:%M:%S %p"
"""The format of the dates in ``mlperf.log``, which are in UTC."""
_DIGEST_PREFIX = "# sha256 of what follows: "
# ${oc.env:NAME} or ${oc.env:NAME,default}. The default is without quotes, or in single quotes.
_ENVIRONMENT_REFERENCE = re.compile(r"""\$\{oc\.env:\w+(,([^'"\\${}]*|'[^'\\$]*'))?\}""")
_LOG = logging.getLogger(__name__)

Scalar = str | int | float | bool | None
Fact = Scalar | list[str] | dict[str, Scalar]  # a value of one entry in ``About.latest``
Record = TypeVar("Record")


@dataclass(frozen=True)
class About:
    """``run.json``: the origin of a run, how the same command finds the run, and its latest start."""

    overrides: list[str]  # the overrides of the first start
    argv: list[str] | None = None  # the command line of the first start
    # the commit of speechtrain, and whether its files differ from it
    git: dict[str, Scalar] = field(default_factory=dict)
    folder_commit: str = ""  # the commit of the working folder
    versions: dict[str, str] = field(default_factory=dict)  # the versions of Python and of all packages
    host: str = ""  # the name of the host
    platform: str = ""  # the operating system
    executable: str = ""  # the path of Python
    seed: int | None = None  # the seed of the run
    device: str = ""  # the device of the run
    folder: str = ""  # the working folder of the first start. Relative paths in its overrides begin there.
    # The texts of the YAML files that the user has written, by group/choice, at the first start.
    written: dict[str, str] = field(default_factory=dict)
    # The modules outside speechtrain whose classes the config names, by name: the group of the config, file,
    # sha256, version, commit, diff to the commit. After a resume, they are those of the latest start.
    parts: dict[str, dict[str, Scalar]] = field(default_factory=dict)
    latest: dict[str, Fact] | None = None  # the fields from argv to device, for the latest start
    hosts: dict[str, dict[str, str]] = field(default_factory=dict)  # environment variables by host name


@dataclass(frozen=True)
class DeviceRecord:
    """``device.json``: the compute policy that the device chose by measurement. A resumed run reuses it."""

    device: str  # the name of the device
    chip: str  # the model of the processor
    precision: str  # the precision of the run
    policy: dict[str, Scalar]  # the fields of the compute policy
    computes: str = ""  # the precision that is computed and the kernels: ComputePolicy.describe
    milliseconds: dict[str, float] | None = None  # the time of a step by policy, if policies were timed


class Status(StrEnum):
    """How a training ended. A training that continues has no status."""

    FINISHED = "finished"  # all planned updates are done
    TARGET = "target"  # a validation reached ``trainer.target``
    TIME = "time"  # the time limit is over
    PREEMPTED = "preempted"  # a stop was requested, and the same command continues the run


@dataclass(frozen=True)
class RunResult:
    """``result.json``: how a run, or one of its ranks, ended."""

    status: str  # a value of ``Status``, or ``failed``
    metric: float | None = None  # the metric that chose the best checkpoint
    metrics: dict[str, float | None] | None = None  # the metrics of the best checkpoint
    checkpoint: str | None = None  # the name of the best checkpoint
    last_metrics: dict[str, float | None] | None = None  # the metrics of the last checkpoint
    steps: int | None = None  # updates in all
    wall_s: float | None = None  # seconds of all starts
    skipped_updates: int = 0  # updates that were not applied, because a gradient was not finite
    scale_skips: int = 0  # updates that were not applied, because the loss scale of fp16 was too high
    speed: dict[str, float] | None = None  # utterances_per_s, audio_s_per_s, epoch_s, decode_ms_per_audio_s
    error: str | None = None  # the message of a failure
    exit_code: int | None = None  # the exit code of a failure
    rank: int = 0  # the rank that wrote the file
    failed_at: float | None = None  # the time of a failure, in seconds since 1970
    is_cause: bool = True  # false: the rank was killed, or it failed because another rank did
    is_out_of_memory: bool = (
        False  # true: the rank failed because the device had too little memory for a step
    )
    memory_mib: float | None = None  # the peak memory of this rank's device
    computes: str = ""  # ``DeviceRecord.computes``
    limits: dict[str, Scalar] | None = None  # the ``trainer`` node of the config
    data: dict[str, Scalar] | None = None  # DataModule.content of the training set
    metric_mode: str = ""  # max: a higher metric is better


@dataclass(frozen=True)
class CheckpointManifest:
    """``checkpoint.json``: the digests of a checkpoint's files, and its validation."""

    format: int  # the number of the format
    step: int  # updates until the checkpoint
    files: dict[str, str]  # the sha256 of each file by its name
    metric: float | None = None  # the metric that chooses the best checkpoint
    metrics: dict[str, float | None] | None = None  # all metrics of the validation at this step
    wall_s: float = 0.0  # seconds of training until the checkpoint
    metric_mode: str = ""  # max: a higher metric is better


@dataclass(frozen=True)
class BestCheckpoint:
    """``best.json``: the best checkpoint, for other programs and for reports."""

    name: str  # the name of the checkpoint
    metric: float  # its metric


@dataclass(frozen=True)
class Log:
    """The rows of ``metrics.jsonl`` or ``skipped.jsonl``."""

    rows: list[dict[str, Any]]
    omitted: int = 0  # later lines that were not read, because the file has more than ``_MAX_ROWS``


@dataclass(frozen=True)
class StoredConfig:
    """``config.yaml``: its text, and its values. References to environment variables are not resolved."""

    text: str = ""
    values: dict[str, Any] = field(default_factory=dict)


def is_storable(text: str) -> bool:
    """Return whether a stored config may contain ``text``.

    Its interpolations may only be references to environment variables: ``${oc.env:NAME,default}``.
    """
    return "${" not in _ENVIRONMENT_REFERENCE.sub("", text)


def with_digest(text: str) -> str:
    """Return ``text`` after a first line with its sha256, by which a reader detects damage."""
    return f"{_DIGEST_PREFIX}{hashlib.sha256(text.encode()).hexdigest()}\n{text}"


def read_stored_config(path: Path) -> StoredConfig:
    """Read the ``config.yaml`` of a run. Raises ConfigError if it is missing, RunError if it is malformed."""
    try:
        text = yaml_text(path, follow=False)
        first_line, _, content = text.partition("\n")
        if first_line.startswith(_DIGEST_PREFIX) and text != with_digest(content):
            raise ValueError("it does not match the sha256 in its first line. Remove that line after an edit")
        for event in yaml.parse(text, YAML_LOADER):
            if not isinstance(event, yaml.ScalarEvent):
                continue
            if len(event.value) > _MAX_VALUE_CHARACTERS:
                raise ValueError(f"it has a value of {len(event.value)} characters")
            if not is_storable(event.value):
                raise ValueError(f"{event.value[:80]!r} refers to more than ${{oc.env:NAME,default}}")
        values = yaml.load(text, YAML_LOADER)
        if not isinstance(values, dict):
            raise ValueError("it is not a mapping of keys")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist. Is {path.parent} a run directory?") from None
    except (OSError, TypeError, yaml.YAMLError, *MALFORMED) as error:
        raise damaged_config(path, error) from None
    return StoredConfig(text, values)


def damaged_config(path: Path, error: Exception) -> RunError:
    """Return the error of a malformed ``config.yaml``."""
    cause = f"{path} is damaged ({one_line(str(error), 300)})"
    return RunError(f"{cause}. Delete it, and the command that started the run continues it")


def read_about(run_dir: Path) -> About:
    """Return the content of ``run.json``. If it is missing or malformed, ``argv`` is None."""
    return _read(run_dir / ABOUT, About) or About([])


def note_environment(folder: Path, host: str, environment: dict[str, str]) -> None:
    """Store the environment variables of ``host`` in the ``run.json`` of ``folder``. Raises OSError.

    ``folder`` is the directory of the run, or the folder of a rank in it.
    """
    path = folder / ABOUT
    about = replace(read_about(folder), hosts={host: environment})
    is_private = path.exists() and not path.stat().st_mode & 0o077  # Only the owner has access.
    write_json(path, asdict(about), private=is_private)


def read_device(run_dir: Path) -> DeviceRecord | None:
    return _read(run_dir / DEVICE, DeviceRecord)


def read_result(run_dir: Path) -> RunResult | None:
    return _read(run_dir / RESULT, RunResult)


def write_result(folder: Path, content: Mapping[str, Any]) -> None:
    """Write the ``result.json`` of a run, or of a rank or host in its own folder. Raises OSError."""
    write_json(folder / RESULT, content)


def remove_results(run_dir: Path) -> None:
    """Remove the ``result.json`` of a run and of its ranks and hosts, which an earlier start has written."""
    for path in (run_dir / RESULT, *(run_dir / RANKS).glob(f"*/{RESULT}")):
        path.unlink(missing_ok=True)


def read_best(run_dir: Path) -> BestCheckpoint | None:
    return _read(run_dir / BEST, BestCheckpoint)


def read_manifest(folder: Path) -> CheckpointManifest | None:
    """Read the ``checkpoint.json`` in a checkpoint's folder."""
    return _read(folder / CHECKPOINT, CheckpointManifest)


def write_manifest(folder: Path, manifest: CheckpointManifest) -> None:
    """Write the ``checkpoint.json`` of a checkpoint with its own digest. Raises OSError."""
    content = asdict(manifest)
    write_json(folder / CHECKPOINT, {**content, "sha256": _digest(content)})


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read(path: Path, kind: type[Record]) -> Record | None:
    """Return the content of a JSON file as an object of the dataclass ``kind``.

    Return None if the file is missing or malformed. Keys that are not fields of ``kind`` are ignored.
    """
    try:
        content = parse_json(read_text(path))
        digest = content.pop("sha256", None)  # Only checkpoint.json has a sha256.
        if digest not in (None, _digest(content)):
            raise ValueError("it does not match its own sha256")
        types = get_type_hints(kind)
        fields = {name: content[name] for name in types if name in content}
        for name, value in fields.items():
            if not _has_type(value, types[name]):
                raise ValueError(f"{name} has a value of another type")
        return kind(**fields)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, AttributeError, TypeError, *MALFORMED) as error:
        _warn_once(one_line(f"{path} is damaged and not used ({error})", 300))
        return None


@functools.cache
def _warn_once(message: str) -> None:
    _LOG.warning(message)


def _has_type(value: Any, expected: Any) -> bool:
    """Return whether a JSON value has the type ``expected``.

    ``expected`` is a class, a union, ``list[T]`` or ``dict[str, T]``. A float must be finite, and an integer
    is accepted for it.
    """
    arguments = get_args(expected)
    if isinstance(expected, UnionType):
        return any(_has_type(value, member) for member in arguments)
    if arguments:
        if type(value) is not get_origin(expected):
            return False
        elements = value.values() if type(value) is dict else value
        element_type = arguments[-1]  # the type of the values of a dict. Keys of JSON are always texts.
        return all(_has_type(element, element_type) for element in elements)
    if expected is float:
        return finite_number(value) is not None
    return type(value) is expected


def read_metrics(run_dir: Path) -> Log:
    """Return the events of ``metrics.jsonl`` in order, without replaced records.

    A run that resumes at a step, or starts again, replaces its earlier records of later steps. Also, the last
    record of an event, step and validation set replaces earlier records of the same three. Records without a
    step, such as ``start`` and ``end``, are never replaced. Raises OSError for a file that is not regular or
    too large.

    >>> read_metrics(run_dir).rows  # the file has train 1, 2, 3, resume at 1, train 2
    [{'event': 'train', 'step': 1, ...}, {'event': 'resume', ...}, {'event': 'train', 'step': 2, ...}]
    """
    log = _read_log(run_dir / METRICS)
    events = []  # the latest first
    known_records = set()  # (event, validation set, step) of the records in ``events``
    next_step: float = math.inf  # the lowest step of the records in ``events``, which are later in the file
    for record in reversed(log.rows):
        event, step = record.get("event"), record.get("step")
        identity = (event, str(record.get("set")), str(step))
        # Steps increase within a start. If a lower step follows, a resume has replaced this record.
        is_replaced = isinstance(step, int) and step > next_step
        if not isinstance(event, str) or is_replaced or identity in known_records:
            continue
        if isinstance(step, int):
            next_step = step
            if event in _ONE_PER_STEP:
                known_records.add(identity)
        events.append(record)
    return Log(events[::-1], log.omitted)


def read_validations(run_dir: Path, metric: str) -> list[float]:
    """Return ``metric`` of each validation so far, on the first evaluation set.

    A validation that a resume repeats replaces the earlier one. Raises OSError as ``read_metrics`` does.
    """
    values: dict[str, dict[Any, float]] = {}  # by the evaluation set and the step
    # The run is still training, so this is called often. Most lines are no validations and are not parsed.
    lines = (line for line in log_lines(run_dir / METRICS) if b'"valid"' in line)
    for row in json_lines(lines):
        if row.get("event") == "valid" and metric in row:
            value = row[metric]
            number = math.nan if value is None else float(value)  # null is NaN.
            values.setdefault(str(row.get("set")), {})[row.get("step")] = number
    return list(next(iter(values.values()), {}).values())


def timing_start(run_dir: Path) -> datetime | None:
    """Return the date in the first line of ``mlperf.log``, or None if it has none. Raises OSError."""
    line = next(log_lines(run_dir / MLPERF), b"").decode(errors="replace")
    with contextlib.suppress(ValueError):
        return datetime.strptime(f"{line.strip()} +0000", f"STARTING TIMING RUN AT {DATE} %z")
    return None


def read_skipped(run_dir: Path) -> Log:
    """Return the rows of ``skipped.jsonl``. Raises OSError as ``read_metrics`` does."""
    return _read_log(run_dir / SKIPPED)


def _read_log(path: Path) -> Log:
    lines = log_lines(path)
    rows = list(json_lines(islice(lines, _MAX_ROWS)))
    remaining_lines = sum(1 for _ in lines)
    return Log(rows, omitted=remaining_lines)


def run_of(path: Path) -> Path | None:
    """Return the directory of the run that ``path`` belongs to, or None if it does not belong to a run.

    ``path`` is a run directory, the folder of a checkpoint, or a file in one of them.
    """
    folder = path if path.is_dir() else path.parent
    # The folder of a checkpoint is RUN/checkpoints/step-N.
    run_dir = folder.parents[1] if (folder / CHECKPOINT).is_file() else folder
    return run_dir if (run_dir / CONFIG).is_file() else None


class RunLock:
    """An advisory lock that allows one run at a time in a directory.

    The operating system releases it when its process ends. The lock file contains host and pid of the
    process, for the error message of a second command.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "lock"
        self._file: IO[bytes] | None = None

    def acquire(self) -> RunLock:
        """Acquire the lock, and remove the incomplete files that a killed process has left in the directory.

        Return this object. Raises RunError if another process has the lock, or if the lock file or a folder
        of the run is a link.
        """
        _refuse_links(self.path.parent)
        try:
            file = open_append(self.path)
        except OSError as error:
            if error.errno in DISK:
                raise
            raise RunError(f"{self.path}: {error.strerror}. Remove it or set another run_dir") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            holder = one_line(file.read(300).decode(errors="replace")) or "another process"
            file.close()
            if not isinstance(error, BlockingIOError):  # The disk has no locks.
                raise
            use = f"{self.path.parent} is in use by {holder}"
            raise RunError(f"{use}. Wait for it, stop it, or set another run_dir") from None
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {platform.node()}\n".encode())
        file.flush()
        self._file = file
        remove_temporaries(self.path.parent)
        return self

    def wait(self) -> bool:
        """Wait until no other process has the lock. Return whether another process had it."""
        with contextlib.suppress(OSError):  # ``acquire`` reports it.
            if not self.path.is_file():
                return False
            with open_append(self.path) as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    print_line(f"waiting for another process that trains {self.path.parent}")
                    fcntl.flock(file, fcntl.LOCK_EX)
                    return True
        return False

    def release(self) -> None:
        """Release the lock. Its file stays, because another process may have opened it already."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _refuse_links(run_dir: Path) -> None:
    """Raise RunError if a folder of a run is a link, because the run would write and delete files elsewhere.

    Subfolders are checked one level deep. A link to a file is allowed.
    """
    for name in _FOLDERS:
        for path in (run_dir / name, *(run_dir / name).glob("*")):
            if path.is_symlink() and not path.is_file():
                raise RunError(f"{path} is a link. Remove it, because a run writes into its own folders only")


def other_owner(path: Path) -> int | None:
    """Return the user id of the owner of a folder or of a file in it, or None if the owner is this user.

    The id of this user is read from a new file in the folder, because a network file system may map user ids.
    """
    owner = path.stat().st_uid
    with tempfile.TemporaryFile(dir=path if path.is_dir() else path.parent) as file:
        this_user = os.fstat(file.fileno()).st_uid
    return None if this_user == owner else owner


def rank_folder(run_dir: Path, rank: int) -> Path:
    """Return the folder for a rank's result, error trace and output. For rank 0, it is the run directory."""
    return run_dir / RANKS / str(rank) if rank else run_dir


def read_failure(run_dir: Path) -> RunResult | None:
    """Return the result of the rank that failed first, or None if no rank failed.

    A rank that failed because of another rank is never preferred to the cause, even if its time is earlier,
    because the clocks of hosts may differ.
    """
    failures = []
    for folder in (run_dir, *(run_dir / RANKS).glob("*")):
        result = read_result(folder)
        if result is not None and result.status == "failed":
            failures.append(result)

    def order(result: RunResult) -> tuple[bool, float]:
        return not result.is_cause, result.failed_at or 0.0

    return min(failures, key=order, default=None)


def result_text(metrics: Any, last_metrics: Any, checkpoint: Any, speed: Any = None) -> str:
    """Return a line with the metrics of the best checkpoint, the last metrics if they differ, and the speed.

    The arguments are fields of ``RunResult``. They may come from a stranger's file, so their types are not
    known.
    """
    best_text = _metrics_text(metrics)
    last_text = _metrics_text(last_metrics)
    text = best_text
    if last_text not in ("", best_text):
        match = re.fullmatch(r".*-0*([0-9]+)", str(checkpoint))  # step-00000123
        step = match[1] if match else "unknown"
        text = f"best at step {step}: {best_text}; last {last_text}"
    return ", ".join(filter(None, (text, speed_text(speed))))


SPEED_UNITS = {
    "utterances_per_s": "utt/s",
    "audio_s_per_s": "audio-s/s",
    "epoch_s": "s/epoch",
    "decode_ms_per_audio_s": "ms/audio-s",
}
"""The fields of a result's speed with their units."""


def speed_text(speed: Mapping[str, float] | None) -> str:
    """Return a line such as ``512.3 utt/s, 1024 audio-s/s, 35.2 s/epoch, 4.12 ms/audio-s``.

    Fields that are zero or missing are omitted.
    """
    texts = []
    for name, unit in SPEED_UNITS.items():
        value = (speed or {}).get(name)
        if value:
            texts.append(f"{value:.4g} {unit}")
    return ", ".join(texts)


def _metrics_text(metrics: Any) -> str:
    """Return the metrics of all validation sets as a line."""
    if not isinstance(metrics, Mapping):
        return ""
    # A metric of a named set is SET/NAME. The metrics of the first set occur a second time as NAME.
    named_metrics = {name: value for name, value in metrics.items() if "/" in name}
    shown_metrics = without_streams(named_metrics or metrics)
    return ", ".join(metric_text(name, value) for name, value in shown_metrics.items())


def finite_number(value: Any) -> float | None:
    """Return ``value`` as a float if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # The integer is too large for a float.
        return None


def metric_text(name: str, value: Any) -> str:
    """Return a metric as text: ``wer 3.21 %`` for an error rate (a fraction), ``loss 4.56`` for any other."""
    if value is None:
        return f"{name} -"
    # A float may be inf or nan, which the formats below print. Any other value must be a finite number.
    is_number = isinstance(value, float) or finite_number(value) is not None
    if not is_number:
        return f"{name} {str(value)[:20]}"
    return f"{name} {100 * value:.2f} %" if is_error_rate(name) else f"{name} {value:.4g}"


def is_error_rate(name: str) -> bool:
    """Return whether a metric is a word, character or sentence error rate: a fraction, shown in percent."""
    # The name is SET/PREFIX_wer, without SET/ or PREFIX_ if there is only one set or decoder. The metric of a
    # stream is SET/wer_160ms.
    return re.search(r"(?:^|[/_])(?:wer|cer|ser)(?:_[0-9]+ms)?$", name) is not None


_STREAM = re.compile(r"(?:^|/)(cer|wer|delay)_([0-9]+)ms(?:_90)?$")


def without_streams(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics without names of streams, such as ``wer_160ms``."""
    return {name: value for name, value in metrics.items() if not _STREAM.search(name)}


def stream_lines(metrics: Mapping[str, Any]) -> list[str]:
    """Return ``stream   160 ms  cer 3.21 %  wer 9.87 %  delay 0.31 s, 90 % 0.52 s`` for each look-ahead."""
    matches = filter(None, map(_STREAM.search, metrics))
    lines = []
    for milliseconds in sorted({int(match[2]) for match in matches}):
        columns = [f"stream   {milliseconds} ms"]
        for rate in ("cer", "wer"):
            columns.append(metric_text(rate, metrics.get(f"{rate}_{milliseconds}ms")))
        mean = metric_text("delay", metrics.get(f"delay_{milliseconds}ms"))
        percentile = metric_text("90 %", metrics.get(f"delay_{milliseconds}ms_90"))
        columns.append(f"{mean} s, {percentile} s")
        lines.append("  ".join(columns))
    return lines


def origin(argv: list[str]) -> dict[str, Any]:
    """Return the fields of ``About`` that describe a start: command line, git state, versions and host."""
    packages = {distribution.name for distribution in metadata.distributions()} - {None}
    return {
        "argv": argv,
        "git": git_state(Path(__file__).resolve().parent),
        # git status could execute commands that the configuration of a stranger's repository names.
        "folder_commit": git_output(Path.cwd(), "rev-parse", "HEAD"),
        "versions": versions_of(*sorted(packages)),
        "host": platform.node(),
        "platform": platform.platform(),
        "executable": sys.executable,
    }


def provenance(run_dir: Path) -> dict[str, Scalar]:
    """Return the version of speechtrain, its commit and the name of a run, for files that leave the run."""
    about = read_about(run_dir)
    version, commit = about.versions.get("speechtrain"), about.git.get("commit")
    return {"speechtrain": version, "commit": commit, "run": run_dir.resolve().name}


def versions_of(*packages: str) -> dict[str, str]:
    """Return the versions of Python, and of each of ``packages`` that is installed, by name."""
    versions = {"python": platform.python_version()}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def git_output(folder: Path, *arguments: str) -> str:
    """Return the output of a git command in ``folder``, or an empty text if it fails."""
    command = ["git", *arguments]
    try:
        process = subprocess.run(command, cwd=folder, capture_output=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return process.stdout.decode(errors="replace").strip()


def git_state(path: Path) -> dict[str, Any]:
    """Return the git ``commit`` of a folder or file, and whether it differs from the commit (``dirty``).

    The mapping is empty if the path is not in a git repository.
    """
    commit = git_output(path.parent, "rev-parse", "HEAD")
    if not commit:
        return {}
    return {
        "commit": commit,
        "dirty": bool(git_output(path.parent, "status", "--porcelain", "--", path.name)),
    }


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one mapping of dotted keys. An empty mapping is returned as a value."""
    flat_values: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat_values |= flat(value, f"{prefix}{key}.")
        else:
            flat_values[f"{prefix}{key}"] = value
    return flat_values
