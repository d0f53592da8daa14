"""Copies recordings to a local disk before they are used. The copies only save time.

A stage is the folder of these copies (``data.stage``). Loaders read a copy instead of the original if the
copy has the same size and modification time.
"""

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
"""The most micro-batches by which the copying is ahead of the loading."""

_RESERVED_BYTES = 2**30  # bytes of the disk that stay free
_BLOCK = 2**22  # bytes that are copied between two checks whether the copying has ended
_END_SECONDS = 10.0  # the time that close() waits for a disk that does not respond

Item = TypeVar("Item")
PathFinder = Callable[[], Iterable[str]]
"""A function that returns the paths of a batch's recordings.

The thread that copies calls it, because reading the cuts of a batch takes time.
"""

_stage_folder: ContextVar[str] = ContextVar("stage", default="")


@contextlib.contextmanager
def use_stage(folder: str) -> Iterator[None]:
    """Return a context in which ``open_staged`` prefers the copies in ``folder``, unless it is ""."""
    token = _stage_folder.set(folder)
    try:
        yield
    finally:
        _stage_folder.reset(token)


def open_staged(path: str) -> BufferedReader:
    """Open a regular file, or its copy in the stage if the copy is current.

    Raises the errors of ``open_regular``.
    """
    folder = _stage_folder.get()
    if folder:
        # If the copy cannot be opened, the original is opened below.
        with contextlib.suppress(OSError, ValueError):
            copy = _copy_path(path, folder)
            if _is_current(copy, os.stat(path)):
                return open_regular(copy, follow=False)
    return open_regular(path)


def _copy_path(path: str, folder: str) -> Path:
    """Return the path that the copy of a file has in ``folder``, whether it exists or not."""
    digest = hashlib.sha256(os.fsencode(os.path.abspath(path))).hexdigest()
    # Copies are divided among 256 folders, because one folder with a million files would be slow.
    return Path(folder, digest[:2], digest[2:42])


def _size_and_time(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def _is_current(copy: Path, status: os.stat_result) -> bool:
    """Return whether ``copy`` exists with the size and time of the original file's ``status``."""
    return copy.is_file() and _size_and_time(copy.stat()) == _size_and_time(status)


class _NotCopied(Exception):
    """A file could not be copied completely, or changed while it was copied."""


class Stager:
    """Copies recordings into ``folder`` in a thread.

    The thread first copies the recordings of the next micro-batches. When it has copied them, it copies the
    files that ``later_finders`` return.

    Several processes may use one folder. A process locks the subfolder into which it copies, and other
    processes skip the files of that subfolder. A copy gets its final name when it is complete and on the
    disk. A full disk ends the copying with one warning.
    """

    def __init__(self, folder: str, later_finders: Iterator[PathFinder]) -> None:
        self.folder, self._later_finders = folder, later_finders
        # The number of a micro-batch and its finder. None ends the thread.
        self._queue: SimpleQueue[tuple[int, PathFinder] | None] = SimpleQueue()
        self._yielded = 0  # micro-batches that have been yielded. To copy their files would be too late.
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stage", daemon=True)
        self._thread.start()

    def copy_ahead(
        self, planned: Iterator[Item], files: Callable[[Item], Iterable[str]], most_ahead: int
    ) -> Iterator[Item]:
        """Yield the items of ``planned``, and copy the files of up to ``most_ahead`` following items.

        ``files`` returns the paths of an item.
        """
        following = deque[Item]()
        try:
            for number in count():
                for item in islice(planned, most_ahead - len(following)):
                    if not self._ended.is_set():
                        self._queue.put((number + len(following), partial(files, item)))
                    following.append(item)
                if not following:
                    return
                self._yielded = number + 1
                yield following.popleft()
        finally:
            self.close()

    def close(self) -> None:
        """End the thread. An incomplete copy is removed."""
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
        except DataError:  # The manifest has changed. The loader reports this error.
            return
        except OSError as error:
            message = "data.stage: %s takes no more copies (%s). Other recordings are read without copies"
            _log.warning(message, self.folder, error.strerror or error)
        finally:
            self._ended.set()

    def _next_finder(self) -> PathFinder | None:
        """Wait for the next finder of files to copy. Return None when the thread should end."""
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
        """Copy a file, unless it has a current copy or another process copies into its subfolder.

        Raises OSError only if the disk of the copies fails. A file that cannot be read is not copied, and the
        loader reports its error.
        """
        copy = _copy_path(path, self.folder)
        with contextlib.ExitStack() as stack:
            try:
                status = os.stat(path)
                if _is_current(copy, status):
                    return
                source = stack.enter_context(open_regular(path))
            except (OSError, ValueError):
                return
            copy.parent.mkdir(0o700, parents=True, exist_ok=True)
            lock = stack.enter_context(open_append(copy.parent / ".lock"))
            # flock raises BlockingIOError if another process holds the lock.
            stack.enter_context(contextlib.suppress(BlockingIOError, _NotCopied))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_current(copy, status):
                return
            remove_temporaries(copy.parent)
            if shutil.disk_usage(copy.parent).free < status.st_size + _RESERVED_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            with atomic(copy, private=True) as temporary:
                self._write(source, temporary, status)
            # On a disk that cannot store the time, every start would copy the file again.
            if not _is_current(copy, status):
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
        has_changed = _size_and_time(os.fstat(source.fileno())) != _size_and_time(status)
        if missing_bytes or has_changed:
            raise _NotCopied
        os.utime(temporary, ns=(status.st_atime_ns, status.st_mtime_ns))
