"""One trial in the process of its job: its cores, its pruning, and its end."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType
from typing import IO, Any, Literal

import optuna
from optuna.trial import TrialState

from speechtrain import run_directory
from speechtrain.compute_policy import usable_cpus
from speechtrain.errors import ConfigError, DataError, Diverged, Preempted, SpeechtrainError
from speechtrain.files import open_append, print_line
from speechtrain.run_directory import RunResult
from speechtrain.study.objectives import numbers_of, values_of
from speechtrain.study.store import Outcome, Study

UNMEASURED = "unmeasured"
"""The status of a trial whose result lacks an objective."""

PRUNED = "pruned"
"""The status of a trial that the median rule stopped."""

_POLL = 1.0  # seconds between two looks at a run's validations, or for free cores

Handling = Literal["retry", "prune", "worst"]


@dataclass(frozen=True)
class TrialSettings:
    """The keys of ``hydra.sweeper`` that a trial's job needs."""

    trial: int
    pruner: str | None
    cores: int
    retries: int
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
    """Runs a trial and stores its end in the study."""

    def __init__(self, folder: Path, run_dir: Path, settings: TrialSettings, state_folder: Path) -> None:
        self._study = Study(folder)
        self._study.optuna.pruner = optuna.pruners.MedianPruner()
        self._run_dir = run_dir
        self._state_folder = state_folder
        self._settings = settings
        self._is_stopped = False  # true after the median rule has sent its signal

    def run(self, start: Callable[[], RunResult]) -> RunResult:
        """Run the trial by ``start`` and store its end. Raises the error of ``start``.

        A trial that a signal interrupts stays unfinished, and so does a trial that is to be tried again.
        """
        with _cores(self._settings.cores, self._state_folder), self._pruning():
            try:
                result = start()
            except Preempted:
                if not self._is_stopped:
                    raise
                result = RunResult(PRUNED)
            except SpeechtrainError as error:
                self._store_failure(error)
                raise
        self._store(result)
        return result

    def _store(self, result: RunResult) -> None:
        number = self._settings.trial
        numbers = numbers_of(result)
        if result.status == PRUNED:
            self._study.finish(number, Outcome(PRUNED), state=TrialState.PRUNED)
            return
        try:
            values = values_of(self._study.spec.objectives, numbers)
        except ConfigError as error:
            self._study.finish(number, Outcome(UNMEASURED, numbers, str(error)))
            raise
        if all(map(math.isfinite, values)):
            self._study.finish(number, Outcome(result.status, numbers), values)
        else:
            self._store_failure(Diverged("the objective is not finite"))

    def _store_failure(self, error: SpeechtrainError) -> None:
        number = self._settings.trial
        status = self._status(error)
        handling: Handling = getattr(self._settings, status)
        if handling == "retry" and self._study.attempt(number) <= self._settings.retries:
            print_line(f"trial {number} {status} and is tried again")
            return
        values = self._study.worst_values() if handling == "worst" else None
        state = TrialState.FAIL if handling == "retry" else TrialState.PRUNED
        self._study.finish(number, Outcome(status, error=str(error)), values, state)

    def _status(self, error: SpeechtrainError) -> str:
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
        """Report the run's validations to the study, and stop the run if the median rule says so."""
        if not self._settings.pruner:
            yield
            return
        end = threading.Event()
        earlier_handler = signal.getsignal(signal.SIGTERM)

        def handle(number: int, frame: FrameType | None) -> None:
            # The launcher handles the signal while the run trains. A run that has just ended needs no signal.
            if not self._is_stopped:
                signal.signal(number, earlier_handler)
                os.kill(os.getpid(), number)

        signal.signal(signal.SIGTERM, handle)
        thread = threading.Thread(target=self._report_validations, args=(end,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()
            signal.signal(signal.SIGTERM, earlier_handler)

    def _report_validations(self, end: threading.Event) -> None:
        name = self._study.spec.objectives[0].name
        trial = self._study.open_trial(self._settings.trial)
        count = 0
        while not end.wait(_POLL):
            metrics = self._validations(name)
            for index in range(count, len(metrics)):
                trial.report(metrics[index], index)
            count = len(metrics)
            if trial.should_prune():
                self._is_stopped = True
                os.kill(os.getpid(), signal.SIGTERM)  # The run saves and stops, as if a user stops it.
                return

    def _validations(self, name: str) -> list[float]:
        """Return the metric ``name`` of each validation of the first set."""
        rows = run_directory.read_metrics(self._run_dir).rows
        validations = [row for row in rows if row.get("event") == "valid" and name in row]
        return [float(row[name]) for row in validations if row.get("set") == validations[0].get("set")]


@contextlib.contextmanager
def _cores(count: int, state_folder: Path) -> Iterator[None]:
    """Run on ``count`` cores that no other trial of this host has. Wait for them if there are too few.

    A locked byte of a file in the user's state folder stands for each core. The end of a process frees its
    cores.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = usable_cpus()
    with open_append(state_folder / f"cores-{socket.gethostname()}.lock") as file:
        os.sched_setaffinity(0, _claim_cores(file, cores, min(count, len(cores))))
        try:
            yield
        finally:
            os.sched_setaffinity(0, cores)


def _claim_cores(file: IO[bytes], cores: set[int], count: int) -> set[int]:
    is_announced = False
    while True:
        claimed: set[int] = set()
        for core in sorted(cores):
            if len(claimed) < count:
                with contextlib.suppress(BlockingIOError):
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, core)
                    claimed.add(core)
        if len(claimed) == count:
            return claimed
        fcntl.lockf(file, fcntl.LOCK_UN)
        if not is_announced:
            print_line(f"waiting for {count} free cores. A smaller hydra.sweeper.cores=N helps")
            is_announced = True
        time.sleep(_POLL)
