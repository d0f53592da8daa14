"""The run directory: its lock, its config, its result. Imports no torch."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from speechtrain.errors import DISK, RunError, one_line
from speechtrain.files import open_append, read_json, remove_temporaries

CONFIG = "config.yaml"
RESULT = "result.json"
ABOUT = "run.json"
DEVICE = "device.json"
"""What the device chose by measurement; a resumed run reads it."""
ERROR = "error.log"
RANKS = "ranks"
STUCK = "stuck"
"""The phase and stacks of each rank when a rank was stuck; one folder per time."""
_RESULT_TYPES: dict[str, Any] = {
    **dict.fromkeys(("steps", "rank", "exit_code"), int),
    **dict.fromkeys(("status", "error"), str),
    **dict.fromkeys(("metrics", "last_metrics"), dict),
    "is_cause": bool,
}
_FOLDERS = ("checkpoints", RANKS, STUCK, "tensorboard")


def run_of(place: Path) -> Path | None:
    """The run that a folder is, or that a checkpoint or a file in it belongs to; None if there is none."""
    step = place if place.is_dir() else place.parent
    run = step.parents[1] if (step / "checkpoint.json").is_file() else step
    return run if (run / CONFIG).is_file() else None


class RunLock:
    """An advisory lock that allows one run at a time in a directory; it ends with its process.

    The file names host and pid, for the message of a second command.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "lock"
        self._file: IO[bytes] | None = None

    def acquire(self) -> RunLock:
        """Take the lock, and remove what a killed process left half-written beside it.

        Raises RunError, which names the process that holds it, or a link in its place.
        """
        for folder in (self.path.parent / name for name in _FOLDERS):
            for path in (folder, *folder.glob("*")):
                if path.is_symlink() and not path.is_file():  # the run would write and delete files elsewhere
                    raise RunError(f"{path} is a link; remove it, a run writes into its own folders only")
        try:
            file = open_append(self.path)
        except OSError as error:
            if error.errno in DISK:
                raise
            raise RunError(f"{self.path}: {error.strerror}; remove it or set another run_dir") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            holder = one_line(file.read(300).decode(errors="replace")) or "another process"
            file.close()
            raise RunError(
                f"{self.path.parent} is in use by {holder}; wait for it, stop it, or set another run_dir"
            ) from None
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {platform.node()}\n".encode())
        file.flush()
        self._file = file
        remove_temporaries(self.path.parent)
        return self

    def release(self) -> None:
        if self._file is not None:
            self._file.close()  # closing releases the lock; the file stays, or a waiting opener would race
            self._file = None


def rank_folder(run_dir: Path, rank: int) -> Path:
    """The folder of a rank's result, of the trace of its failure, and of its output."""
    return run_dir / RANKS / str(rank) if rank else run_dir


def read_failure(run_dir: Path) -> dict[str, Any] | None:
    """The result of the rank that failed first and made its peers fail; None if no rank failed."""
    folders = [run_dir, *(run_dir / RANKS).glob("*")]
    found = [result for folder in folders if (result := read_result(folder)) is not None]
    failed = [result for result in found if result.get("status") == "failed"]

    def order(result: dict[str, Any]) -> tuple[bool, float]:  # hosts' clocks may differ
        return not result.get("is_cause", True), number(result.get("failed_at")) or 0.0

    return min(failed, key=order, default=None)


def read_result(run_dir: Path) -> dict[str, Any] | None:
    """The content of ``result.json``; None if it is missing, unreadable or has values of other types."""
    found = {"status": None, **read_json(run_dir / RESULT)}
    typed = all(isinstance(found[key], kind) for key, kind in _RESULT_TYPES.items() if key in found)
    return found if typed else None


def outcome(result: Mapping[str, Any]) -> str:
    """The figures of a result: of the best checkpoint, and of the last validation where that is another."""
    best, last = _figures(result.get("metrics")), _figures(result.get("last_metrics"))
    if best == last or not last:
        return best
    step = re.fullmatch(r".*-0*([0-9]+)", str(result.get("checkpoint")))
    return f"best at step {step[1] if step else 'unknown'}: {best}; last {last}"


def _figures(metrics: Any) -> str:
    found = metrics if isinstance(metrics, Mapping) else {}
    # the first set's metrics are listed twice, once without its name
    of_sets = {name: value for name, value in found.items() if "/" in name}
    return ", ".join(metric(name, value) for name, value in shown(of_sets or found).items())


def shown(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are printed: delays serve the times of words, and stay in logs, results and charts."""
    return {name: value for name, value in metrics.items() if not name.endswith("_delay")}


def number(value: Any) -> float | None:
    """``value`` if it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer beyond what a float holds
        return None


def metric(name: str, value: Any) -> str:
    """``wer 3.21 %`` for an error rate given as a fraction, ``loss 4.56`` for anything else."""
    if not isinstance(value, float) and number(value) is None:
        return f"{name} {'-' if value is None else str(value)[:20]}"
    return f"{name} {100 * value:.2f} %" if is_error_rate(name) else f"{name} {value:.4g}"


def is_error_rate(name: str) -> bool:
    """Whether a metric is a word, character or sentence error rate: a fraction, shown in percent."""
    return name.rpartition("/")[2].rpartition("_")[2] in ("wer", "cer", "ser")


def read_device(run_dir: Path) -> dict[str, Any]:
    """The content of ``device.json``; empty if it is missing or unreadable."""
    return read_json(run_dir / DEVICE)


def read_about(run_dir: Path) -> dict[str, Any]:
    """The content of ``run.json``, of the first start: at least ``overrides``, and ``written`` by file."""
    return {"overrides": [], "written": {}, **read_json(run_dir / ABOUT)}


def about(argv: list[str]) -> dict[str, Any]:
    """The origin of a start: command line, code version, library versions, host."""
    libraries = ("torch", "numpy", "hydra-core", "omegaconf", "lhotse", "soundfile", "sentencepiece")
    return {
        "argv": argv,
        "git": git_state(Path(__file__).resolve().parent),
        "versions": versions_of("speechtrain", *libraries),
        "host": platform.node(),
        "platform": platform.platform(),
        "executable": sys.executable,
    }


def versions_of(*packages: str) -> dict[str, str]:
    """The versions of Python and of those packages that are installed, by name."""
    found = {"python": platform.python_version()}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def git_state(folder: Path) -> dict[str, Any]:
    """Commit of the checkout of ``folder``, and whether it has changes; empty outside a checkout."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--", "."))}
    except (OSError, subprocess.SubprocessError):
        return {}
