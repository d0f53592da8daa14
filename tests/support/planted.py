"""Copies of the package with one fault, which a checker must name by file and line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Fault:
    """A line of the package, and the lines that replace it. The line with ``# planted`` is at fault."""

    name: str
    file: str
    line: str
    replacement: str
    model: str = "rnnt"  # or wav2vec2: the model of the doctor's recipe
    # The outcome by device: ``named`` (red with file and line), ``red``, or why the device allows it.
    hpu: str = "named"
    cuda: str = "named"


def plant(fault: Fault, folder: Path) -> tuple[Path, int]:
    """Return a copy of the package with the fault, and the number of the line that must be named."""
    for name in ("speechtrain", "conf", "launchers", "tests/support"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "speechtrain" / fault.file
    text = path.read_text()
    assert text.count(fault.line) == 1, (
        f"{fault.name}: {fault.file} has the line {text.count(fault.line)} times"
    )
    text = text.replace(fault.line, fault.replacement)
    path.write_text(text)
    (number,) = [n for n, line in enumerate(text.splitlines(), 1) if "# planted" in line]
    return folder, number


def run_module(folder: Path, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module of the package copy in ``folder``."""
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONWARNINGS": "ignore"}
    line = [sys.executable, "-m", module, *arguments]
    return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, check=False)
