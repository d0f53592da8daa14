"""One trial of a study, in the process of its job: reserve cores, train, prune, and store the outcome."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType
from typing import IO, Any, Literal

from optuna.trial import TrialState

from speechtrain import run_directory
from speechtrain.compute_policy import usable_cpus
from speechtrain.errors import (
    ConfigError,
    DataError,
    Diverged,
    MachineError,
    Preempted,
    RunError,
    SpeechtrainError,
)
from speechtrain.files import print_line
from speechtrain.run_directory import RunLock, RunResult, Validations
from speechtrain.study.objectives import check_direction, numbers_of, values_of
from speechtrain.study.store import Outcome, Study

UNMEASURED = "unmeasured"
"""The status of a trial whose result lacks an objective."""

PRUNED = "pruned"
"""The status of a trial that the median rule stopped."""

_UNLESS_STORED = contextlib.suppress(RunError)
"""A context to store the end of a trial, which does nothing if another process has stored it."""

_POLL_SECONDS = 1.0  # between two checks of a run's validations, or for free cores

Handling = Literal["retry", "prune", "worst"]
"""What happens after a failure: the trial runs again, has no values, or gets the worst values so far."""


@dataclass(frozen=True)
class TrialSettings:
    """The keys of ``hydra.sweeper`` that a trial's job needs."""

    trial: int  # the number of the trial
    pruner: str | None
    cores: int  # the number of logical CPUs on which the trial may compute
    retries: int
    # How each kind of failure is handled.
    failed: Handling
    refused: Handling
    diverged: Handling
    out_of_memory: Handling

    def __post_init__(self) -> None:
        for key in ("failed", "refused", "diverged", "out_of_memory"):
            if getattr(self, key) not in Handling.__args__:  # type: ignore[attr-defined]
                raise ConfigError(f"hydra.sweeper.{key} is {getattr(self, key)}: it is retry, prune or worst")
        if self.pruner not in (None, "median"):
            raise ConfigError(f"hydra.sweeper.pruner is {self.pruner}: it is median or null")


def trial_settings(sweeper: Mapping[str, Any]) -> TrialSettings:
    """Return the settings of a trial from ``hydra.sweeper``. Raises ConfigError."""
    return TrialSettings(**{field.name: sweeper[field.name] for field in fields(TrialSettings)})


class TrialJob:
    """Runs a trial and stores its outcome in the study."""

    def __init__(self, folder: Path, run_dir: Path, settings: TrialSettings) -> None:
        self._study = Study(folder)
        self._run_dir = run_dir
        self._settings = settings
        self._is_pruned = False  # whether the median rule has stopped the run

    def run(self, start: Callable[[], RunResult]) -> RunResult:
        """Call ``start``, which trains the trial, and store the outcome. Return the result of ``start``.

        Errors of ``start`` are raised again. A trial that a signal interrupts stays unfinished, and so does a
        trial that will run again. If a process of an earlier command still trains the trial, wait for its
        end, after which ``start`` continues the run or returns its result.
        """
        RunLock(self._run_dir).wait()
        with _cores(self._settings.cores):
            result = self._train(start)
        with _UNLESS_STORED:
            self._store(result)
        return result

    def _train(self, start: Callable[[], RunResult]) -> RunResult:
        """Call ``start``, store its failure, and return its result."""
        try:
            with self._pruning():
                return start()
        except Preempted:
            if not self._is_pruned:
                raise
            return RunResult(PRUNED)
        except SpeechtrainError as error:
            if RunLock(self._run_dir).wait():  # Another process began with the run at the same time.
                return self._train(start)
            with _UNLESS_STORED:
                self._store_failure(error)
            raise

    def _store(self, result: RunResult) -> None:
        """Store the outcome of a run that has ended without an error."""
        trial = self._settings.trial
        numbers = numbers_of(result)
        if result.status == PRUNED:
            self._study.finish(trial, Outcome(PRUNED), state=TrialState.PRUNED)
            return
        try:
            check_direction(self._study.spec.objectives, result)
            values = values_of(self._study.spec.objectives, numbers)
        except ConfigError as error:
            self._study.finish(trial, Outcome(UNMEASURED, numbers, str(error)))
            raise
        if all(map(math.isfinite, values)):
            self._study.finish(trial, Outcome(result.status, numbers), values)
        else:
            self._store_failure(Diverged("the objective is not finite"))

    def _store_failure(self, error: SpeechtrainError) -> None:
        """Store the outcome of a run that has failed, unless the trial will run again."""
        trial = self._settings.trial
        status = self._failure_status(error)
        handling: Handling = getattr(self._settings, status)
        if handling == "retry" and self._study.attempt(trial) <= self._settings.retries:
            print_line(f"trial {trial} {status} and is tried again")
            return
        values = self._study.worst_values() if handling == "worst" else None
        # ``finish`` uses the state only if ``values`` is None. A trial with values is complete.
        state = TrialState.FAIL if handling == "retry" else TrialState.PRUNED
        self._study.finish(trial, Outcome(status, error=str(error)), values, state)

    def _failure_status(self, error: SpeechtrainError) -> str:
        """Return the kind of a failure, which is also the key of ``hydra.sweeper`` for its handling."""
        failure = run_directory.read_failure(self._run_dir)
        if failure is not None and failure.is_out_of_memory:
            return "out_of_memory"
        if isinstance(error, Diverged):
            return "diverged"
        if isinstance(error, ConfigError | DataError):
            return "refused"
        return "failed"

    @contextlib.contextmanager
    def _pruning(self) -> Iterator[None]:
        """Return a context in which the run's validations are reported to the study.

        If the median rule decides against the trial, the run is stopped by a SIGTERM to this process.
        """
        if not self._settings.pruner:
            yield
            return
        has_ended = threading.Event()
        earlier_handler = signal.getsignal(signal.SIGTERM)

        def handle(number: int, frame: FrameType | None) -> None:
            # While the run trains, the launcher's handler replaces this one. So this handler only gets a
            # signal that comes before or after the training. If the signal is from the median rule, the run
            # has ended already, and the signal is ignored. Any other signal goes to the earlier handler.
            if not self._is_pruned:
                signal.signal(number, earlier_handler)
                os.kill(os.getpid(), number)

        signal.signal(signal.SIGTERM, handle)
        thread = threading.Thread(target=self._report_validations, args=(has_ended,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            has_ended.set()
            thread.join()
            signal.signal(signal.SIGTERM, earlier_handler)

    def _report_validations(self, has_ended: threading.Event) -> None:
        """Report new validations to the study until the run has ended or the median rule stops it."""
        validations = Validations(self._run_dir, self._study.spec.objectives[0].name)
        while not has_ended.wait(_POLL_SECONDS):
            if self._study.report(self._settings.trial, validations.read()):
                self._is_pruned = True
                os.kill(os.getpid(), signal.SIGTERM)  # The run saves and stops, as for a user's signal.
                return


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
    problem = f"{path} belongs to another user"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        if os.fstat(descriptor).st_uid == os.getuid():
            os.utime(descriptor)  # Systems remove old files of this folder.
            return os.fdopen(descriptor, "r+b")
        os.close(descriptor)
    except OSError as error:
        problem = f"{path}: {error.strerror}"
    raise MachineError(f"{problem}. Remove it, or set TMPDIR to another folder")


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
