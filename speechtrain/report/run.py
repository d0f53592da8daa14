"""Reads run directories for the report. Any file may be missing, cut off or still growing."""

from __future__ import annotations

import platform
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from speechtrain.config.resume_fields import flat
from speechtrain.errors import RunError, SpeechtrainError
from speechtrain.files import read_text
from speechtrain.launcher import holds_secret
from speechtrain.report.advice import advice
from speechtrain.run_directory import (
    CONFIG,
    METRICS,
    RESULT,
    About,
    RunResult,
    StoredConfig,
    number,
    read_about,
    read_best,
    read_metrics,
    read_result,
    read_skipped,
    read_stored_config,
)

_MOST_SETS = 30  # A page has the charts and the examples of the first sets only.
_MOST_EXAMPLES = 30  # A page has the first examples of a set only.
# Longer transcripts are left out, because the time of an alignment grows with the square of its words.
_MOST_WORDS_OF_PAIR = 10_000
_MOST_WORDS = 100_000
_LONGEST_NAME = 60  # The longest name of a run in a legend has this many characters.
_NO_CURVES = {"event", "time", "step", "steps", "epoch", "eta_s", "set", "seconds"}


@dataclass(frozen=True)
class Curve:
    """The values ``y`` of a metric at the steps ``x``. A value is None if it was not finite."""

    x: list[float] = field(default_factory=list)
    y: list[float | None] = field(default_factory=list)

    def append(self, x: float, y: float | None) -> None:
        self.x.append(x)
        self.y.append(y)

    @property
    def last_value(self) -> float | None:
        """The last finite value."""
        return next((y for y in reversed(self.y) if y is not None), None)

    def value_at(self, step: float | None) -> float | None:
        """Return the value at ``step``, or the last finite value if the curve lacks the step."""
        if step is None:
            return self.last_value
        return dict(zip(self.x, self.y, strict=True)).get(step, self.last_value)


@dataclass(frozen=True)
class SetExamples:
    """The latest examples of a set. ``rows`` are the shown ones, and ``count`` is the number of all."""

    step: Any
    rows: list[dict[str, Any]]
    count: int


@dataclass(frozen=True)
class Run:
    """The content of a run directory."""

    folder: Path
    events: list[dict[str, Any]]
    result: RunResult | None
    about: About
    stored: StoredConfig
    skipped: dict[str, list[dict[str, Any]]]  # the rows of recordings, by the reason for skipping them
    notes: tuple[str, ...] = ()  # the lines on content that the page leaves out

    @cached_property
    def config(self) -> dict[str, Any]:
        """The stored config by dotted key. It is empty if the file is missing or damaged."""
        return flat(self.stored.values)

    @cached_property
    def train(self) -> dict[str, Curve]:
        """The curves of training by the name of the metric. The task's own metrics are among them."""
        return {name: next(iter(curves.values())) for name, curves in self._curves("train").items()}

    @cached_property
    def valid(self) -> dict[str, dict[str, Curve]]:
        """The curves of validation by the metric and by the set."""
        return self._curves("valid")

    def _curves(self, event: str) -> dict[str, dict[str, Curve]]:
        """Return the curves in the events of this name, by the metric and by the set."""
        curves: dict[str, dict[str, Curve]] = {}
        for row in self.events_named(event):
            step, set_name = number(row.get("step")), str(row.get("set", ""))
            if step is None:
                continue
            for name, value in row.items():
                is_metric = value is None or isinstance(value, int | float)
                if is_metric and name not in _NO_CURVES:
                    curve = curves.setdefault(name, {}).setdefault(set_name, Curve())
                    curve.append(step, number(value))
        return curves

    @cached_property
    def best_step(self) -> float | None:
        """The step of the best checkpoint, which the other commands use. It is None if there is none."""
        best = read_best(self.folder)
        name = self.result.checkpoint if self.result else None
        if not name and best:
            name = best.name
        match = re.fullmatch(r"step-([0-9]{1,15})", str(name))
        return float(match[1]) if match else None

    @cached_property
    def examples(self) -> dict[str, SetExamples]:
        """The latest examples of each set. Rows that are too long to align are left out."""
        latest = {str(event.get("set", "")): event for event in self.events_named("examples")}
        examples = {}
        total_words = 0
        for name, event in latest.items():
            rows = event.get("rows")
            if not isinstance(rows, list):
                rows = []
            rows = [row for row in rows if isinstance(row, dict)]
            short_rows = []
            for row in rows[:_MOST_EXAMPLES]:
                words = len(f"{row.get('reference')} {row.get('hypothesis')}".split())
                if words <= _MOST_WORDS_OF_PAIR and total_words + words <= _MOST_WORDS:
                    total_words += words
                    short_rows.append(row)
            examples[name] = SetExamples(event.get("step"), short_rows, len(rows))
        return examples

    @property
    def warnings(self) -> list[tuple[str, int]]:
        """The distinct warnings with their counts, in the order of their first appearance."""
        messages = Counter(str(event.get("message", "")) for event in self.events_named("warning"))
        return list(messages.items())

    @property
    def advice(self) -> list[str]:
        """The lines of advice that were printed at the end of the run."""
        return list(advice(self.result, self.events)) if self.result else []

    @property
    def steps(self) -> int | None:
        """The number of updates, from the result or from the log."""
        if self.result and self.result.steps is not None:
            return int(self.result.steps)
        step = max(self.numbers("step"), default=None)
        return None if step is None else int(step)

    @property
    def planned_steps(self) -> int | None:
        """The latest planned number of updates."""
        planned = self.numbers("steps", "start", "train")
        return int(planned[-1]) if planned else None

    @property
    def wall_s(self) -> float | None:
        """The seconds of work, from the result or from the log. Pauses between two starts do not count."""
        if self.result and self.result.wall_s is not None:
            return self.result.wall_s
        begins: list[float] = []  # the times of the first and of the last event of each start
        ends: list[float] = []
        for event in self.events:
            seconds = number(event.get("time"))
            if seconds is None:
                continue
            if event["event"] == "start" or not begins:
                begins.append(seconds)
                ends.append(seconds)
            ends[-1] = max(seconds, ends[-1])
        if not begins:
            return None
        return sum(end - begin for begin, end in zip(begins, ends, strict=True))

    @property
    def parameters(self) -> int | None:
        """The number of parameters of the network, trainable or not."""
        counts = self.numbers("parameters", "start")
        return int(counts[-1]) if counts else None

    @property
    def device(self) -> str:
        """Device, precision and number of processes in words. Unknown ones are left out."""
        targets = (str(self.config.get(f"{part}._target_", "")) for part in ("device", "precision"))
        device, precision = (target.rpartition(".")[2].lower() for target in targets)
        words = [self.about.device or device, precision]
        processes = self.config.get("world_size")
        if isinstance(processes, int) and processes > 1:
            words.append(f"× {processes}")
        return " ".join(filter(None, words))

    @property
    def status(self) -> str:
        """The status of the result. Without a result, the lock decides: running, killed or unfinished."""
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

    def events_named(self, *names: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] in names]

    def numbers(self, key: str, *names: str) -> list[float]:
        """Return the finite values of ``key`` in the events of these names, or in all events."""
        events = self.events_named(*names) if names else self.events
        values = [number(event.get(key)) for event in events]
        return [value for value in values if value is not None]


def runs_in(folder: str) -> list[Path]:
    """Return the run directories in a folder, for example in a sweep's folder.

    If ``folder`` is a run directory itself, or has none, it is the only one returned. A link that leads out
    of the folder is ignored, because a page would show, or change, the files at its target.
    """
    base = Path(folder).resolve()
    if Path(folder, CONFIG).is_file():
        return [Path(folder)]
    paths = sorted(Path(folder).glob(f"*/{CONFIG}"))
    inside = [path.parent for path in paths if path.parent.resolve().is_relative_to(base)]
    return inside or [Path(folder)]


def read_run(folder: str | Path) -> Run:
    """Read a run directory. Raises RunError if ``folder`` has no run, or if its files cannot be read."""
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
    events, omitted_sets = _events_of_first_sets(metrics.rows)
    notes = []
    omitted = {"lines of logs": metrics.omitted + skipped.omitted, "sets": omitted_sets}
    for name, count in omitted.items():
        if count:
            notes.append(f"{count:,} {name} are left out")
    stored = StoredConfig()
    try:
        stored = read_stored_config(folder / CONFIG)
    except SpeechtrainError as error:
        notes.append(str(error))
    skipped_rows = _rows_by_reason(skipped.rows)
    return Run(folder, events, read_result(folder), read_about(folder), stored, skipped_rows, tuple(notes))


def _events_of_first_sets(events: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """Return the events of the first sets or of no set, and the number of sets that are left out."""
    names = dict.fromkeys(str(event["set"]) for event in events if "set" in event)
    omitted = list(names)[_MOST_SETS:]
    if omitted:
        shown = {*names} - {*omitted}
        events = [event for event in events if "set" not in event or str(event["set"]) in shown]
    return events, len(omitted)


def hold_secrets(runs: Sequence[Run]) -> bool:
    """True if the configs or command lines of the runs have a secret. Only their owner may read the page."""
    return any(holds_secret(f"{run.stored.text}\n{asdict(run.about)}") for run in runs)


def names_of(runs: Sequence[Run]) -> list[str]:
    """Return a short name for each run: its own overrides, or the last parts of its path.

    The overrides are the names only if they differ between all runs. If the last part of a path is a number
    (a job of a sweep), the name has the sweep's folder too.
    """
    names = _distinct_overrides(runs)
    are_short = all(0 < len(name) <= _LONGEST_NAME for name in names)
    if are_short and len(set(names)) == len(names) > 1:
        return names
    paths = [run.folder.resolve().parts for run in runs]
    has_number = any(parts[-1].isdigit() for parts in paths)
    shortest = 2 if has_number else 1
    for count in range(shortest, max(map(len, paths)) + 1):
        names = ["/".join(parts[-count:]) for parts in paths]
        if len(set(names)) == len(set(paths)):
            return names
    return [str(run.folder) for run in runs]


def _distinct_overrides(runs: Sequence[Run]) -> list[str]:
    """Return the overrides of each run as a line, without ``run_dir`` and the common overrides."""
    counts = Counter[str]()
    for run in runs:
        counts.update(set(run.about.overrides or ()))
    names = []
    for run in runs:
        distinct = []
        for override in run.about.overrides or ():
            if counts[override] < len(runs) and not override.startswith("run_dir="):
                distinct.append(override)
        names.append(" ".join(distinct))
    return names


def different_keys(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return the config keys whose values are not the same in all runs, with the value of each run.

    Paths that only repeat the run directory are left out.
    """
    keys: dict[str, None] = {}
    for run in runs:
        keys |= dict.fromkeys(run.config)
    different = {}
    for key in keys:
        values = [run.config.get(key) for run in runs]
        are_different = any(value != values[0] for value in values)
        if are_different and key.rpartition(".")[2] != "run_dir":
            different[key] = values
    return different


def _rows_by_reason(skipped: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return one row of each skipped recording, by the reason. The most frequent reason comes first."""
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for row in skipped:
        rows_of_reason = rows.setdefault(str(row.get("reason", "")), {})
        rows_of_reason.setdefault(str(row.get("id", "")), row)
    reasons = sorted(rows, key=lambda reason: -len(rows[reason]))
    return {reason: list(rows[reason].values()) for reason in reasons}
