"""Downloads and unpacks the archives of public corpora. An interrupted download continues."""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import http.client
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from speechtrain.data.corpora.unpacking import unpack
from speechtrain.data.prepare.cut_files import check_room
from speechtrain.errors import DISK, ConfigError, DataError, MachineError
from speechtrain.files import absolute_path, open_append, open_regular, write_text, writing

_BLOCK = 2**20  # bytes that are received at once
_MAX_FAILURES = (
    5  # the download ends after this number of connections in a row that receive less than a block
)
_TIMEOUT = 60.0  # the most seconds without a byte
_MIN_RATE = 1_000  # the lowest mean rate of a connection, in bytes per second
_SHARE = 0.1  # the share of a file between two lines of progress, if stderr is not a terminal


@dataclass
class Archive:
    """A tar archive with parts of a corpus."""

    parts: list[str]  # parts of the corpus that the archive has
    gb: float  # size of the archive, in GB
    unpacked_gb: float  # size of its content, in GB
    md5: str = ""  # published checksum
    sha256: str = ""  # published checksum, in place of md5
    into: str = ""  # folder below root for its content. Empty: the corpus's own folder
    inner: str = ""  # pattern of archives inside it, which are unpacked in their folders


def fetch(root: Path, url: str, archives: Mapping[str, Archive], folder: str) -> None:
    """Download archives to ``root`` and unpack them in ``root/folder``, unless they are unpacked already.

    ``archives`` maps the names of the files below ``url``. Nothing is deleted. Raises MachineError if the
    disk has too little space for all archives, before the first byte, and if the server cannot be reached.
    Raises DataError for an archive that the server does not have, that is damaged or larger than declared, or
    whose checksum is not the published one.
    """
    root = absolute_path(root)
    if not re.match(r"https?://", url):
        raise ConfigError(f"url={url}: it must start with https:// or http://")
    _check_names(root, archives, folder)
    missing = {name: archive for name, archive in archives.items() if not _marker(root, name).exists()}
    if not missing:
        return
    print(_checked_room(root, missing), flush=True)
    with writing(root, "use another root="):
        for name, archive in missing.items():
            path = root / name
            part = root / f"{name}.part"
            if not path.exists():
                _download(f"{url.rstrip('/')}/{name}", part, _most_bytes(archive.gb))
                part.rename(path)
            _verify(path, archive)
            _unpack(path, root / (archive.into or folder), archive)
            write_text(_marker(root, name), "")
            print(f"{path} is unpacked; you can delete it", flush=True)


def _check_names(root: Path, archives: Mapping[str, Archive], folder: str) -> None:
    """Raise ConfigError unless each name is a file in ``root``, and its content goes below ``root``."""
    for name, archive in archives.items():
        is_below = root in absolute_path(root / (archive.into or folder)).parents
        if not is_below or Path(name).name != name or not name.isprintable():
            raise ConfigError(
                f"archives.{name}: it is not the name of a file, or its folder is not below root"
            )


def _checked_room(root: Path, archives: Mapping[str, Archive]) -> str:
    """Return a line with the space that the archives need. Raises MachineError if it is not free.

    Bytes that are already downloaded are not counted again.
    """
    needed_bytes = 0.0
    for name, archive in archives.items():
        needed_bytes += (archive.gb + archive.unpacked_gb) * 1e9
        needed_bytes -= _size(root / name) + _size(root / f"{name}.part")
    return check_room(root, max(0.0, needed_bytes), "about ", "or use another root=")


def _most_bytes(gigabytes: float) -> float:
    """Return the most bytes that are accepted for a declared size, which is rounded."""
    return 1.25e9 * gigabytes + 2**27


def _unpack(path: Path, folder: Path, archive: Archive) -> None:
    """Unpack an archive and the archives inside it. One limit applies to the unpacked bytes of all."""
    most_bytes = _most_bytes(archive.unpacked_gb)
    with _progress(path.name, _size(path)) as report_bytes:
        names, size = unpack(path, folder, most_bytes, report_bytes)
    for name in fnmatch.filter(names, archive.inner):
        most_bytes -= size
        inner = folder / name
        _, size = unpack(inner, inner.parent, most_bytes, lambda _: None)


def _marker(root: Path, name: str) -> Path:
    """Return the path of the empty file that shows that an archive is unpacked."""
    return root / f".{name}.unpacked"


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _download(url: str, path: Path, most_bytes: float) -> None:
    """Append to ``path`` until it has all bytes. If a connection fails, the next one continues the download.

    Raises MachineError after several connections that received little, DataError if the server refuses.
    """
    failures = 0
    while True:
        size_before = _size(path)
        try:
            _receive(url, path, most_bytes)
            return
        except urllib.error.HTTPError as error:
            content_range = error.headers.get("Content-Range") or ""
            if error.code == 416 and content_range.endswith(f"/{size_before}"):
                return  # The file was complete before.
            if error.code < 500:
                raise DataError(
                    f"{url}: {error.code} {error.reason}. See the corpus's page, or set url="
                ) from None
            cause: Exception = error
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, OSError) and (error.errno in DISK or error.filename):
                raise
            cause = error
        failures += 1
        if _size(path) - size_before >= _BLOCK:
            failures = 0
        if failures == _MAX_FAILURES:
            raise MachineError(f"{url}: {cause}; the same command continues the download") from cause
        time.sleep(2**failures - 1)  # 0 s after a connection that received a block, else 1, 3, 7 and 15 s


def _receive(url: str, path: Path, most_bytes: float) -> None:
    """Append the missing bytes of ``path`` over one connection.

    Raises OSError if the connection ends early or is too slow, DataError for more than ``most_bytes``.
    """
    with open_append(path) as file:
        size = _size(path)
        headers = {}
        if size:
            headers["Range"] = f"bytes={size}-"
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as reply:
            if size and not str(reply.headers.get("Content-Range")).startswith(f"bytes {size}-"):
                size = 0  # The server sends the whole file.
                file.truncate(size)
            end = size + (reply.length or 0)
            start, start_time = size, time.monotonic()
            with _progress(path.stem, end) as report_bytes:
                while block := reply.read1(_BLOCK):
                    size += len(block)
                    if size > most_bytes:
                        raise DataError(f"{url} has more than the declared size. See the corpus's page")
                    file.write(block)
                    report_bytes(size)
                    seconds = time.monotonic() - start_time
                    if seconds > _TIMEOUT and size - start < _MIN_RATE * seconds:
                        raise ConnectionError(f"the server sends less than {_MIN_RATE} bytes in a second")
            if size < end:
                raise ConnectionError(f"the connection ended {end - size} bytes before the file")


def _verify(path: Path, archive: Archive) -> None:
    """Raise DataError if the checksum of a file is not the published checksum."""
    for kind, published in (("md5", archive.md5), ("sha256", archive.sha256)):
        if not published:
            continue
        with open_regular(path) as file:
            new = partial(hashlib.new, kind, usedforsecurity=False)
            checksum = hashlib.file_digest(file, new).hexdigest()
        if checksum != published:
            raise DataError(
                f"{path}: its {kind} is {checksum}, published is {published}. Delete it and try again"
            )


@contextlib.contextmanager
def _progress(name: str, total: int) -> Iterator[Any]:
    """Yield a function that is called with the number of bytes so far and shows the progress.

    On a terminal it draws a bar. Otherwise it prints a line for each tenth of ``total``.
    """
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(*Progress.get_default_columns(), console=Console(stderr=True)) as bar:
            task = bar.add_task(name.replace("[", "("), total=total or None)
            yield lambda size: bar.update(task, completed=size)
        return
    printed_share = 0.0

    def print_share(size: int) -> None:
        nonlocal printed_share
        if total and size / total >= printed_share + _SHARE:
            printed_share = size / total
            print(f"{name}: {printed_share:.0%}", flush=True)

    yield print_share
