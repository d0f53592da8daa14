"""Locks on the files of a study: optuna's journal, and the claims of its trials.

Several commands may use the same study at the same time.
"""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path
from types import TracebackType
from typing import IO

from speechtrain.files import open_append

JOURNAL = "study.journal"
"""The trials of a study, one record in each line."""
LOCK = "study.lock"
CLAIMS = "study.claims"


class JournalLock:
    """The lock of a journal, with optuna's interface. The same thread may acquire it several times.

    - The end of a process releases its lock. optuna's own locks would stay, and the next command would wait
      for 30 s.
    - A killed process may leave an incomplete line in the journal, to which optuna would append the next
      record. This lock removes the line when it is acquired.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._thread_lock = threading.RLock()
        self._depth = 0  # how often the thread has acquired the lock and not released it
        self._file: IO[bytes] | None = None  # the locked file, which excludes other processes

    def acquire(self) -> bool:
        self._thread_lock.acquire()
        self._depth += 1
        if self._depth == 1:
            self._file = open_append(self._folder / LOCK)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            _remove_incomplete_line(self._folder / JOURNAL)
        return True

    def release(self) -> None:
        self._depth -= 1
        if self._depth == 0 and self._file is not None:
            self._file.close()
        self._thread_lock.release()

    def __enter__(self) -> JournalLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _remove_incomplete_line(journal: Path) -> None:
    """Remove the text after the last line end of a file."""
    if not journal.exists() or journal.stat().st_size == 0:
        return
    with open_append(journal) as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.seek(0)
            size = file.read().rfind(b"\n") + 1
            file.truncate(size)


class Claims:
    """The trials that this process runs. A claim of trial N is a lock on byte N of one file.

    The end of the process releases its claims, also on NFS. A process must use one such object for each
    study, because closing the file anywhere in the process releases all its locks.
    """

    def __init__(self, folder: Path) -> None:
        self._file = open_append(folder / CLAIMS)
        self._numbers: set[int] = set()

    def claim(self, number: int) -> bool:
        """Claim a trial. Return False if this or another process has already claimed it."""
        if number in self._numbers:
            return False
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        except BlockingIOError:
            return False
        self._numbers.add(number)
        return True

    def release(self, number: int) -> None:
        """Release the claim of a trial."""
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, number)
        self._numbers.discard(number)
