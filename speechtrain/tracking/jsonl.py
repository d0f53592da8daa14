"""Events as JSON lines: the run's own record, and the input of the report."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from speechtrain.files import append_line, finite
from speechtrain.run_directory import METRICS
from speechtrain.tracking.base import Tracker


@final
class Jsonl(Tracker):
    """Appends ``{"event": ..., "time": <Unix seconds>, ...}`` to ``<run_dir>/metrics.jsonl``.

    Every line is written to the file at once and is valid JSON: a non-finite number becomes null.
    """

    background = False  # a resumed run reads the record, and a killed one must have its last events

    def __init__(self, run_dir: str, enabled: bool = True) -> None:
        self.path = Path(run_dir) / METRICS
        self.enabled = enabled

    def log(self, event: str, values: Mapping[str, Any]) -> None:
        """Append one line. Raises ``OSError`` where the file cannot be written."""
        content = finite({"event": event, "time": round(time.time(), 3), **values}, default=_plain)
        line = json.dumps(content, ensure_ascii=False)
        # a lone surrogate becomes the escape \udcxx, as JSON writes it
        append_line(self.path, line.encode("utf-8", "backslashreplace"))


def _plain(value: Any) -> Any:
    """A value that json does not know: a tensor or a number of numpy, which the host reads, or a text."""
    return value.tolist() if callable(getattr(value, "tolist", None)) else str(value)
