"""Members of a plain tar of a stranger, found and read where they are, and the names of their places.

A place is ``TAR:OFFSET+SIZE//MEMBER``: it takes the place of a path wherever a recording has one.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from pathlib import Path
from tarfile import AREGTYPE, BLOCKSIZE, GNUTYPE_LONGNAME, REGTYPE, XGLTYPE, XHDTYPE, HeaderError, TarInfo
from typing import IO, Any

from speechtrain.errors import DataError

_BUFFER_BYTES = 2**18  # of a member that are read at once: eight seconds of 16 bits at 16 kHz
_MOST_EXTENDED = 2**16  # bytes of a header that holds a long name
_RECORD = re.compile(rb"([0-9]{1,6}) ([^=]{,100})=")
_PLACE = re.compile(r"(.*?\.tar):([0-9]{1,15})\+([0-9]{1,15})//(.*)", re.DOTALL)


def place(tar: Path, offset: int, size: int, member: str) -> str:
    """The name of a member's place."""
    return f"{tar}:{offset}+{size}//{member}"


def file_of(path: str) -> str:
    """The file that holds a recording: that of ``path``, or the tar of a place."""
    return found[1] if (found := _place_in(path)) else path


def _place_in(path: str) -> re.Match[str] | None:
    return _PLACE.fullmatch(path) if ".tar:" in path else None


class _Member(io.RawIOBase):
    """The bytes of one member. They are read in parts: a large one may hold many cuts."""

    def __init__(self, handle: int, begin: int, size: int) -> None:
        super().__init__()
        self._handle, self._begin, self._size = handle, begin, size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = max(0, offset + (0, self._position, self._size)[whence])
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._size - self._position))
        content = os.pread(self._handle, count, self._begin + self._position)
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)


def open_member(file: IO[bytes], path: str) -> io.BufferedReader | None:
    """Open the member whose place is ``path``; None if that is a file.

    Raises ValueError for one that is not there: the tar has changed.
    """
    if (found := _place_in(path)) is None:
        return None
    offset, size, name = int(found[2]), int(found[3]), found[4]
    try:
        header = _header(os.pread(file.fileno(), BLOCKSIZE, offset - BLOCKSIZE))
    except (HeaderError, OSError):
        header = TarInfo()
    # a name in ASCII is in its header, cut to 100 characters
    is_known = not name.isascii() or header.name in (name, name[:100])
    if not is_known or header.size != size or offset + size > os.fstat(file.fileno()).st_size:
        raise ValueError("the tar has changed since it was indexed; start the command again")
    return io.BufferedReader(_Member(file.fileno(), offset, size), _BUFFER_BYTES)


def _header(block: bytes) -> TarInfo:
    return TarInfo.frombuf(block, "utf-8", "surrogateescape")


def members(file: IO[bytes], path: Path) -> Iterator[tuple[str, int, int]]:
    """Yield name, offset and size of each member. Raises DataError for what is no regular file.

    Only headers are read. What extends a header may hold a name, and nothing else that matters.
    """
    end, at, name = os.fstat(file.fileno()).st_size, 0, ""
    while (block := os.pread(file.fileno(), BLOCKSIZE, at)).strip(b"\0"):
        try:
            info = _header(block)
        except HeaderError as error:
            raise DataError(f"{path}: no plain tar at byte {at} ({error})") from None
        at += BLOCKSIZE
        if info.size < 0 or at + info.size > end:
            raise DataError(f"{path}: cut off in {(name or info.name)[:100]!r}; write it again")
        if info.type in (XHDTYPE, XGLTYPE, GNUTYPE_LONGNAME):
            content = os.pread(file.fileno(), min(info.size, _MOST_EXTENDED), at)
            if info.type == XHDTYPE:
                name = _name_in(content)
            elif info.type == GNUTYPE_LONGNAME:
                name = content.rstrip(b"\0").decode(errors="surrogateescape")
        elif info.type not in (REGTYPE, AREGTYPE):
            raise DataError(f"{path}: {(name or info.name)[:100]!r} is not a regular file")
        else:
            yield name or info.name, at, info.size
            name = ""
        at += -(-info.size // BLOCKSIZE) * BLOCKSIZE


def _name_in(content: bytes) -> str:
    """The ``path`` among the records ``LENGTH KEY=VALUE`` of an extended header; empty if it has none."""
    at = 0
    while (found := _RECORD.match(content, at)) and int(found[1]):
        at += int(found[1])
        if found[2] == b"path":
            return content[found.end() : at].removesuffix(b"\n").decode(errors="surrogateescape")
    return ""
