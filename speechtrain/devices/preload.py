"""Find shared libraries for ``LD_PRELOAD``."""

from __future__ import annotations

import contextlib
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


def library_folders(environ: Mapping[str, str]) -> list[Path]:
    """Return the folders of shared libraries: of this Python environment first, then of the system."""
    prefixes = [environ.get("VIRTUAL_ENV", ""), environ.get("CONDA_PREFIX", ""), sys.prefix, sys.base_prefix]
    paths = [Path(prefix) / "lib" for prefix in prefixes if prefix]
    paths += [Path(folder) for folder in environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    multiarch = sysconfig.get_config_var("MULTIARCH")
    for root in (Path("/usr/local"), Path("/usr"), Path("/")):
        if multiarch:
            paths.append(root / "lib" / multiarch)
        paths += [root / "lib64", root / "lib"]
    paths += _loader_folders()
    return list(dict.fromkeys(paths))  # without repetitions, in the same order


def _loader_folders(root: Path = Path("/etc/ld.so.conf.d")) -> list[Path]:
    """Return the folders in the configuration of the system's loader."""
    paths: list[Path] = []
    for file in sorted(root.glob("*.conf")):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            lines = file.read_text().splitlines()
            paths += [Path(line.strip()) for line in lines if line.startswith("/")]
    return paths


def find_library(names: Sequence[str], folders: Iterable[Path]) -> str | None:
    """Return the path of the first library in ``folders`` with one of ``names``, or None.

    A version may follow the name: for ``libjemalloc.so``, the file may be ``libjemalloc.so.2``. A library for
    another kind of processor is skipped.
    """
    for folder in folders:
        for name in names:
            for path in (folder / name, *sorted(folder.glob(f"{name}.[0-9]*"))):
                if _is_native(path):
                    return str(path)
    return None


def _is_native(path: Path) -> bool:
    """Return whether a library is for the same kind of processor as this Python."""
    formats = []
    for binary in (path, Path(sys.executable)):
        try:
            with binary.open("rb") as file:
                header = file.read(20)
        except OSError:
            return False
        # In an ELF header, bytes 0 to 3 are fixed. Byte 4 is the word size (32 or 64 bits), and bytes 18 and
        # 19 are the processor.
        formats.append((header[:5], header[18:20]))
    library_format, python_format = formats
    return library_format == python_format
