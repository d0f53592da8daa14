"""The files of a study that several commands share: optuna's journal and the claims of its trials."""

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
    """The lock of a journal. A thread may acquire it again, and the end of its process releases it.

    optuna's own locks outlive a killed process, and the next command would wait for 30 s. A killed process
    may also leave a part of a line, to which optuna would append. The lock removes this part.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._thread = threading.RLock()
        self._depth = 0
        self._file: IO[bytes] | None = None

    def acquire(self) -> bool:
        self._thread.acquire()
        self._depth += 1
        if self._depth == 1:
            self._file = open_append(self._folder / LOCK)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            _remove_torn_line(self._folder / JOURNAL)
        return True

    def release(self) -> None:
        self._depth -= 1
        if self._depth == 0 and self._file is not None:
            self._file.close()
        self._thread.release()

    def __enter__(self) -> JournalLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _remove_torn_line(journal: Path) -> None:
    if not journal.exists() or journal.stat().st_size == 0:
        return
    with open_append(journal) as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)


class Claims:
    """The trials that this process runs, as locked bytes of one file. Its end releases them, on NFS, too.

    A process keeps one such object for each study, because closing the file anywhere in the process
    releases its locks.
    """

    def __init__(self, folder: Path) -> None:
        self._file = open_append(folder / CLAIMS)
        self._numbers: set[int] = set()

    def claim(self, number: int) -> bool:
        """Claim a trial. Return False if this process or another one has claimed it."""
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
