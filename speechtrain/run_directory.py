"""The run directory: its lock, its config, its result. Imports no torch."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

from speechtrain.errors import RunError

CONFIG = "config.yaml"
RESULT = "result.json"
ABOUT = "run.json"
DEVICE = "device.json"
"""What the device has chosen by measurement; a resumed run takes it from there."""
ERROR = "error.log"
RANKS = "ranks"
STUCK = "stuck"
"""Where each rank stood when a rank was stuck; a folder for each time."""


class RunLock:
    """One run at a time in a directory: an advisory lock that dies with its process.

    The file names host and pid, for the message that a second command prints.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "lock"
        self._file: TextIO | None = None

    def acquire(self) -> RunLock:
        """Take the lock. Raises RunError naming who holds it."""
        file = self.path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            raise RunError(
                f"{self.path.parent} is in use by {holder}; wait for it, stop it, or set another run_dir"
            ) from None
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {platform.node()}\n")
        file.flush()
        self._file = file
        return self

    def release(self) -> None:
        if self._file is not None:
            self._file.close()  # closing releases the lock; the file stays, or a waiting opener would race
            self._file = None


def rank_folder(run_dir: Path, rank: int) -> Path:
    """Where a rank leaves its outcome, the trace of its failure and what it has to say."""
    return run_dir / RANKS / str(rank) if rank else run_dir


def read_failure(run_dir: Path) -> dict[str, Any] | None:
    """The outcome of the rank that failed first, its peers' follow from it; None where none has failed."""
    folders = [run_dir, *(run_dir / RANKS).glob("*")]
    found = [result for folder in folders if (result := read_result(folder)) is not None]
    failed = [result for result in found if result.get("status") == "failed"]

    def order(result: dict[str, Any]) -> tuple[bool, float]:  # hosts' clocks may differ
        return not result.get("is_cause", True), float(result.get("failed_at", 0.0))

    return min(failed, key=order, default=None)


def read_result(run_dir: Path) -> dict[str, Any] | None:
    """What ``result.json`` says, or None where there is none that can be read."""
    try:
        content = json.loads((run_dir / RESULT).read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def read_device(run_dir: Path) -> dict[str, Any]:
    """What ``device.json`` says; nothing where there is none that can be read."""
    try:
        content = json.loads((run_dir / DEVICE).read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def read_about(run_dir: Path) -> dict[str, Any]:
    """What ``run.json`` says of the first start: at least ``overrides``, and ``written`` by file."""
    try:
        content = json.loads((run_dir / ABOUT).read_text())
    except (OSError, ValueError):
        content = None
    return {"overrides": [], "written": {}, **(content if isinstance(content, dict) else {})}


def about(argv: list[str]) -> dict[str, Any]:
    """How a start came to be: command line, code version, library versions, host."""
    names = (
        "speechtrain",
        "torch",
        "numpy",
        "hydra-core",
        "omegaconf",
        "lhotse",
        "soundfile",
        "sentencepiece",
    )
    versions = {"python": platform.python_version()}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "argv": argv,
        "git": git_state(Path(__file__).resolve().parent),
        "versions": versions,
        "host": platform.node(),
        "platform": platform.platform(),
        "executable": sys.executable,
    }


def git_state(folder: Path) -> dict[str, Any]:
    """Commit and cleanliness of the checkout that ``folder`` is in; empty where it is none."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--", "."))}
    except (OSError, subprocess.SubprocessError):
        return {}
