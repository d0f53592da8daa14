"""What a run directory says, read with patience: any file may be absent, torn or still growing."""

from __future__ import annotations

import math
import platform
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import yaml

from speechtrain.config.resume_fields import flat
from speechtrain.errors import MALFORMED, RunError
from speechtrain.files import json_lines, log_lines, read_json, read_text, small_yaml
from speechtrain.launcher import holds_secret
from speechtrain.run_directory import CONFIG, RESULT, read_about, read_result
from speechtrain.tracking.jsonl import NAME as METRICS
from speechtrain.tracking.jsonl import read_metrics

SKIPPED = "skipped.jsonl"
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
    result: dict[str, Any]
    about: dict[str, Any]
    config_text: str
    skipped: dict[str, list[dict[str, Any]]]

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved config by dotted key; empty where the file is no YAML mapping."""
        try:
            tree = yaml.safe_load(small_yaml(self.config_text))
        except (yaml.YAMLError, *MALFORMED):
            return {}
        return flat(tree) if isinstance(tree, dict) else {}

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
        name = self.result.get("checkpoint") or read_json(self.folder / "checkpoints/best.json").get("name")
        return float(named[1]) if (named := re.fullmatch(r"step-(\d+)", str(name))) else None

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
    def steps(self) -> tuple[int | None, int | None]:
        """Updates done, and planned."""
        done = number(self.result.get("steps"))
        if done is None:
            done = max(self.numbers("step"), default=None)
        planned = self.numbers("steps", "start", "train")
        return None if done is None else int(done), int(planned[-1]) if planned else None

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
        told = self.numbers("parameters", "start")
        return int(told[-1]) if told else None

    @property
    def device(self) -> str:
        """Device, precision and number of processes in words, as far as they are known."""
        targets = (str(self.config.get(f"{part}._target_", "")) for part in ("device", "precision"))
        device, precision = (target.rpartition(".")[2].lower() for target in targets)
        processes = self.config.get("world_size")
        several = f"× {processes}" if isinstance(processes, int) and processes > 1 else ""
        return " ".join(filter(None, (str(self.about.get("device") or device), precision, several)))

    @property
    def status(self) -> str:
        """As the result says; without one, ``running`` or ``killed`` by its lock, else ``unfinished``."""
        if self.result:
            return str(self.result.get("status", "unfinished"))
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
    """The run directories in a folder, such as a sweep's; the folder itself where it is one, or has none."""
    inside = sorted(path.parent for path in Path(folder).glob(f"*/{CONFIG}"))
    return inside if inside and not Path(folder, CONFIG).is_file() else [Path(folder)]


def read_run(folder: str | Path) -> Run:
    """Read a run directory. Raises RunError where there is none."""
    folder = Path(folder)
    if not folder.is_dir():
        raise RunError(f"{folder}: no such directory; give a run directory, as speechtrain-train printed it")
    if not any((folder / name).is_file() for name in (METRICS, RESULT, CONFIG)):
        raise RunError(f"{folder}: no run in it ({METRICS}, {RESULT} and {CONFIG} are all missing)")
    try:
        return Run(
            folder=folder,
            events=read_metrics(folder / METRICS),
            result=read_result(folder) or {},
            about=read_about(folder),
            config_text=read_text(folder / CONFIG, "replace") if (folder / CONFIG).exists() else "",
            skipped=_read_skipped(folder / SKIPPED),
        )
    except OSError as error:
        cause = error.strerror or error
        raise RunError(f"{error.filename or folder}: {cause}; it must be readable") from error


def hold_secrets(runs: Sequence[Run]) -> bool:
    """Whether a page of these runs is for their owner only: it shows their configs and command lines."""
    return any(holds_secret(f"{run.config_text}\n{run.about}") for run in runs)


def names_of(runs: Sequence[Run]) -> list[str]:
    """A short name for each run: what was typed for it alone, if that tells the runs apart.

    Else it is the last parts of its path. A bare number (a job of a sweep) takes the sweep's name with it.
    """
    typed = [[str(o) for o in listing(run.about.get("overrides")) if o[:8] != "run_dir="] for run in runs]
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


def number(value: Any) -> float | None:
    """``value`` if it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def mapping(value: Any) -> dict[str, Any]:
    """``value`` if it is a mapping, else an empty one."""
    return value if isinstance(value, dict) else {}


def listing(value: Any) -> list[Any]:
    """``value`` if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def _read_skipped(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The skipped recordings, each once, by reason, the most frequent one first."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in json_lines(log_lines(path)):
        found.setdefault(str(row.get("reason", "")), {}).setdefault(str(row.get("id", "")), row)
    by_count = sorted(found.items(), key=lambda item: -len(item[1]))
    return {reason: list(rows.values()) for reason, rows in by_count}
