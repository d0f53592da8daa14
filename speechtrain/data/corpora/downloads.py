"""Archives of public corpora: downloads that continue, checksums, unpacking below one folder."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import re
import sys
import tarfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from speechtrain.data.cut_files import check_room
from speechtrain.errors import DISK, ConfigError, DataError, MachineError, printable
from speechtrain.files import open_append, open_regular, whole_path, write_text, writing

_BLOCK = 2**20  # bytes
_TRIES = 5  # without a new byte
_TIMEOUT = 60.0  # seconds without a byte
_SHARE = 0.1  # of a file, between two lines where stderr is no terminal


@dataclass
class Archive:
    """A tar archive with ``parts`` of a corpus: its size, its published checksum, and where it is unpacked.

    ``inner`` is the pattern of archives inside it, which are unpacked where they lie.
    """

    parts: list[str]
    gb: float
    unpacked_gb: float
    md5: str = ""
    sha256: str = ""
    into: str = ""
    inner: str = ""


def fetch(root: Path, url: str, archives: Mapping[str, Archive]) -> None:
    """Download and unpack the archives that are not unpacked yet, below ``root``; nothing is deleted.

    Raises MachineError without room for all of them, before the first byte, and for a server that cannot be
    reached; DataError for an archive that is missing there, damaged, or not what was published.
    """
    root = whole_path(root)
    if not re.match(r"https?://", url):
        raise ConfigError(f"url={url}: it must start with https:// or http://")
    for name, archive in archives.items():
        if Path(name).name != name or root not in (
            whole_path(root / archive.into),
            *whole_path(root / archive.into).parents,
        ):
            raise ConfigError(f"archives.{name}: an archive is a file's name, unpacked below root")
    left = {name: archive for name, archive in archives.items() if not _marker(root, name).exists()}
    if not left:
        return
    need = sum((archive.gb + archive.unpacked_gb) * 1e9 for archive in left.values())
    there = sum(_size(path) for name in left for path in (root / name, root / f"{name}.part"))
    print(printable(check_room(root, max(0.0, need - there), "about ", "or use another root=")), flush=True)
    with writing(root, "use another root="):
        for name, archive in left.items():
            path = root / name
            if not path.exists():
                _download(f"{url.rstrip('/')}/{name}", root / f"{name}.part")
                (root / f"{name}.part").rename(path)
            _verify(path, archive)
            into = root / archive.into
            _unpack(path, into)
            for inner in sorted(into.glob(archive.inner)) if archive.inner else ():
                _unpack(inner, inner.parent)
            write_text(_marker(root, name), "")
            print(printable(f"{path} is unpacked; you can delete it"), flush=True)


def _marker(root: Path, name: str) -> Path:
    return root / f".{name}.unpacked"


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _download(url: str, path: Path) -> None:
    """Append to ``path`` until it has all bytes; a cut connection is opened again where it ended."""
    failed = 0
    while True:
        before = _size(path)
        try:
            _receive(url, path)
            return
        except urllib.error.HTTPError as error:
            if error.code == 416 and (error.headers.get("Content-Range") or "").endswith(f"/{before}"):
                return  # it was complete already
            if error.code < 500:
                raise DataError(
                    f"{url}: {error.code} {error.reason}; see the corpus's page, or set url="
                ) from None
            cause: Exception = error
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, OSError) and (error.errno in DISK or error.filename):
                raise
            cause = error
        failed = 0 if _size(path) > before else failed + 1
        if failed == _TRIES:
            raise MachineError(f"{url}: {cause}; the same command continues the download") from cause
        time.sleep(2**failed - 1)


def _receive(url: str, path: Path) -> None:
    """One connection: append what ``path`` lacks. Raises OSError where it ends early."""
    with open_append(path) as file:
        have = _size(path)
        asked = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
        with urllib.request.urlopen(asked, timeout=_TIMEOUT) as reply:
            if have and not str(reply.headers.get("Content-Range")).startswith(f"bytes {have}-"):
                file.truncate(have := 0)  # the server sends all of it
            length = int(reply.headers.get("Content-Length") or -1)
            with _progress(path.stem, have + max(0, length)) as tell:
                while block := reply.read(_BLOCK):
                    file.write(block)
                    have, length = have + len(block), length - len(block)
                    tell(have)
            if length > 0:
                raise ConnectionError(f"the connection ended {length} bytes before the file")


def _verify(path: Path, archive: Archive) -> None:
    """Compare the checksum. Raises DataError."""
    for kind, published in (("md5", archive.md5), ("sha256", archive.sha256)):
        if not published:
            continue
        with open_regular(path) as file:
            new = partial(hashlib.new, kind, usedforsecurity=False)
            found = hashlib.file_digest(file, new).hexdigest()
        if found != published:
            raise DataError(
                f"{path}: its {kind} is {found}, published is {published}; delete it and try again"
            )


def _unpack(path: Path, into: Path) -> None:
    """Unpack below ``into`` the files that are missing or shorter there, by tarfile's filter for data."""
    if not hasattr(tarfile, "data_filter"):
        raise MachineError(
            f"this Python cannot unpack {path} safely; use 3.11.4 or newer, or unpack it yourself"
        )
    try:
        with (
            open_regular(path) as raw,
            tarfile.open(fileobj=raw) as tar,
            _progress(path.name, _size(path)) as tell,
        ):
            for member in iter(tar.next, None):
                if not (member.isfile() and _size(into / member.name) == member.size):
                    tar.extract(member, into, filter="data")
                tar.members.clear()  # type: ignore[attr-defined]  # of 300,000 files they take 300 MB
                tell(raw.tell())
    except (tarfile.TarError, EOFError, zlib.error, ValueError) as error:
        raise DataError(f"{path} cannot be unpacked ({error}); delete it and try again") from None


@contextlib.contextmanager
def _progress(name: str, total: int) -> Iterator[Any]:
    """A function that is told how many bytes are done: a bar on a terminal, else a line for each tenth."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(*Progress.get_default_columns(), console=Console(stderr=True)) as bar:
            task = bar.add_task(printable(name).replace("[", "("), total=total or None)
            yield lambda done: bar.update(task, completed=done)
        return
    told = 0.0

    def tell(done: int) -> None:
        nonlocal told
        if total and done / total >= told + _SHARE:
            told = done / total
            print(printable(f"{name}: {told:.0%}"), flush=True)

    yield tell
