"""Writes events as JSON lines, from which a resumed run and the report read the history of the run."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from speechtrain.files import append_line, with_finite_numbers
from speechtrain.run_directory import METRICS
from speechtrain.tracking.base import Tracker


@final
class Jsonl(Tracker):
    """Appends ``{"event": ..., "time": <Unix seconds>, ...}`` to ``<run_dir>/metrics.jsonl``.

    Every line is written to the file at once and is valid JSON. A non-finite number becomes null.
    """

    background = False  # A resumed run reads the record, which must have the last events of a killed run.

    def __init__(self, run_dir: str | Path, enabled: bool = True) -> None:
        self.path = Path(run_dir) / METRICS
        self.enabled = enabled

    def log(self, event: str, values: Mapping[str, Any]) -> None:
        """Append one line. Raises ``OSError`` if the file cannot be written."""
        content = with_finite_numbers(
            {"event": event, "time": round(time.time(), 3), **values}, default=_json_value
        )
        line = json.dumps(content, ensure_ascii=False)
        # A lone surrogate becomes the escape \udcxx, as JSON writes it.
        append_line(self.path, line.encode("utf-8", "backslashreplace"))


def _json_value(value: Any) -> Any:
    """Return a JSON value for a value of a type that json does not support.

    A tensor or a value of numpy becomes a number or a list, and any other value becomes text.
    """
    return value.tolist() if callable(getattr(value, "tolist", None)) else str(value)
