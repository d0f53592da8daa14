"""Copies of recordings on a local disk, made ahead of their use; what is read does not depend on them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from functools import partial
from io import BufferedReader
from itertools import count, islice
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, TypeVar

from speechtrain.data.tar_members import file_of
from speechtrain.errors import DataError
from speechtrain.files import atomic, open_append, open_regular, remove_temporaries

_log = logging.getLogger(__name__)

AHEAD = 1_000
"""Most micro-batches between the one that is loaded and the one whose recordings are copied."""

_ROOM = 2**30  # bytes of the disk that are left to others
_BLOCK = 2**22  # bytes that are copied between two looks at the end
_END_SECONDS = 10.0  # how long close() waits for a disk that does not answer

Item = TypeVar("Item")
Paths = Callable[[], Iterable[str]]
"""Finds paths when it is called: reading the cuts of a micro-batch takes time."""

_folder: ContextVar[str] = ContextVar("stage", default="")


@contextlib.contextmanager
def reading_from(folder: str) -> Iterator[None]:
    """A context in which ``open_near`` prefers the copies in ``folder``."""
    token = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(token)


def open_near(path: str) -> BufferedReader:
    """Open a regular file: its copy if there is one of equal size and time. Raises as ``open_regular``."""
    if folder := _folder.get():
        with contextlib.suppress(OSError, ValueError):
            if _is_copy(copy := _copy_of(path, folder), os.stat(path)):
                return open_regular(copy, follow=False)
    return open_regular(path)


def _copy_of(path: str, folder: str) -> Path:
    name = hashlib.sha256(os.fsencode(os.path.abspath(path))).hexdigest()
    return Path(folder, name[:2], name[2:42])  # a folder of a million files is slow


def _stamp(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def _is_copy(copy: Path, status: os.stat_result) -> bool:
    """Whether there is a copy of the size and time of ``status``."""
    return copy.is_file() and _stamp(copy.stat()) == _stamp(status)


class _NotNow(Exception):
    """A file cannot be copied completely."""


class Stager:
    """Copies recordings into ``folder`` in a thread: of micro-batches to come, else those of ``later``.

    Several processes may use one folder: who copies locks a part of it, and the others pass. A copy gets its
    name when it is complete and on the disk. A disk that is full ends the copying with one warning.
    """

    def __init__(self, folder: str, later: Iterator[Paths]) -> None:
        self.folder, self._later = folder, later
        self._coming: SimpleQueue[tuple[int, Paths] | None] = SimpleQueue()
        self._given = 0  # micro-batches that are loaded: too late for theirs
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stage", daemon=True)
        self._thread.start()

    def ahead(
        self, planned: Iterator[Item], files: Callable[[Item], Iterable[str]], most: int
    ) -> Iterator[Item]:
        """Yield ``planned`` as it is, and copy the ``files`` of up to ``most`` that follow."""
        window = deque[Item]()
        try:
            for number in count():
                for item in islice(planned, most - len(window)):
                    if not self._ended.is_set():
                        self._coming.put((number + len(window), partial(files, item)))
                    window.append(item)
                if not window:
                    return
                self._given = number + 1
                yield window.popleft()
        finally:
            self.close()

    def close(self) -> None:
        """End the copying; a file that is not complete is removed."""
        self._ended.set()
        self._coming.put(None)
        self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        try:
            for files in iter(self._next, None):
                for path in files():
                    if self._ended.is_set():
                        return
                    self._copy(file_of(path))
        except DataError:  # the manifest has changed, which the loader reports
            return
        except OSError as error:
            told = "data.stage: %s takes no more copies (%s); other recordings are read where they are"
            _log.warning(told, self.folder, error.strerror or error)
        finally:
            self._ended.set()

    def _next(self) -> Paths | None:
        while True:
            try:
                found = self._coming.get_nowait()
            except Empty:
                if files := next(self._later, None):
                    return files
                found = self._coming.get()
            if found is None or found[0] >= self._given:
                return found and found[1]

    def _copy(self, path: str) -> None:
        """Copy a file that has no copy yet, and that nobody else copies. Raises OSError of the disk only."""
        copy = _copy_of(path, self.folder)
        with contextlib.ExitStack() as stack:
            try:
                status = os.stat(path)
                if _is_copy(copy, status):
                    return
                source = stack.enter_context(open_regular(path))
            except (OSError, ValueError):  # the loader reports it
                return
            copy.parent.mkdir(0o700, parents=True, exist_ok=True)
            lock = stack.enter_context(open_append(copy.parent / ".lock"))
            stack.enter_context(contextlib.suppress(BlockingIOError, _NotNow))  # others may copy it
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_copy(copy, status):
                return
            remove_temporaries(copy.parent)
            if shutil.disk_usage(copy.parent).free < status.st_size + _ROOM:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            with atomic(copy, private=True) as temporary:
                self._write(source, temporary, status)
            if not _is_copy(copy, status):  # it would be copied again and again
                raise OSError(errno.EINVAL, "it does not keep the time of a file")

    def _write(self, source: IO[bytes], temporary: Path, status: os.stat_result) -> None:
        """Write all of ``source``, and its time. Raises _NotNow if that is not possible, or it changes."""
        left = status.st_size
        with temporary.open("wb") as target:
            while left and not self._ended.is_set():
                try:
                    block = source.read(min(left, _BLOCK))
                except OSError:
                    block = b""
                if not block:
                    break
                left -= target.write(block)
        if left or _stamp(os.fstat(source.fileno())) != _stamp(status):
            raise _NotNow
        os.utime(temporary, ns=(status.st_atime_ns, status.st_mtime_ns))
