"""A folder with modules of a stranger, named like modules that every command imports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

NAMES = ("torch", "numpy", "random", "multiprocessing", "json", "speechtrain", "hydra", "soundfile")


def write_modules(folder: Path, names: Sequence[str] = NAMES) -> None:
    """Write a module of each name. Its import adds a line to the file ``ran`` and exits with code 7."""
    note = f"print(__name__, __import__('sys').argv, file=open({str(folder / 'ran')!r}, 'a'))"
    for name in names:
        (folder / f"{name}.py").write_text(f"{note}\nraise SystemExit(7)\n")
