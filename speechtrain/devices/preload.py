"""Finds shared libraries for ``LD_PRELOAD``."""

from __future__ import annotations

import contextlib
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


def library_folders(environ: Mapping[str, str]) -> list[Path]:
    """Return the folders with libraries of this environment and of the system, nearest first."""
    prefixes = [environ.get("VIRTUAL_ENV", ""), environ.get("CONDA_PREFIX", ""), sys.prefix, sys.base_prefix]
    paths = [Path(prefix) / "lib" for prefix in prefixes if prefix]
    paths += [Path(folder) for folder in environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    multiarch = sysconfig.get_config_var("MULTIARCH")
    for root in (Path("/usr/local"), Path("/usr"), Path("/")):
        if multiarch:
            paths.append(root / "lib" / multiarch)
        paths += [root / "lib64", root / "lib"]
    return list(dict.fromkeys([*paths, *_loader_folders()]))


def _loader_folders(root: Path = Path("/etc/ld.so.conf.d")) -> list[Path]:
    """Return the folders in the configuration of the system's loader."""
    paths: list[Path] = []
    for file in sorted(root.glob("*.conf")):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            paths += [Path(line.strip()) for line in file.read_text().splitlines() if line.startswith("/")]
    return paths


def find_library(names: Sequence[str], folders: Iterable[Path]) -> str | None:
    """Return the path of the first library with one of ``names`` (``libjemalloc.so``), or None.

    The name may be followed by a version. A library for another kind of processor is skipped.
    """
    for folder in folders:
        for name in names:
            for path in (folder / name, *sorted(folder.glob(f"{name}.[0-9]*"))):
                if _is_native(path):
                    return str(path)
    return None


def _is_native(path: Path) -> bool:
    """Return whether a library has the ELF class and machine of this interpreter."""
    headers = []
    for binary in (path, Path(sys.executable)):
        try:
            with binary.open("rb") as file:
                header = file.read(20)
        except OSError:
            return False
        headers.append((header[:5], header[18:20]))
    return headers[0] == headers[1]
