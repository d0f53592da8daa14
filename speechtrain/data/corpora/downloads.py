"""Archives of public corpora: lhotse downloads them, their checksums are compared, and they are unpacked.

lhotse's download functions unpack an archive before anybody can check it. Its ``safe_extract`` compares the
names of the members, and follows the links among them out of the folder. So an archive is unpacked here, only
after its checksum was the published one, and by Python's filter for data, which refuses such links.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import http.client
import re
import resource
import socket
import tarfile
import urllib.error
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from speechtrain.data.corpora.recipes import import_recipes
from speechtrain.data.prepare.cut_files import check_room
from speechtrain.errors import DISK, ConfigError, DataError, MachineError
from speechtrain.files import absolute_path, open_regular, write_text, writing

_LEAST_BYTES = 2**20  # the download ends after a connection that receives less
_TIMEOUT = 60.0  # the most seconds without a byte


@dataclass
class Archive:
    """A tar archive with parts of a corpus. It needs a published checksum, ``md5`` or ``sha256``."""

    parts: list[str]  # parts of the corpus that the archive has
    gb: float  # size of the archive, in GB
    unpacked_gb: float  # size of its content, in GB
    md5: str = ""  # published checksum
    sha256: str = ""  # published checksum, in place of md5
    into: str = ""  # folder below root for its content. Empty: root
    inner: str = ""  # pattern of archives inside it, which are unpacked in their folders


def fetch(root: Path, url: str, archives: Mapping[str, Archive]) -> None:
    """Download archives to ``root`` and unpack them there, unless they are unpacked already.

    ``archives`` maps the names of the files below ``url``. Nothing is deleted. Raises MachineError if the
    disk has too little space for all archives, before the first byte, and if the server cannot be reached.
    Raises DataError for an archive that the server does not have, that is larger than declared, or whose
    checksum is not the published one.
    """
    root = absolute_path(root)
    if not re.match(r"https?://", url):
        raise ConfigError(f"url={url}: it must start with https:// or http://")
    for name, archive in archives.items():
        folder = absolute_path(root / archive.into)
        is_in_root = folder == root or root in folder.parents
        if not is_in_root or Path(name).name != name or not name.isprintable():
            problem = "it is not the name of a file, or its folder is not below root"
            raise ConfigError(f"archives.{name}: {problem}")
        if not archive.md5 and not archive.sha256:
            raise ConfigError(f"archives.{name}: it needs md5 or sha256, the published checksum")
    missing = {name: archive for name, archive in archives.items() if not _marker(root, name).exists()}
    if not missing:
        return
    needed_bytes = 0.0
    for name, archive in missing.items():
        needed_bytes += (archive.gb + archive.unpacked_gb) * 1e9
        # Bytes that are already downloaded are not counted again.
        needed_bytes -= _size(root / name) + _size(root / f"{name}.part")
    fix = "or use another root="
    print(check_room(root, max(0.0, needed_bytes), "about ", fix), flush=True)
    with writing(root, "use another root="):
        root.mkdir(parents=True, exist_ok=True)
        for name, archive in missing.items():
            path = root / name
            part = root / f"{name}.part"
            if not path.exists():
                _download(f"{url.rstrip('/')}/{name}", part, archive)
                part.rename(path)
            elif difference := _difference(path, archive):
                raise DataError(f"{path}: {difference}. Delete it and try again")
            _unpack(path, root / archive.into, archive.inner)
            write_text(_marker(root, name), "")
            print(f"{path} is unpacked; you can delete it", flush=True)


def _marker(root: Path, name: str) -> Path:
    """Return the path of the empty file that shows that an archive is unpacked."""
    return root / f".{name}.unpacked"


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _download(url: str, path: Path, archive: Archive) -> None:
    """Append to ``path`` until it has the published checksum.

    Raises MachineError if the server cannot be reached, DataError if it refuses, sends too much, or sends
    another file.
    """
    received = _LEAST_BYTES
    while received >= _LEAST_BYTES:
        size_before = _size(path)
        problem = _receive(url, path, archive)
        if problem is None:
            difference = _difference(path, archive)
            if not difference:
                return
        received = _size(path) - size_before
    if problem is not None:
        raise MachineError(f"{url}: {problem}; the same command continues the download")
    raise DataError(f"{path}: {difference}. Try again. If its size stays the same, delete it")


def _receive(url: str, path: Path, archive: Archive) -> Exception | None:
    """Append the bytes of one connection to ``path``. Return what ended it early, if that is known.

    A connection may also end early without an error.
    """
    import_recipes()  # It switches off lhotse's progress bars if stderr is not a terminal.
    from lhotse.utils import resumable_download

    try:
        with _limits(1.25e9 * archive.gb + 2**27):  # The declared size is rounded.
            resumable_download(url, path)
    except urllib.error.HTTPError as error:
        if error.code >= 500:
            return error
        reason = f"{error.code} {error.reason}"
        raise DataError(f"{url}: {reason}. See the corpus's page, or set url=") from None
    except http.client.HTTPException as error:
        return error
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise DataError(f"{url} has more than the declared size. See the corpus's page") from None
        if error.errno in DISK or error.filename:
            raise
        return error
    return None


@contextlib.contextmanager
def _limits(most_bytes: float) -> Iterator[None]:
    """Return a context in which no file exceeds ``most_bytes``, and no connection is silent for a minute.

    lhotse has neither limit. A write beyond the first one raises OSError with EFBIG.
    """
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    timeout = socket.getdefaulttimeout()
    limit = int(most_bytes)
    if hard_limit != resource.RLIM_INFINITY:
        limit = min(limit, hard_limit)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard_limit))
    socket.setdefaulttimeout(_TIMEOUT)
    try:
        yield
    finally:
        socket.setdefaulttimeout(timeout)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft_limit, hard_limit))


def _difference(path: Path, archive: Archive) -> str:
    """Return how the checksum of a file differs from the published one, or an empty text."""
    for kind, published in (("md5", archive.md5), ("sha256", archive.sha256)):
        if not published:
            continue
        with open_regular(path) as file:
            new = partial(hashlib.new, kind, usedforsecurity=False)
            checksum = hashlib.file_digest(file, new).hexdigest()
        if checksum != published:
            return f"its {kind} is {checksum}, published is {published}"
    return ""


def _unpack(path: Path, folder: Path, inner: str) -> None:
    """Unpack an archive in ``folder``, and then the archives in it that match the pattern ``inner``.

    Raises DataError for another file or a member that leaves the folder, MachineError for an old Python.
    """
    if not hasattr(tarfile, "data_filter"):
        raise MachineError(f"this Python cannot unpack {path}. Use 3.11.4 or newer, or unpack it yourself")
    try:
        with tarfile.open(path) as tar:
            tar.extractall(folder, filter="data")
    except tarfile.TarError as error:
        raise DataError(f"{path} cannot be unpacked ({error})") from None
    if inner:
        for archive in sorted(folder.glob(inner)):
            _unpack(archive, archive.parent, "")
