"""Events as JSON lines: the run's own record, and the input of the report."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from speechtrain.files import append_line, json_lines
from speechtrain.tracking.base import Tracker

NAME = "metrics.jsonl"
_ONE_PER_STEP = ("train", "valid", "examples", "checkpoint")


@final
class Jsonl(Tracker):
    """Appends ``{"event": ..., "time": <Unix seconds>, ...}`` to ``<run_dir>/metrics.jsonl``.

    Every line is written to the file at once and is valid JSON: a non-finite number becomes null.
    After an incomplete line (killed process, full disk), the next line starts on a new line.
    """

    def __init__(self, run_dir: str, enabled: bool = True) -> None:
        self.path = Path(run_dir) / NAME
        self.enabled = enabled

    def log(self, event: str, values: Mapping[str, Any]) -> None:
        """Append one line. Raises ``OSError`` where the file cannot be written."""
        record = _plain({"event": event, "time": round(time.time(), 3), **values})
        line = json.dumps(record, ensure_ascii=False, allow_nan=False)
        # a lone surrogate becomes the escape \udcxx, as JSON writes it
        append_line(self.path, line.encode("utf-8", "backslashreplace"))


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The events of a ``metrics.jsonl`` in order, without those that a later attempt made void.

    The last record of each step (and set) counts. Wherever the step goes back, by a ``resume`` or
    because an attempt started again, the earlier attempts' events of later steps are void; their
    ``start`` and ``end`` stay. Lines that are not JSON objects (incomplete after a kill) are skipped; a
    missing file has no events.

    >>> read_metrics(path)  # written: train 1, 2, 3, resume at 1, train 2
    [{'event': 'train', 'step': 1, ...}, {'event': 'resume', ...}, {'event': 'train', 'step': 2, ...}]
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    events: list[dict[str, Any]] = []
    latest: dict[tuple[str, str, str], dict[str, Any]] = {}
    reached = 0
    for record in json_lines(lines):
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
    """``value`` in JSON's own types; scalar tensors and numpy numbers are read on the host."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if callable(getattr(value, "tolist", None)):
        return _plain(value.tolist())
    return str(value)
