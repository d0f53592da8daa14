"""One trial of a study, in the process of its job: reserve cores, train, and stop by the median rule."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import IO, Any

from speechtrain.compute_policy import usable_cpus
from speechtrain.errors import MachineError, Preempted, SpeechtrainError
from speechtrain.files import open_append, print_line
from speechtrain.run_directory import RunLock, RunResult, read_validations
from speechtrain.study.store import Study

PRUNED = "pruned"
"""The status of a trial that the median rule stopped."""
_POLL_SECONDS = 1.0  # between two checks of a run's validations, or for free cores


def run_trial(start: Callable[[], RunResult], folder: Path, run_dir: Path, sweeper: Any) -> RunResult:
    """Call ``start``, which trains a trial of the study in ``folder``, and return its result.

    ``sweeper`` is the node ``hydra.sweeper``. If another process trains the trial, such as a job of a killed
    command, wait for its end, after which ``start`` continues the run or returns its result.
    """
    lock = RunLock(run_dir)
    lock.wait()
    with _cores(sweeper.cores):
        while True:
            try:
                if sweeper.pruner:
                    return _with_median_rule(start, Study(folder), run_dir, sweeper.trial)
                return start()
            except Preempted:
                raise
            except SpeechtrainError:
                if not lock.wait():  # Otherwise the other process began at the same time.
                    raise


def _with_median_rule(start: Callable[[], RunResult], study: Study, run_dir: Path, trial: int) -> RunResult:
    """Call ``start`` while the run's validations are reported to the study, and return its result.

    If the median rule decides against the trial, a SIGTERM to this process stops the run. It saves and stops
    as for a user's signal, and the result has the status PRUNED.
    """
    has_ended = threading.Event()
    is_pruned = threading.Event()
    earlier_handler = signal.getsignal(signal.SIGTERM)

    def report_validations() -> None:
        metric = study.spec.objectives[0].name
        while not has_ended.wait(_POLL_SECONDS):
            if study.report(trial, read_validations(run_dir, metric)):
                is_pruned.set()
                os.kill(os.getpid(), signal.SIGTERM)
                return

    def handle(number: int, frame: FrameType | None) -> None:
        # While the run trains, the launcher's handler replaces this one. So this handler only gets a signal
        # that comes before or after the training. If the signal is from the median rule, the run has ended
        # already, and the signal is ignored. Any other signal goes to the earlier handler.
        if not is_pruned.is_set():
            signal.signal(number, earlier_handler)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, handle)
    thread = threading.Thread(target=report_validations, daemon=True)
    thread.start()
    try:
        return start()
    except Preempted:
        if not is_pruned.is_set():
            raise
        return RunResult(PRUNED)
    finally:
        has_ended.set()
        thread.join()
        signal.signal(signal.SIGTERM, earlier_handler)


@contextlib.contextmanager
def _cores(count: int) -> Iterator[None]:
    """Return a context in which this process runs on ``count`` logical CPUs.

    No other trial of this user on this host uses these CPUs. The context waits until enough CPUs are free. A
    CPU is reserved by a lock on its byte of a file, so the end of a process frees its CPUs.
    """
    if not hasattr(os, "sched_setaffinity"):  # The system is not Linux.
        yield
        return
    cpus = usable_cpus()
    with _open_cores_file() as file:
        claimed_cpus = _claim_cpus(file, cpus, min(count, len(cpus)))
        os.sched_setaffinity(0, claimed_cpus)
        try:
            yield
        finally:
            os.sched_setaffinity(0, cpus)


def _open_cores_file() -> IO[bytes]:
    """Open the file whose locks reserve CPUs, in the folder for temporary files, which is on this host.

    Raises MachineError if the file belongs to another user, who could keep its locks.
    """
    path = Path(tempfile.gettempdir(), f"speechtrain-cores-{os.getuid()}-{socket.gethostname()}.lock")
    try:
        file = open_append(path)
        os.fchmod(file.fileno(), 0o600)
        os.utime(file.fileno())  # Systems remove old files of this folder.
        problem = ""
        if os.fstat(file.fileno()).st_uid != os.getuid():
            problem = "it belongs to another user"
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        raise MachineError(f"{path}: {problem}. Remove it, or set TMPDIR to another folder")
    return file


def _claim_cpus(file: IO[bytes], cpus: set[int], count: int) -> set[int]:
    """Wait until ``count`` of ``cpus`` are free, lock their bytes of ``file``, and return their numbers."""
    is_announced = False
    while True:
        claimed: set[int] = set()
        for cpu in sorted(cpus):
            if len(claimed) < count:
                with contextlib.suppress(BlockingIOError):
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, cpu)
                    claimed.add(cpu)
        if len(claimed) == count:
            return claimed
        # Two waiting trials that each keep some CPUs could wait forever.
        fcntl.lockf(file, fcntl.LOCK_UN)
        if not is_announced:
            print_line(f"waiting for {count} free cores. A smaller hydra.sweeper.cores=N helps")
            is_announced = True
        time.sleep(_POLL_SECONDS)
