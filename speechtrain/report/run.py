"""What a run directory says, read with patience: any file may be absent, torn or still growing."""

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

_MOST_SETS = 30  # of a page's charts, and of its examples
_MOST_EXAMPLES = 30  # of one set
_MOST_WORDS = (
    10_000,
    100_000,
)  # of a pair of transcripts and of all: the alignment's time grows with its square
_LONGEST_NAME = 60  # characters of a run's name in a legend
_NO_CURVES = {"event", "time", "step", "steps", "epoch", "eta_s", "set", "seconds"}


@dataclass(frozen=True)
class Curve:
    """One figure against the step; ``y`` is None where the value was not finite."""

    x: list[float] = field(default_factory=list)
    y: list[float | None] = field(default_factory=list)

    def append(self, x: float, y: float | None) -> None:
        self.x.append(x)
        self.y.append(y)

    @property
    def last(self) -> float | None:
        return next((y for y in reversed(self.y) if y is not None), None)

    def at(self, x: float | None) -> float | None:
        """The value at ``x``; the last finite one where there is no such step, or none is given."""
        return dict(zip(self.x, self.y, strict=True)).get(x, self.last) if x is not None else self.last


@dataclass(frozen=True)
class Run:
    folder: Path
    events: list[dict[str, Any]]
    result: RunResult | None
    about: About
    stored: StoredConfig
    skipped: dict[str, list[dict[str, Any]]]
    notes: tuple[str, ...] = ()  # what the page leaves out

    @cached_property
    def config(self) -> dict[str, Any]:
        """The stored config by dotted key; empty if it is missing or damaged."""
        return flat(self.stored.values)

    @cached_property
    def train(self) -> dict[str, Curve]:
        """The curves of training, by name; of the task's own metrics too."""
        return {name: next(iter(curves.values())) for name, curves in self._curves("train").items()}

    @cached_property
    def valid(self) -> dict[str, dict[str, Curve]]:
        """The curves of validation: metric, then set."""
        return self._curves("valid")

    def _curves(self, event: str) -> dict[str, dict[str, Curve]]:
        found: dict[str, dict[str, Curve]] = {}
        for values in self.of(event):
            step, of_set = number(values.get("step")), str(values.get("set", ""))
            for name, value in values.items():
                is_figure = value is None or isinstance(value, int | float)
                if step is not None and is_figure and name not in _NO_CURVES:
                    found.setdefault(name, {}).setdefault(of_set, Curve()).append(step, number(value))
        return found

    @cached_property
    def kept(self) -> float | None:
        """The step of the best checkpoint, which the other commands use; None where there is none."""
        best = read_best(self.folder)
        name = (self.result and self.result.checkpoint) or (best and best.name)
        named = re.fullmatch(r"step-([0-9]{1,15})", str(name))
        return float(named[1]) if named else None

    @cached_property
    def examples(self) -> dict[str, tuple[Any, list[dict[str, Any]], int]]:
        """For each set, the step, the first rows that are short enough, and the number of all rows."""
        latest = {str(values.get("set", "")): values for values in self.of("examples")}
        examples = {}
        words = 0
        for name, values in latest.items():
            rows = [row for row in listing(values.get("rows")) if isinstance(row, dict)]
            short_rows = []
            for row in rows[:_MOST_EXAMPLES]:
                length = len(f"{row.get('reference')} {row.get('hypothesis')}".split())
                if length <= _MOST_WORDS[0] and words + length <= _MOST_WORDS[1]:
                    words += length
                    short_rows.append(row)
            examples[name] = (values.get("step"), short_rows, len(rows))
        return examples

    @property
    def warnings(self) -> list[tuple[str, int]]:
        """Distinct warnings with their counts, in the order of their first appearance."""
        return list(Counter(str(values.get("message", "")) for values in self.of("warning")).items())

    @property
    def advice(self) -> list[str]:
        """The lines that the end of the run has printed."""
        return list(advice(self.result, self.events)) if self.result else []

    @property
    def steps(self) -> tuple[int | None, int | None]:
        """Updates done, and planned."""
        done: float | None = self.result.steps if self.result else None
        if done is None:
            done = max(self.numbers("step"), default=None)
        planned = self.numbers("steps", "start", "train")
        return None if done is None else int(done), int(planned[-1]) if planned else None

    @property
    def wall_s(self) -> float | None:
        """Seconds of work: as the result says, else from the log (pauses between attempts left out)."""
        if self.result and self.result.wall_s is not None:
            return self.result.wall_s
        spans: list[list[float]] = []
        for values in self.events:
            at = number(values.get("time"))
            if at is not None:
                if values["event"] == "start" or not spans:
                    spans.append([at, at])
                spans[-1][1] = max(at, spans[-1][1])
        return sum(end - begin for begin, end in spans) if spans else None

    @property
    def parameters(self) -> int | None:
        """Trainable and other parameters of the network."""
        told = self.numbers("parameters", "start")
        return int(told[-1]) if told else None

    @property
    def device(self) -> str:
        """Device, precision and number of processes in words, as far as they are known."""
        targets = (str(self.config.get(f"{part}._target_", "")) for part in ("device", "precision"))
        device, precision = (target.rpartition(".")[2].lower() for target in targets)
        processes = self.config.get("world_size")
        several = f"× {processes}" if isinstance(processes, int) and processes > 1 else ""
        return " ".join(filter(None, (self.about.device or device, precision, several)))

    @property
    def status(self) -> str:
        """As the result says; without one, ``running`` or ``killed`` by its lock, else ``unfinished``."""
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

    def of(self, *names: str) -> list[dict[str, Any]]:
        return [values for values in self.events if values["event"] in names]

    def numbers(self, figure: str, *names: str) -> list[float]:
        """The finite values of a figure in the events of these names; of all where none is given."""
        events = self.of(*names) if names else self.events
        return [value for values in events if (value := number(values.get(figure))) is not None]


def runs_in(folder: str) -> list[Path]:
    """The run directories in a folder, such as a sweep's; the folder itself where it is one, or has none.

    A link that leads out of the folder is left out: a page would show, or change, what lies there.
    """
    base = Path(folder).resolve()
    paths = sorted(Path(folder).glob(f"*/{CONFIG}"))
    inside = [path.parent for path in paths if path.parent.resolve().is_relative_to(base)]
    return inside if inside and not Path(folder, CONFIG).is_file() else [Path(folder)]


def read_run(folder: str | Path) -> Run:
    """Read a run directory. Raises RunError where there is none."""
    folder = Path(folder)
    if not folder.is_dir():
        raise RunError(f"{folder}: no such directory; give a run directory, as speechtrain train printed it")
    if not any((folder / name).is_file() for name in (METRICS, RESULT, CONFIG)):
        raise RunError(f"{folder}: no run in it ({METRICS}, {RESULT} and {CONFIG} are all missing)")
    try:
        metrics, skipped = read_metrics(folder), read_skipped(folder)
    except OSError as error:
        cause = error.strerror or error
        raise RunError(f"{error.filename or folder}: {cause}; it must be readable") from error
    events, omitted_sets = _of_first_sets(metrics.rows)
    notes = []
    for count, name in ((metrics.omitted + skipped.omitted, "lines of logs"), (omitted_sets, "sets")):
        if count:
            notes.append(f"{count:,} {name} are left out")
    stored = StoredConfig()
    try:
        stored = read_stored_config(folder / CONFIG)
    except SpeechtrainError as error:
        notes.append(str(error))
    reasons = _by_reason(skipped.rows)
    return Run(folder, events, read_result(folder), read_about(folder), stored, reasons, tuple(notes))


def _of_first_sets(events: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """The events of the first sets or of no set, and the number of sets that are left out."""
    names = dict.fromkeys(str(values["set"]) for values in events if "set" in values)
    omitted = list(names)[_MOST_SETS:]
    if omitted:
        shown = {*names} - {*omitted}
        events = [values for values in events if "set" not in values or str(values["set"]) in shown]
    return events, len(omitted)


def hold_secrets(runs: Sequence[Run]) -> bool:
    """Whether a page of these runs is for their owner only: it shows their configs and command lines."""
    return any(holds_secret(f"{run.stored.text}\n{asdict(run.about)}") for run in runs)


def names_of(runs: Sequence[Run]) -> list[str]:
    """A short name for each run: what was typed for it alone, if that tells the runs apart.

    Else it is the last parts of its path. A bare number (a job of a sweep) takes the sweep's name with it.
    """
    typed = [[o for o in run.about.overrides or () if not o.startswith("run_dir=")] for run in runs]
    own = [" ".join(o for o in one if not all(o in other for other in typed)) for one in typed]
    if len(set(own)) == len(own) > 1 and all(0 < len(name) <= _LONGEST_NAME for name in own):
        return own
    paths = [run.folder.resolve().parts for run in runs]
    shortest = 2 if any(parts[-1].isdigit() for parts in paths) else 1
    for count in range(shortest, max(map(len, paths)) + 1):
        names = ["/".join(parts[-count:]) for parts in paths]
        if len(set(names)) == len(set(paths)):
            return names
    return [str(run.folder) for run in runs]


def differing(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """The config keys whose values are not the same in all runs, with each run's value.

    Paths that only repeat the run directory are left out.
    """
    keys = dict.fromkeys(key for run in runs for key in run.config)
    kept = [key for key in keys if key.rpartition(".")[2] != "run_dir"]
    values = {key: [run.config.get(key) for run in runs] for key in kept}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}


def listing(value: Any) -> list[Any]:
    """``value`` if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def _by_reason(skipped: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The skipped recordings, each once, by reason, the most frequent one first."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in skipped:
        found.setdefault(str(row.get("reason", "")), {}).setdefault(str(row.get("id", "")), row)
    by_count = sorted(found.items(), key=lambda item: -len(item[1]))
    return {reason: list(rows.values()) for reason, rows in by_count}
