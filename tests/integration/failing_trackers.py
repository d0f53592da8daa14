"""Trackers with the failures of a service: one sleeps, one raises, one loses its process, one exits."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speechtrain.tracking.base import Tracker


class Sleeping(Tracker):
    """Waits for a service that does not answer."""

    def log(self, event: str, values: Mapping[str, Any]) -> None:
        time.sleep(60)


class Raising(Tracker):
    """Has a defect in its third ``train`` event."""

    def log(self, event: str, values: Mapping[str, Any]) -> None:
        if event == "train" and values["step"] == 3:
            raise KeyError("project")


class Exiting(Tracker):
    """Ends its thread."""

    def log(self, event: str, values: Mapping[str, Any]) -> None:
        sys.exit(3)


class Dying(Tracker):
    """Writes to a process that is killed at step 3, and leaves a line per event in ``path``."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.process: subprocess.Popen[bytes] | None = None

    def log(self, event: str, values: Mapping[str, Any]) -> None:
        if self.process is None:
            with self.path.open("wb") as file:
                self.process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=file, bufsize=0)
        if values.get("step") == 3:
            self.process.kill()
            self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.write(f"{event}\n".encode())

    def close(self) -> None:
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
            self.process.wait()
