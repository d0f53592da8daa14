"""Lists the members of an untrusted, uncompressed tar, and reads them without unpacking.

The path of a member is ``TAR:OFFSET+SIZE//NAME``. OFFSET is the position of the member's content in the tar,
and both numbers are in bytes. Such a path can replace the path of a file in a recording.
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

_BUFFER_BYTES = 2**18  # bytes of one read from a member: eight seconds of 16-bit samples at 16 kHz
_EXTENDED_HEADER_BYTES = 2**16  # bytes of an extended header that are read. It contains a long name.
_HEADER_RECORD = re.compile(rb"([0-9]{1,6}) ([^=]{,100})=")  # the record's length and its key
_MEMBER_PATH = re.compile(r"(.*?\.tar):([0-9]{1,15})\+([0-9]{1,15})//(.*)", re.DOTALL)


def member_path(tar: Path, offset: int, size: int, member: str) -> str:
    """Return the path of the member with the name ``member`` (see above)."""
    return f"{tar}:{offset}+{size}//{member}"


def file_of(path: str) -> str:
    """Return the file of a recording: the tar if ``path`` is the path of a member, otherwise ``path``."""
    match = _match_member(path)
    return match[1] if match else path


def _match_member(path: str) -> re.Match[str] | None:
    return _MEMBER_PATH.fullmatch(path) if ".tar:" in path else None


class _Member(io.RawIOBase):
    """The bytes of one member. They are read in parts, because a large member may contain many cuts."""

    def __init__(self, descriptor: int, begin: int, size: int) -> None:
        super().__init__()
        self._descriptor, self._begin, self._size = descriptor, begin, size
        self._position = 0  # in the member

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origins = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}
        self._position = max(0, origins[whence] + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._size - self._position))
        content = os.pread(self._descriptor, count, self._begin + self._position)
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)


def open_member(file: IO[bytes], path: str) -> io.BufferedReader | None:
    """Open a member of the open tar ``file``. Return None if ``path`` is not the path of a member.

    Raises ValueError if the tar has changed, so that the member is not at the offset in ``path``.
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
        header = _parse_header(os.pread(file.fileno(), BLOCKSIZE, offset - BLOCKSIZE))
    except (HeaderError, OSError):
        return False
    tar_bytes = os.fstat(file.fileno()).st_size
    if header.size != size or offset + size > tar_bytes:
        return False
    # A header has at most the first 100 characters of an ASCII name. Other names are encoded in several ways,
    # so they are not compared.
    return not name.isascii() or header.name in (name, name[:100])


def _parse_header(block: bytes) -> TarInfo:
    return TarInfo.frombuf(block, "utf-8", "surrogateescape")


def members(file: IO[bytes], path: Path) -> Iterator[tuple[str, int, int]]:
    """Yield the name, the offset of the content and the size of each member. Only headers are read.

    An extended header may contain the name of the next member. Its other records are not used. Raises
    DataError for a member that is not a regular file, and for a damaged tar.
    """
    tar_bytes = os.fstat(file.fileno()).st_size
    offset = 0
    extended_name = ""  # the name of the next member from an extended header
    while True:
        block = os.pread(file.fileno(), BLOCKSIZE, offset)
        if not block.strip(b"\0"):  # A block of zeros, or the end of the file, ends the tar.
            return
        try:
            header = _parse_header(block)
        except HeaderError as error:
            raise DataError(f"{path}: no plain tar at byte {offset} ({error})") from None
        offset += BLOCKSIZE
        name = extended_name or header.name
        if header.size < 0 or offset + header.size > tar_bytes:
            raise DataError(f"{path}: cut off in {name[:100]!r}. Write it again")
        if header.type in (XHDTYPE, GNUTYPE_LONGNAME):
            content = os.pread(file.fileno(), min(header.size, _EXTENDED_HEADER_BYTES), offset)
            extended_name = _extended_name(header, content)
        elif header.type in (REGTYPE, AREGTYPE):
            yield name, offset, header.size
            extended_name = ""
        elif header.type != XGLTYPE:  # A global header has no names.
            raise DataError(f"{path}: {name[:100]!r} is not a regular file")
        content_blocks = -(-header.size // BLOCKSIZE)  # rounded up
        offset += content_blocks * BLOCKSIZE


def _extended_name(header: TarInfo, content: bytes) -> str:
    """Return the name of the next member from an extended header, or "" if the header has no name.

    The ``path`` among the records ``LENGTH KEY=VALUE`` of a header of POSIX is the name.
    """
    if header.type == GNUTYPE_LONGNAME:
        return content.rstrip(b"\0").decode(errors="surrogateescape")
    record_start = 0
    while record := _HEADER_RECORD.match(content, record_start):
        length = int(record[1])
        if length == 0:  # A damaged record of length 0 would be matched forever.
            break
        record_end = record_start + length
        if record[2] == b"path":
            path = content[record.end() : record_end]
            return path.removesuffix(b"\n").decode(errors="surrogateescape")
        record_start = record_end
    return ""
