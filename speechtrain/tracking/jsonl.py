"""Events as JSON lines: the run's own record, and the input of the report."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from speechtrain.files import append_line, finite, json_lines, log_lines
from speechtrain.tracking.base import Tracker

NAME = "metrics.jsonl"
_ONE_PER_STEP = ("train", "valid", "examples", "checkpoint")


@final
class Jsonl(Tracker):
    """Appends ``{"event": ..., "time": <Unix seconds>, ...}`` to ``<run_dir>/metrics.jsonl``.

    Every line is written to the file at once and is valid JSON: a non-finite number becomes null.
    """

    def __init__(self, run_dir: str, enabled: bool = True) -> None:
        self.path = Path(run_dir) / NAME
        self.enabled = enabled

    def log(self, event: str, values: Mapping[str, Any]) -> None:
        """Append one line. Raises ``OSError`` where the file cannot be written."""
        content = finite({"event": event, "time": round(time.time(), 3), **values}, default=_plain)
        line = json.dumps(content, ensure_ascii=False)
        # a lone surrogate becomes the escape \udcxx, as JSON writes it
        append_line(self.path, line.encode("utf-8", "backslashreplace"))


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The events of a ``metrics.jsonl`` in order, without those that a later attempt made void.

    The last record of each step (and set) counts. Wherever the step goes back, by a ``resume`` or
    because an attempt started again, the earlier attempts' events of later steps are void; their
    ``start`` and ``end`` stay. Lines that are not JSON objects are skipped; a missing file has no events.

    >>> read_metrics(path)  # written: train 1, 2, 3, resume at 1, train 2
    [{'event': 'train', 'step': 1, ...}, {'event': 'resume', ...}, {'event': 'train', 'step': 2, ...}]
    """
    events: list[dict[str, Any]] = []
    latest: dict[tuple[str, str, str], dict[str, Any]] = {}
    reached = 0
    for record in json_lines(log_lines(path)):
        if not isinstance(record.get("event"), str):
            continue
        step = record.get("step")
        if isinstance(step, int):
            if step < reached:
                events = [e for e in events if not isinstance(e.get("step"), int) or e["step"] <= step]
            reached = step
            if record["event"] in _ONE_PER_STEP:
                latest[_address(record)] = record
        events.append(record)
    return [e for e in events if e["event"] not in _ONE_PER_STEP or latest.get(_address(e), e) is e]


def _address(record: Mapping[str, Any]) -> tuple[str, str, str]:
    return record["event"], str(record.get("set")), str(record.get("step"))


def _plain(value: Any) -> Any:
    """A value that json does not know; scalar tensors and numpy numbers are read on the host."""
    if isinstance(value, Mapping | set | frozenset):
        return dict(value) if isinstance(value, Mapping) else list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return value.tolist() if callable(getattr(value, "tolist", None)) else str(value)
