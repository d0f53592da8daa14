"""Reads mlperf.log."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEYS = Path(__file__).resolve().parents[1] / "golden" / "mlperf_keys.txt"
"""The keys of a run of two epochs in the order of the reference, each with its tensor."""
PREFIX = ":::MLLOG "


@dataclass(frozen=True)
class MLLog:
    """The lines of the logger, and the three lines with times."""

    lines: list[dict[str, Any]]
    times: list[str]

    @classmethod
    def read(cls, run_dir: Path) -> MLLog:
        lines, times = [], []
        for line in (run_dir / "mlperf.log").read_text().splitlines():
            if line.startswith(PREFIX):
                lines.append(json.loads(line.removeprefix(PREFIX)))
            else:
                times.append(line)
        return cls(lines, times)

    @property
    def keys(self) -> list[str]:
        keys = []
        for line in self.lines:
            tensor = line["metadata"].get("tensor", "")
            keys.append(f"{line['key']} {tensor}".strip())
        return keys

    @property
    def last_values(self) -> dict[str, Any]:
        return {line["key"]: line["value"] for line in self.lines}

    def values(self, key: str) -> list[Any]:
        return [line["value"] for line in self.lines if line["key"] == key]

    def metadata(self, key: str, name: str = "epoch_num") -> list[Any]:
        return [line["metadata"][name] for line in self.lines if line["key"] == key]


def golden_keys() -> list[str]:
    return KEYS.read_text().split("\n")[:-1]
