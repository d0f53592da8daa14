"""The content of a run directory for a report. Any file may be missing, damaged or still growing."""

from __future__ import annotations

import os
import platform
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from speechtrain.errors import RunError, SpeechtrainError
from speechtrain.files import holds_secret, read_text
from speechtrain.report.advice import advice
from speechtrain.run_directory import (
    CONFIG,
    METRICS,
    RESULT,
    About,
    RunResult,
    StoredConfig,
    finite_number,
    flat,
    read_about,
    read_best,
    read_device,
    read_metrics,
    read_result,
    read_skipped,
    read_stored_config,
)

_MAX_SETS = 30  # the most sets in a page's charts and examples
_MAX_EXAMPLES = 30  # the most examples of one set
# The most words of a reference and its hypothesis, and of all examples of a page. The time of an alignment
# grows with the square of its words.
_MAX_PAIR_WORDS, _MAX_WORDS = 10_000, 100_000
_LONGEST_NAME = 60  # characters of a run's name in a legend
# the values of an event that have no curve
_NO_CURVES = {"event", "time", "step", "steps", "epoch", "eta_s", "set", "seconds"}


@dataclass(frozen=True)
class Curve:
    """One metric over the steps."""

    x: list[float] = field(default_factory=list)  # steps
    y: list[float | None] = field(default_factory=list)  # values, None for a value that was not finite

    def append(self, x: float, y: float | None) -> None:
        self.x.append(x)
        self.y.append(y)

    @property
    def last_value(self) -> float | None:
        """The last finite value."""
        return next((y for y in reversed(self.y) if y is not None), None)

    def value_at(self, x: float | None) -> float | None:
        """Return the value at ``x``, or the last finite value if the curve has no such step."""
        if x in self.x:
            values = dict(zip(self.x, self.y, strict=True))
            return values[x]
        return self.last_value


@dataclass(frozen=True)
class Run:
    """The content of one run directory."""

    folder: Path
    events: list[dict[str, Any]]  # the rows of metrics.jsonl
    result: RunResult | None  # None while the run has no result.json
    about: About
    stored: StoredConfig
    skipped: dict[str, list[dict[str, Any]]]  # the skipped recordings by reason
    notes: tuple[str, ...] = ()  # remarks on content that the page leaves out

    @cached_property
    def config(self) -> dict[str, Any]:
        """The stored config by dotted key. It is empty if the file is missing or damaged."""
        return flat(self.stored.values)

    @cached_property
    def train(self) -> dict[str, Curve]:
        """The curves of training by metric. The task's own metrics are among them."""
        curves_by_metric = self._curves("train")
        # The events of training have no set, so each metric has one curve.
        return {metric: next(iter(curves.values())) for metric, curves in curves_by_metric.items()}

    @cached_property
    def valid(self) -> dict[str, dict[str, Curve]]:
        """The curves of validation by metric and set."""
        return self._curves("valid")

    def _curves(self, event: str) -> dict[str, dict[str, Curve]]:
        """Return the curves of an event's numbers, by metric and set. The set of events without one is ""."""
        curves: dict[str, dict[str, Curve]] = {}
        for values in self.events_of(event):
            step, set_name = finite_number(values.get("step")), str(values.get("set", ""))
            if step is None:
                continue
            for metric, value in values.items():
                is_number = value is None or isinstance(value, int | float)
                if is_number and metric not in _NO_CURVES:
                    curves_by_set = curves.setdefault(metric, {})
                    curves_by_set.setdefault(set_name, Curve()).append(step, finite_number(value))
        return curves

    @cached_property
    def best_step(self) -> float | None:
        """The step of the best checkpoint, which the other commands use. None without a checkpoint."""
        name = self.result.checkpoint if self.result else None
        if not name:  # The run goes on, or ended without writing the checkpoint's name.
            best = read_best(self.folder)
            name = best.name if best else None
        match = re.fullmatch(r"step-([0-9]{1,15})", str(name))
        return float(match[1]) if match else None

    @cached_property
    def examples(self) -> dict[str, tuple[Any, list[dict[str, Any]], int]]:
        """The latest examples by set: their step, the rows that the page shows, and the number of all rows.

        The page shows the first rows of a set, without rows that have too many words.
        """
        latest_events = {str(values.get("set", "")): values for values in self.events_of("examples")}
        examples = {}
        words = 0  # of all sets
        for name, values in latest_events.items():
            rows = [row for row in list_or_empty(values.get("rows")) if isinstance(row, dict)]
            short_rows = []
            for row in rows[:_MAX_EXAMPLES]:
                texts = f"{row.get('reference')} {row.get('hypothesis')}"
                row_words = len(texts.split())
                if row_words <= _MAX_PAIR_WORDS and words + row_words <= _MAX_WORDS:
                    words += row_words
                    short_rows.append(row)
            examples[name] = (values.get("step"), short_rows, len(rows))
        return examples

    @property
    def warnings(self) -> list[tuple[str, int]]:
        """The distinct warnings with their counts, in the order of their first appearance."""
        messages = [str(values.get("message", "")) for values in self.events_of("warning")]
        return list(Counter(messages).items())

    @property
    def advice(self) -> list[str]:
        """The lines of advice that the run printed at its end."""
        return list(advice(self.result, self.events)) if self.result else []

    @property
    def steps(self) -> tuple[int | None, int | None]:
        """The number of updates so far, and the planned number. Each is None if it is not known."""
        last_step: float | None = self.result.steps if self.result else None
        if last_step is None:
            last_step = max(self.numbers("step"), default=None)
        plans = self.numbers("steps", "start", "train")
        planned_steps = int(plans[-1]) if plans else None
        completed_steps = int(last_step) if last_step is not None else None
        return completed_steps, planned_steps

    @property
    def wall_s(self) -> float | None:
        """The seconds of work, from the result or from the times of the events.

        The pauses between two starts of the run are not counted. None if no event has a time.
        """
        if self.result and self.result.wall_s is not None:
            return self.result.wall_s
        times_by_start: list[list[float]] = []  # the times of the events after each start
        for values in self.events:
            event_time = finite_number(values.get("time"))
            if event_time is None:
                continue
            if values["event"] == "start" or not times_by_start:
                times_by_start.append([])
            times_by_start[-1].append(event_time)
        if not times_by_start:
            return None
        return sum(max(times) - times[0] for times in times_by_start)

    @property
    def parameters(self) -> int | None:
        """The number of parameters of the network, trained or not."""
        counts = self.numbers("parameters", "start")
        return int(counts[-1]) if counts else None

    @cached_property
    def computes(self) -> str:
        """The precision and the kernels in ``device.json``, or "" if the file is missing."""
        record = read_device(self.folder)
        return record.computes if record else ""

    @property
    def device(self) -> str:
        """The device, the computed precision and the number of processes as text, as far as known."""
        precision, _, _ = self.computes.partition(" ")
        target = str(self.config.get("device._target_", ""))
        class_name = target.rpartition(".")[2].lower()
        texts = [self.about.device or class_name, precision]
        world_size = self.config.get("world_size")
        if isinstance(world_size, int) and world_size > 1:
            texts.append(f"× {world_size}")
        return " ".join(filter(None, texts))

    @property
    def status(self) -> str:
        """The status of the result, or without a result ``running``, ``killed`` or ``unfinished``.

        If the lock was taken on this host, its process id shows whether the run is running or was killed.
        Otherwise the run is unfinished.
        """
        if self.result:
            return self.result.status
        try:
            lock = read_text(self.folder / "lock")
        except (OSError, ValueError):
            return "unfinished"
        holder = re.match(r"pid (\d{1,9}) on (.*)", lock)
        if holder is None or holder[2] != platform.node():
            return "unfinished"
        return "running" if psutil.pid_exists(int(holder[1])) else "killed"

    def events_of(self, *names: str) -> list[dict[str, Any]]:
        """Return the events with one of these names."""
        return [values for values in self.events if values["event"] in names]

    def numbers(self, key: str, *names: str) -> list[float]:
        """Return the finite values of a key in the events of these names, or in all events without a name."""
        events = self.events_of(*names) if names else self.events
        numbers = (finite_number(values.get(key)) for values in events)
        return [value for value in numbers if value is not None]


def runs_in(folder: str) -> list[Path]:
    """Return the run directories in ``folder``, such as the folder of a sweep.

    If the folder is itself a run directory, or has none, the list contains only the folder. A link that leads
    out of the folder is left out, because a page would show or change the run at its target.
    """
    if Path(folder, CONFIG).is_file():
        return [Path(folder)]
    base = Path(folder).resolve()
    run_dirs = [path.parent for path in sorted(Path(folder).glob(f"*/{CONFIG}"))]
    run_dirs = [run_dir for run_dir in run_dirs if run_dir.resolve().is_relative_to(base)]
    return run_dirs or [Path(folder)]


def read_run(folder: str | Path) -> Run:
    """Read a run directory. Raises RunError if the directory is missing, or if it is not of a run."""
    folder = Path(folder)
    if not folder.is_dir():
        raise RunError(f"{folder}: no such directory. Give a run directory, as speechtrain train printed it")
    if not any((folder / name).is_file() for name in (METRICS, RESULT, CONFIG)):
        raise RunError(f"{folder}: no run in it ({METRICS}, {RESULT} and {CONFIG} are all missing)")
    try:
        metrics, skipped = read_metrics(folder), read_skipped(folder)
    except OSError as error:
        cause = error.strerror or error
        raise RunError(f"{error.filename or folder}: {cause}. It must be readable") from error
    set_names = dict.fromkeys(str(values["set"]) for values in metrics.rows if "set" in values)
    omitted_sets = set(list(set_names)[_MAX_SETS:])
    events = []
    for values in metrics.rows:
        if "set" not in values or str(values["set"]) not in omitted_sets:
            events.append(values)
    notes = []
    for count, name in ((metrics.omitted + skipped.omitted, "lines of logs"), (len(omitted_sets), "sets")):
        if count:
            notes.append(f"{count:,} {name} are left out")
    stored = StoredConfig()
    try:
        stored = read_stored_config(folder / CONFIG)
    except SpeechtrainError as error:
        notes.append(str(error))
    # The skipped recordings by reason and id. An id occurs once, and the most frequent reason is first.
    rows_by_reason: dict[str, dict[str, dict[str, Any]]] = {}
    for row in skipped.rows:
        rows_by_id = rows_by_reason.setdefault(str(row.get("reason", "")), {})
        rows_by_id.setdefault(str(row.get("id", "")), row)
    reasons = {}
    for reason in sorted(rows_by_reason, key=lambda reason: -len(rows_by_reason[reason])):
        reasons[reason] = list(rows_by_reason[reason].values())
    return Run(folder, events, read_result(folder), read_about(folder), stored, reasons, tuple(notes))


def hold_secrets(runs: Sequence[Run]) -> bool:
    """Return whether a page of these runs contains a secret, so that only the owner may read it.

    A page shows the configs and the command lines.
    """
    return any(holds_secret(f"{run.stored.text}\n{asdict(run.about)}") for run in runs)


def names_of(runs: Sequence[Run]) -> list[str]:
    """Return a short name for each run: the overrides that not all runs have.

    If such names are empty, equal or too long, the names are the runs' paths below their common folder.
    """
    all_overrides = [run.about.overrides or [] for run in runs]
    shared = set(all_overrides[0]).intersection(*all_overrides)
    names = []
    for overrides in all_overrides:
        distinct = [text for text in overrides if text not in shared and not text.startswith("run_dir=")]
        names.append(" ".join(distinct))
    are_distinct = len(names) > 1 and len(set(names)) == len(names)
    if are_distinct and all(0 < len(name) <= _LONGEST_NAME for name in names):
        return names
    folders = [run.folder.resolve() for run in runs]
    common_folder = os.path.commonpath([folder.parent for folder in folders])
    return [os.path.relpath(folder, common_folder) for folder in folders]


def differing_keys(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return the keys and groups that the user varied between the runs, with the value of each run.

    If the users' overrides are equal, these are the keys of the configs. Keys with the run directory are
    left out. The last key is ``computes``, if the runs computed with different policies.
    """
    overrides = []
    for run in runs:
        pairs = [text.partition("=") for text in run.about.overrides or []]
        overrides.append({key.lstrip("+"): value for key, _, value in pairs})
    # The config has the values of keys, and the overrides have the choices of groups.
    values_of_runs = [own | run.config for run, own in zip(runs, overrides, strict=True)]
    configs = [run.config for run in runs]
    differences = _different(overrides, values_of_runs) or _different(configs, values_of_runs)
    computes = [{"computes": run.computes} for run in runs]
    return differences | _different(computes, computes)


def _different(
    keys_of_runs: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]
) -> dict[str, list[Any]]:
    """Return the values in ``runs`` of those keys in ``keys_of_runs`` whose values are not all equal."""
    keys: dict[str, None] = {}  # in the order of their first appearance
    for mapping in keys_of_runs:
        keys |= dict.fromkeys(mapping)
    differences = {}
    for key in keys:
        values = [run.get(key) for run in runs]
        are_equal = all(value == values[0] for value in values)
        if not are_equal and key.rpartition(".")[2] != "run_dir":
            differences[key] = values
    return differences


def list_or_empty(value: Any) -> list[Any]:
    """Return ``value`` if it is a list, otherwise an empty list."""
    return value if isinstance(value, list) else []
