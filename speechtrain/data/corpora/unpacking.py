"""Unpacking of tar archives: names and links stay below one folder, and the unpacked bytes have a limit.

The ``data`` filter of Python 3.11.4 to 3.11.13 follows links whose resolved path is too long for the system
(CVE-2025-4517 and CVE-2025-4330). So each member is also checked by its names alone.
"""

from __future__ import annotations

import bz2
import errno
import gzip
import lzma
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import IO, Any

from speechtrain.errors import DISK, MALFORMED, DataError, MachineError
from speechtrain.files import open_regular

_OPENERS: dict[bytes, Callable[..., Any]] = {b"\x1f\x8b": gzip.open, b"BZ": bz2.open, b"\xfd7": lzma.open}
_MOST_HEADER_BYTES = 2**16  # tarfile reads an extended header at once, in time that grows with its square
_LONGEST_NAME = 1_024  # characters
_DAMAGE = (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, *MALFORMED)


class _LimitedReader:
    """Reads the unpacked bytes of an archive in order, at most ``most_bytes``."""

    def __init__(self, stream: IO[bytes], most_bytes: float) -> None:
        self._stream = stream
        self._most_bytes = most_bytes

    def read(self, size: int) -> bytes:
        if size > _MOST_HEADER_BYTES:
            raise tarfile.ReadError(f"a header has {size} bytes")
        self._check(self.tell() + size)
        return self._stream.read(size)

    def seek(self, position: int) -> None:
        if position < self.tell():  # a gzipped file would be unpacked from its start again
            raise tarfile.ReadError("a member has a negative size")
        self._check(position)
        self._stream.seek(position)

    def tell(self) -> int:
        return self._stream.tell()

    def _check(self, position: int) -> None:
        if position > self._most_bytes:
            raise tarfile.ReadError(f"it has more than {self._most_bytes:.0f} bytes when unpacked")


def unpack(
    path: Path, folder: Path, most_bytes: float, report_bytes: Callable[[int], object]
) -> tuple[list[str], int]:
    """Unpack a tar archive below ``folder`` and return the names of its files and its unpacked bytes.

    If the archive has a folder of the same name at its top, the content of that folder is unpacked. Complete
    files are not written again. ``report_bytes`` gets the number of packed bytes read so far. Raises
    DataError for a damaged or hostile archive, MachineError for a Python without the filter, OSError for a
    full disk.
    """
    if not hasattr(tarfile, "data_filter"):
        raise MachineError(
            f"this Python cannot unpack {path} safely. Use 3.11.4 or newer, or unpack it yourself"
        )
    names = []
    try:
        with open_regular(path) as file:
            stream: Any = file
            if opener := _OPENERS.get(file.peek(2)[:2]):
                stream = opener(file)
            reader: Any = _LimitedReader(stream, most_bytes)
            with tarfile.open(fileobj=reader, mode="r:") as tar:
                for member in iter(tar.next, None):
                    if name := _extract(tar, member, folder):
                        names.append(name)
                    tar.members.clear()  # type: ignore[attr-defined]  # 300,000 members take 300 MB
                    report_bytes(file.tell())
            return names, reader.tell()
    except OSError as error:
        if error.errno in (*DISK, errno.EACCES, errno.EPERM):
            raise
        problem: object = error.strerror or error
    except _DAMAGE as error:
        problem = error
    raise DataError(f"{path} cannot be unpacked ({problem}); delete it and try again")


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> str:
    """Extract one member, unless it is complete, and return its name below ``folder`` if it is a file."""
    parts = _names_below(member.name, folder)
    if not parts:
        return ""
    name = "/".join(parts)
    path = folder / name
    is_complete = member.isfile() and not path.is_symlink() and path.is_file()
    if not (is_complete and path.stat().st_size == member.size):
        if not member.isdir() and (path.is_symlink() or path.is_file()):
            path.unlink()  # tarfile would write through a link
        linkname = _checked_link(member, parts, folder)
        renamed = member.replace(name=name, linkname=linkname, deep=False)
        tar.extract(renamed, folder, set_attrs=False, filter="data")
    return name if member.isfile() else ""


def _names_below(name: str, folder: Path) -> list[str]:
    """Return the parts of a member's name below ``folder``. Raises ExtractError if it may lead elsewhere."""
    path = PurePosixPath(name)
    parts = list(path.parts)
    if len(name) > _LONGEST_NAME or path.is_absolute() or ".." in parts:
        raise tarfile.ExtractError(f"{name[:100]!r} is not the name of a file below one folder")
    if parts[:1] == [folder.name]:
        del parts[0]
    for depth in range(1, len(parts)):
        if folder.joinpath(*parts[:depth]).is_symlink():
            raise tarfile.ExtractError(f"{name[:100]!r} lies behind a link")
    return parts


def _checked_link(member: tarfile.TarInfo, parts: list[str], folder: Path) -> str:
    """Return the name to which a member links. Raises ExtractError if it may lead out of ``folder``."""
    if member.issparse():
        raise tarfile.ExtractError(f"{member.name[:100]!r} is a sparse file")
    if member.islnk():
        name = "/".join(_names_below(member.linkname, folder))
        target_file = folder / name
        if target_file.is_symlink() or not target_file.is_file():
            raise tarfile.ExtractError(f"{member.name[:100]!r} is a link to a file that does not exist")
        return name
    if member.issym():
        target = PurePosixPath(member.linkname)
        climbs = target.parts.count("..")
        is_below = climbs < len(parts) and target.parts[:climbs] == ("..",) * climbs
        if not is_below or target.is_absolute():
            raise tarfile.ExtractError(f"{member.name[:100]!r} is a link that leads out of its folder")
    return member.linkname
