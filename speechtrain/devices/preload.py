"""Finds shared libraries for ``LD_PRELOAD``."""

from __future__ import annotations

import contextlib
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path


def folders(environ: Mapping[str, str]) -> list[Path]:
    """Folders with libraries of this environment and of the system, nearest first."""
    prefixes = [environ.get("VIRTUAL_ENV", ""), environ.get("CONDA_PREFIX", ""), sys.prefix, sys.base_prefix]
    found = [Path(prefix) / "lib" for prefix in prefixes if prefix]
    found += [Path(folder) for folder in environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    multiarch = sysconfig.get_config_var("MULTIARCH")
    for root in (Path("/usr/local"), Path("/usr"), Path("/")):
        found += [root / "lib" / multiarch] if multiarch else []
        found += [root / "lib64", root / "lib"]
    return list(dict.fromkeys([*found, *_configured()]))


def _configured(root: Path = Path("/etc/ld.so.conf.d")) -> Iterable[Path]:
    """The folders in the configuration of the system's loader."""
    found: list[Path] = []
    for file in sorted(root.glob("*.conf")):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            found += [Path(line.strip()) for line in file.read_text().splitlines() if line.startswith("/")]
    return found


def library(names: Iterable[str], places: Iterable[Path]) -> str | None:
    """The first of ``places`` that holds one of ``names`` (``libjemalloc.so``), versioned names included.

    A library for another kind of processor is skipped. Returns the library's path, or None.
    """
    known = list(names)
    for folder in places:
        for name in known:
            for path in (folder / name, *sorted(folder.glob(f"{name}.[0-9]*"))):
                if _is_native(path):
                    return str(path)
    return None


def _is_native(path: Path) -> bool:
    """Whether a library has the ELF class and machine of this interpreter."""
    heads = []
    for file in (path, Path(sys.executable)):
        try:
            with file.open("rb") as opened:
                head = opened.read(20)
        except OSError:
            return False
        heads.append((head[:5], head[18:20]))
    return heads[0] == heads[1]
