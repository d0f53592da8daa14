"""Copies of recordings on a local disk, made ahead of their use. Results do not depend on them."""

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

MOST_AHEAD = 1_000
"""Most micro-batches between the one that is loaded and the one whose recordings are copied."""

_ROOM = 2**30  # bytes of the disk that stay free
_BLOCK = 2**22  # bytes that are copied between two checks for the end
_END_SECONDS = 10.0  # how long close() waits for a disk that does not answer

Item = TypeVar("Item")
PathFinder = Callable[[], Iterable[str]]
"""A function that finds paths. It is called late, because reading the cuts of a micro-batch takes time."""

_stage_folder: ContextVar[str] = ContextVar("stage", default="")


@contextlib.contextmanager
def use_stage(folder: str) -> Iterator[None]:
    """Return a context in which ``open_staged`` prefers the copies in ``folder``."""
    token = _stage_folder.set(folder)
    try:
        yield
    finally:
        _stage_folder.reset(token)


def open_staged(path: str) -> BufferedReader:
    """Open a regular file, or its copy if the copy has the same size and time.

    Raises the errors of ``open_regular``.
    """
    folder = _stage_folder.get()
    if folder:
        with contextlib.suppress(OSError, ValueError):
            copy = _copy_of(path, folder)
            if _is_copy(copy, os.stat(path)):
                return open_regular(copy, follow=False)
    return open_regular(path)


def _copy_of(path: str, folder: str) -> Path:
    name = hashlib.sha256(os.fsencode(os.path.abspath(path))).hexdigest()
    return Path(folder, name[:2], name[2:42])  # One folder of a million files would be slow.


def _stamp(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def _is_copy(copy: Path, status: os.stat_result) -> bool:
    """Return whether ``copy`` is a file with the size and time of ``status``."""
    return copy.is_file() and _stamp(copy.stat()) == _stamp(status)


class _NotCopied(Exception):
    """A file could not be copied completely, or changed during the copy."""


class Stager:
    """Copies recordings into ``folder`` in a thread.

    It copies the recordings of the next micro-batches. If they have copies, it copies the files that
    ``later_finders`` find.

    Several processes may use one folder. A process locks the part of the folder into which it copies, and the
    others skip the files of that part. A copy gets its name when it is complete and on the disk. A full disk
    ends the copying with one warning.
    """

    def __init__(self, folder: str, later_finders: Iterator[PathFinder]) -> None:
        self.folder, self._later_finders = folder, later_finders
        self._queue: SimpleQueue[tuple[int, PathFinder] | None] = SimpleQueue()  # batch numbers and finders
        self._yielded = 0  # micro-batches whose loading has begun, so that a copy comes too late
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stage", daemon=True)
        self._thread.start()

    def copy_ahead(
        self, planned: Iterator[Item], files: Callable[[Item], Iterable[str]], most_ahead: int
    ) -> Iterator[Item]:
        """Yield each of ``planned``, and copy the ``files`` of up to ``most_ahead`` that follow."""
        window = deque[Item]()
        try:
            for number in count():
                for item in islice(planned, most_ahead - len(window)):
                    if not self._ended.is_set():
                        self._queue.put((number + len(window), partial(files, item)))
                    window.append(item)
                if not window:
                    return
                self._yielded = number + 1
                yield window.popleft()
        finally:
            self.close()

    def close(self) -> None:
        """End the copying. An incomplete copy is removed."""
        self._ended.set()
        self._queue.put(None)
        self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        try:
            for finder in iter(self._next_finder, None):
                for path in finder():
                    if self._ended.is_set():
                        return
                    self._copy(file_of(path))
        except DataError:  # The manifest has changed, which the loader reports.
            return
        except OSError as error:
            message = "data.stage: %s takes no more copies (%s). Other recordings are read without copies"
            _log.warning(message, self.folder, error.strerror or error)
        finally:
            self._ended.set()

    def _next_finder(self) -> PathFinder | None:
        """Wait for the next finder of files to copy. Returns None at the end."""
        while True:
            try:
                numbered_finder = self._queue.get_nowait()
            except Empty:
                later_finder = next(self._later_finders, None)
                if later_finder is not None:
                    return later_finder
                numbered_finder = self._queue.get()
            if numbered_finder is None:
                return None
            number, finder = numbered_finder
            if number >= self._yielded:
                return finder

    def _copy(self, path: str) -> None:
        """Copy a file, unless it has a copy or another process copies it.

        Raises OSError only if the disk of the copies fails.
        """
        copy = _copy_of(path, self.folder)
        with contextlib.ExitStack() as stack:
            try:
                status = os.stat(path)
                if _is_copy(copy, status):
                    return
                source = stack.enter_context(open_regular(path))
            except (OSError, ValueError):  # The loader reports the error.
                return
            copy.parent.mkdir(0o700, parents=True, exist_ok=True)
            lock = stack.enter_context(open_append(copy.parent / ".lock"))
            # BlockingIOError: another process holds the lock.
            stack.enter_context(contextlib.suppress(BlockingIOError, _NotCopied))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_copy(copy, status):
                return
            remove_temporaries(copy.parent)
            if shutil.disk_usage(copy.parent).free < status.st_size + _ROOM:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            with atomic(copy, private=True) as temporary:
                self._write(source, temporary, status)
            if not _is_copy(copy, status):  # Every start would copy the file again.
                raise OSError(errno.EINVAL, "it does not keep the time of a file")

    def _write(self, source: IO[bytes], temporary: Path, status: os.stat_result) -> None:
        """Copy ``source`` to ``temporary``, with the times of ``status``.

        Raises _NotCopied if the copy is incomplete, or if the file has changed since ``status`` was read.
        """
        missing_bytes = status.st_size
        with temporary.open("wb") as target:
            while missing_bytes and not self._ended.is_set():
                try:
                    block = source.read(min(missing_bytes, _BLOCK))
                except OSError:
                    block = b""
                if not block:
                    break
                missing_bytes -= target.write(block)
        if missing_bytes or _stamp(os.fstat(source.fileno())) != _stamp(status):
            raise _NotCopied
        os.utime(temporary, ns=(status.st_atime_ns, status.st_mtime_ns))
