"""Unpacks untrusted tar archives. Names and links stay below one folder, and the unpacked bytes are limited.

The ``data`` filter of Python 3.11.4 to 3.11.13 follows links whose resolved path is too long for the system
(CVE-2025-4517 and CVE-2025-4330). So each member is also checked by its names alone.
"""

from __future__ import annotations

import errno
import lzma
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from speechtrain.errors import DISK, MALFORMED, DataError, MachineError
from speechtrain.files import open_regular

_MOST_HEADER_BYTES = 2**16
_LONGEST_NAME = 1_024  # characters
_DAMAGE = (tarfile.TarError, EOFError, KeyError, zlib.error, lzma.LZMAError, *MALFORMED)


class _Header(tarfile.TarInfo):
    """The header of a member. It refuses a large extended header, such as one with a long name.

    tarfile reads an extended header in time quadratic in its size.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Header:
        header = super().frombuf(buf, encoding, errors)
        if header.size < 0 or (header.size > _MOST_HEADER_BYTES and not header.isfile()):
            raise tarfile.ReadError(f"a header has {header.size} bytes")
        return header


def unpack(
    path: Path, folder: Path, most_bytes: float, report_bytes: Callable[[int], object]
) -> tuple[list[str], int]:
    """Unpack a tar archive below ``folder`` and return the names of its files and its unpacked bytes.

    If the members are in a folder with the name of ``folder``, they are unpacked without that folder. A file
    that exists with its full size is not written again. ``report_bytes`` is called with the number of packed
    bytes read so far. Raises DataError for a damaged or hostile archive, MachineError for a Python without
    the filter, OSError for a full disk.
    """
    if not hasattr(tarfile, "data_filter"):
        raise MachineError(
            f"this Python cannot unpack {path} safely. Use 3.11.4 or newer, or unpack it yourself"
        )
    names, size = [], 0
    try:
        with open_regular(path) as file, tarfile.open(fileobj=file, tarinfo=_Header) as tar:
            for member in iter(tar.next, None):
                size = member.offset_data + member.size  # unpacked bytes up to the end of this member
                if member.size < 0 or size > most_bytes or member.issparse():
                    raise tarfile.ReadError(f"it has more than {most_bytes:.0f} bytes, or a sparse file")
                if name := _extract(tar, member, folder):
                    names.append(name)
                tar.members.clear()  # type: ignore[attr-defined]  # 300,000 members would need 300 MB.
                report_bytes(file.tell())
        return names, size
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
    if not _is_complete(member, path):
        is_file_or_link = path.is_file() or path.is_symlink()
        if is_file_or_link and not member.isdir():
            path.unlink()  # tarfile would write to the target of a link.
        linkname = _checked_link(member, parts, folder)
        renamed = member.replace(name=name, linkname=linkname, deep=False)
        tar.extract(renamed, folder, set_attrs=False, filter="data")
    return name if member.isfile() else ""


def _is_complete(member: tarfile.TarInfo, path: Path) -> bool:
    """Return whether ``path`` is already the whole file of a member."""
    is_file = path.is_file() and not path.is_symlink()
    return is_file and member.isfile() and path.stat().st_size == member.size


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
    if member.islnk():
        name = "/".join(_names_below(member.linkname, folder))
        if (folder / name).is_symlink():  # A hard link to a symbolic link would point to another file.
            raise _bad_link(member)
        return name
    target = PurePosixPath(member.linkname)
    levels_up = target.parts.count("..")
    # All ".." are at the start, and they do not leave ``folder``.
    is_below = levels_up < len(parts) and target.parts[:levels_up] == ("..",) * levels_up
    if not is_below or target.is_absolute():
        raise _bad_link(member)
    return member.linkname


def _bad_link(member: tarfile.TarInfo) -> tarfile.ExtractError:
    return tarfile.ExtractError(f"{member.name[:100]!r} is a link that leads out of its folder")
