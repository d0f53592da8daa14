"""What a run directory says, read with patience: any file may be absent, torn or still growing."""

from __future__ import annotations

import json
import math
import os
import platform
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from speechtrain.errors import RunError
from speechtrain.run_directory import ABOUT, CONFIG, RESULT, read_result
from speechtrain.tracking.base import PROGRESS, metrics_of
from speechtrain.tracking.jsonl import NAME as METRICS
from speechtrain.tracking.jsonl import read_metrics

SKIPPED = "skipped.jsonl"


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
        """The last finite value."""
        return next((y for y in reversed(self.y) if y is not None), None)

    @property
    def best(self) -> tuple[float, float] | None:
        """Step and value of the (first) lowest value."""
        finite = [(x, y) for x, y in zip(self.x, self.y, strict=True) if y is not None]
        return min(finite, key=lambda point: point[1], default=None)


@dataclass(frozen=True)
class Run:
    """A run directory's content."""

    folder: Path
    events: list[dict[str, Any]]
    result: dict[str, Any]
    about: dict[str, Any]
    config_text: str
    skipped: list[dict[str, Any]]

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved config by dotted key; empty where the file is no YAML mapping."""
        try:
            tree = yaml.safe_load(self.config_text)
        except yaml.YAMLError:
            return {}
        return dict(_flat("", tree)) if isinstance(tree, dict) else {}

    @cached_property
    def train(self) -> dict[str, Curve]:
        """The curves of training, by name; of the task's own metrics too."""
        events = self.of("train")
        curves: dict[str, Curve] = {}
        for values in events:
            drawn = {name: values[name] for name in PROGRESS if name in values} | metrics_of(values)
            _extend(
                curves,
                values,
                {k: v for k, v in drawn.items() if k not in ("step", "steps", "eta_s", "epoch")},
            )
        return curves

    @cached_property
    def valid(self) -> dict[str, dict[str, Curve]]:
        """The curves of validation: metric, then set."""
        found: dict[str, dict[str, Curve]] = {}
        for values in self.of("valid"):
            for name, value in metrics_of(values).items():
                _extend(found.setdefault(name, {}), values, {str(values.get("set", "")): value})
        return found

    @property
    def sets(self) -> list[str]:
        """Names of the validation sets, in the order of their first figures."""
        return list(dict.fromkeys(str(values.get("set", "")) for values in self.of("valid")))

    @cached_property
    def examples(self) -> dict[str, tuple[Any, list[dict[str, Any]]]]:
        """For each set, the step and the rows of its last examples."""
        found = {}
        for values in self.of("examples"):
            rows = [row for row in listing(values.get("rows")) if isinstance(row, dict)]
            found[str(values.get("set", ""))] = (values.get("step"), rows)
        return found

    @property
    def warnings(self) -> list[tuple[str, int]]:
        """Distinct warnings with their counts, in the order of their first appearance."""
        return list(Counter(str(values.get("message", "")) for values in self.of("warning")).items())

    @property
    def resumed(self) -> list[float]:
        """Steps after which the run was continued."""
        return [step for values in self.of("resume") if (step := number(values.get("step")))]

    @property
    def steps(self) -> tuple[int | None, int | None]:
        """Updates done, and planned."""
        logged = [int(step) for values in self.events if (step := number(values.get("step"))) is not None]
        done = number(self.result.get("steps"))
        planned = [n for v in self.of("start", "train") if (n := number(v.get("steps"))) is not None]
        return (
            int(done) if done is not None else max(logged, default=None),
            int(planned[-1]) if planned else None,
        )

    @property
    def wall_s(self) -> float | None:
        """Seconds of work: as the result says, else from the log (pauses between attempts left out)."""
        told = number(self.result.get("wall_s"))
        if told is not None:
            return told
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
        told = [n for v in (self.about, *self.of("start")) if (n := number(v.get("parameters"))) is not None]
        return int(told[-1]) if told else None

    @property
    def started(self) -> float | None:
        """Unix time of the first event."""
        return next((at for values in self.events if (at := number(values.get("time")))), None)

    @property
    def latest(self) -> float | None:
        """Unix time of the last event."""
        return next((at for values in reversed(self.events) if (at := number(values.get("time")))), None)

    @property
    def device(self) -> str:
        """Device, precision and number of processes in words, as far as they are known."""
        names = [self.about.get("device"), *(self._class_of(part) for part in ("device", "precision"))]
        words = [str(names[0] or names[1] or ""), names[2]]
        processes = self.config.get("world_size")
        if isinstance(processes, int) and processes > 1:
            words.append(f"× {processes}")
        return " ".join(word for word in words if word)

    def _class_of(self, part: str) -> str:
        return str(self.config.get(f"{part}._target_", "")).rpartition(".")[2].lower()

    @property
    def status(self) -> str:
        """As the result says; without one, ``running`` or ``killed`` by its lock, else ``unfinished``."""
        if self.result:
            return str(self.result.get("status", "unfinished"))
        try:
            lock = (self.folder / "lock").read_text()
        except (OSError, ValueError):
            return "unfinished"
        holder = re.match(r"pid (\d+) on (.*)", lock)
        if holder is None or holder[2] != platform.node():
            return "unfinished"
        try:
            os.kill(int(holder[1]), 0)  # signal 0 asks whether the process is there
        except ProcessLookupError:
            return "killed"
        except (OSError, OverflowError):
            pass  # another user's process
        return "running"

    def of(self, *names: str) -> list[dict[str, Any]]:
        """The events of these names."""
        return [values for values in self.events if values["event"] in names]


def read_run(folder: str | Path) -> Run:
    """Read a run directory. Raises RunError where there is none."""
    folder = Path(folder)
    if not folder.is_dir():
        raise RunError(f"{folder}: no such directory; give a run directory, as speechtrain-train printed it")
    if not any((folder / name).is_file() for name in (METRICS, RESULT, CONFIG)):
        inside = sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))
        hint = f"; did you mean {inside[0]}?" if inside else ""
        raise RunError(f"{folder}: no run in it ({METRICS}, {RESULT} and {CONFIG} are all missing){hint}")
    try:
        return Run(
            folder=folder,
            events=read_metrics(folder / METRICS),
            result=mapping(read_result(folder)),
            about=_read_json(folder / ABOUT),
            config_text=_read_text(folder / CONFIG),
            skipped=_read_skipped(folder / SKIPPED),
        )
    except OSError as error:
        raise RunError(
            f"{error.filename or folder}: {error.strerror or error}; it must be readable"
        ) from error


def names_of(runs: Sequence[Run]) -> list[str]:
    """A short name for each run: the last parts of its path, as many as tell the runs apart.

    A bare number (a job of a sweep) takes the sweep's name with it.
    """
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


def number(value: Any) -> float | None:
    """``value`` if it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer beyond what a float holds
        return None


def mapping(value: Any) -> dict[str, Any]:
    """``value`` if it is a mapping, else an empty one."""
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else {}


def listing(value: Any) -> list[Any]:
    """``value`` if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def _extend(curves: dict[str, Curve], values: Mapping[str, Any], figures: Mapping[str, Any]) -> None:
    step = number(values.get("step"))
    for name, value in figures.items():
        if step is not None and (value is None or isinstance(value, int | float)):
            curves.setdefault(name, Curve()).append(step, number(value))


def _flat(prefix: str, tree: Mapping[Any, Any]) -> Iterable[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return mapping(json.loads(_read_text(path) or "{}"))
    except ValueError:
        return {}


def _read_skipped(path: Path) -> list[dict[str, Any]]:
    """The skipped recordings, each once."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for line in _read_text(path).splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            found.setdefault((str(row.get("id")), str(row.get("reason"))), row)
    return list(found.values())
