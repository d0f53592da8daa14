"""Lists the members of an untrusted, uncompressed tar, and reads them without unpacking.

The path of a member is ``TAR:OFFSET+SIZE//NAME``. A recording can have it instead of the path of a file.
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

_BUFFER_BYTES = 2**18  # One read from a member returns eight seconds of audio, 16-bit samples at 16 kHz.
_EXTENDED_HEADER_BYTES = 2**16  # An extended header holds a long name. Bytes beyond this size are not read.
_HEADER_RECORD = re.compile(rb"([0-9]{1,6}) ([^=]{,100})=")  # the record's length and its key
_MEMBER_PATH = re.compile(r"(.*?\.tar):([0-9]{1,15})\+([0-9]{1,15})//(.*)", re.DOTALL)


def member_path(tar: Path, offset: int, size: int, member: str) -> str:
    """Return the path of a member."""
    return f"{tar}:{offset}+{size}//{member}"


def file_of(path: str) -> str:
    """Return the file that holds a recording: ``path`` itself, or the tar of a member's path."""
    match = _match_member(path)
    return match[1] if match else path


def _match_member(path: str) -> re.Match[str] | None:
    return _MEMBER_PATH.fullmatch(path) if ".tar:" in path else None


class _Member(io.RawIOBase):
    """The bytes of one member. They are read in parts, because a large member may hold many cuts."""

    def __init__(self, handle: int, begin: int, size: int) -> None:
        super().__init__()
        self._handle, self._begin, self._size = handle, begin, size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = (0, self._position, self._size)[whence]  # SEEK_SET, SEEK_CUR, SEEK_END
        self._position = max(0, origin + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._size - self._position))
        content = os.pread(self._handle, count, self._begin + self._position)
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)


def open_member(file: IO[bytes], path: str) -> io.BufferedReader | None:
    """Open the member that ``path`` names, in the open tar. Returns None if ``path`` is a file.

    Raises ValueError if the tar has changed, so that the member is not at this offset.
    """
    match = _match_member(path)
    if match is None:
        return None
    offset, size, name = int(match[2]), int(match[3]), match[4]
    if not _is_member(file, offset, size, name):
        raise ValueError("the tar has changed since it was indexed. Start the command again")
    return io.BufferedReader(_Member(file.fileno(), offset, size), _BUFFER_BYTES)


def _is_member(file: IO[bytes], offset: int, size: int, name: str) -> bool:
    """Return whether the content of the member ``name`` with ``size`` bytes starts at ``offset``."""
    try:
        header = _header(os.pread(file.fileno(), BLOCKSIZE, offset - BLOCKSIZE))
    except (HeaderError, OSError):
        return False
    tar_bytes = os.fstat(file.fileno()).st_size
    if header.size != size or offset + size > tar_bytes:
        return False
    # A header holds the first 100 characters of an ASCII name. Other names cannot be compared.
    return not name.isascii() or header.name in (name, name[:100])


def _header(block: bytes) -> TarInfo:
    return TarInfo.frombuf(block, "utf-8", "surrogateescape")


def members(file: IO[bytes], path: Path) -> Iterator[tuple[str, int, int]]:
    """Yield the name, offset and size of each member. Only headers are read.

    An extended header may hold the name of the next member. Its other records are not used. Raises DataError
    for a member that is not a regular file, and for a damaged tar.
    """
    tar_bytes = os.fstat(file.fileno()).st_size
    offset, name = 0, ""
    while (block := os.pread(file.fileno(), BLOCKSIZE, offset)).strip(b"\0"):
        try:
            header = _header(block)
        except HeaderError as error:
            raise DataError(f"{path}: no plain tar at byte {offset} ({error})") from None
        offset += BLOCKSIZE
        shown_name = (name or header.name)[:100]
        if header.size < 0 or offset + header.size > tar_bytes:
            raise DataError(f"{path}: cut off in {shown_name!r}. Write it again")
        if header.type in (XHDTYPE, XGLTYPE, GNUTYPE_LONGNAME):
            content = os.pread(file.fileno(), min(header.size, _EXTENDED_HEADER_BYTES), offset)
            name = _extended_name(header, content, name)
        elif header.type in (REGTYPE, AREGTYPE):
            yield name or header.name, offset, header.size
            name = ""
        else:
            raise DataError(f"{path}: {shown_name!r} is not a regular file")
        blocks = -(-header.size // BLOCKSIZE)  # rounded up
        offset += blocks * BLOCKSIZE


def _extended_name(header: TarInfo, content: bytes, name: str) -> str:
    """Return the name that an extended header gives to the next member, or "" if it gives no name.

    A global header gives no names, so ``name``, the name from an earlier extended header, stays.
    """
    if header.type == GNUTYPE_LONGNAME:
        return content.rstrip(b"\0").decode(errors="surrogateescape")
    if header.type == XHDTYPE:
        return _path_record(content)
    return name


def _path_record(content: bytes) -> str:
    """Return the ``path`` among the records ``LENGTH KEY=VALUE`` of an extended header, or ""."""
    start = 0
    while record := _HEADER_RECORD.match(content, start):
        length = int(record[1])
        if length == 0:  # A damaged record of length 0 would be matched forever.
            break
        start += length
        if record[2] == b"path":
            return content[record.end() : start].removesuffix(b"\n").decode(errors="surrogateescape")
    return ""
