"""Data workers: processes that load planned micro-batches ahead and return them in order.

torch's DataLoader is not used for four reasons. Its workers belong to one data set, so training and
validation would each start their own (3 s). It draws from the global generator. It detects a dead
worker only after a timeout. It does not report which recordings a stuck worker was loading.
"""

from __future__ import annotations

import atexit
import logging
import math
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util  # its exit handler must be registered before ours
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.multiprocessing  # makes pickling send large tensors by shared memory
from torch import Tensor

from speechtrain.batch import Batch
from speechtrain.compute_policy import usable_cpus
from speechtrain.data.loader import BatchLoader
from speechtrain.data.sampler import MicroBatch
from speechtrain.errors import MachineError, Preempted, SpeechtrainError
from speechtrain.launcher import is_number

Loader = Callable[[MicroBatch], Batch]

_log = logging.getLogger(__name__)

_AHEAD = 2  # most micro-batches in flight per worker
_FOR_ALL = 0  # instead of a ticket
_SMALL_BYTES = 2**20  # a smaller tensor is sent through the pipe
_GRACE_SECONDS = 60  # how long a worker runs after a SIGTERM to its process group
_STOP_SECONDS = 10.0  # how long a stop request waits for the batch that ends the step
_SLICE_SECONDS = 0.5  # between two looks at a stop request
_NAMED = 3  # most recordings in a message


class Workers(ABC):
    """Loads planned micro-batches, in this process or in others."""

    stop_requested: Callable[[], bool] = staticmethod(lambda: False)
    """Whether the run has been asked to stop."""

    @abstractmethod
    def map(self, loader: Loader, planned: Iterator[MicroBatch]) -> Iterator[Batch]:
        """Yield ``loader`` of each planned micro-batch, in order. Raises what ``loader`` raises."""

    def close(self) -> None:  # noqa: B027 - empty by default
        """Stop the workers."""


class InProcess(Workers):
    """Loads in this process, on demand."""

    def map(self, loader: Loader, planned: Iterator[MicroBatch]) -> Iterator[Batch]:
        return map(loader, planned)


@dataclass
class _Worker:
    """A process and its link. Threads send and receive: the trainer never waits for half a message."""

    process: Any  # BaseProcess of the start method
    link: Connection
    known: set[int] = field(default_factory=set)  # numbers of the loaders that it has received
    requests: SimpleQueue[Any] = field(default_factory=SimpleQueue)
    answers: SimpleQueue[Any] = field(default_factory=SimpleQueue)

    def connect(self) -> None:
        """Start the two threads; they end with the link."""
        for work in (self._send, self._receive):
            threading.Thread(target=work, daemon=True).start()

    def _send(self) -> None:
        while True:
            try:
                self.link.send(self.requests.get())
            except OSError:  # the worker is dead, which the other thread reports
                return
            except Exception as error:  # the loader cannot be pickled
                self.answers.put((_FOR_ALL, error))

    def _receive(self) -> None:
        try:
            while True:
                self.answers.put(self.link.recv())
        except Exception as error:  # the worker is dead, also while its shared memory is opened
            self.answers.put((_FOR_ALL, error))

    def hang_up(self) -> None:
        """End the link, which the worker and both threads notice; close() would not wake a thread."""
        with socket.socket(fileno=os.dup(self.link.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)
        self.requests.put(None)


class Processes(Workers):
    """Loads ahead in ``count`` processes.

    A fork server starts them in the background. It has no threads, and the workers inherit no
    threads, devices or sockets of this process. Until they are ready, this process loads. Each
    worker uses one thread, ignores Ctrl-C, ends when this process ends for any reason, and after a
    SIGTERM runs long enough for a last checkpoint. ``map`` raises MachineError if a worker has died
    or has not answered for ``timeout_seconds``, Preempted if it has not for 10 s after a stop request.
    """

    def __init__(self, count: int, timeout_seconds: float) -> None:
        self.count = count
        self.timeout_seconds = timeout_seconds
        self._workers: list[_Worker] = []
        self._loaders: list[Loader] = []
        self._results: dict[int, Batch | Exception] = {}  # by ticket, for other streams
        self._dropped: set[int] = set()
        self._tickets = 0
        self._is_closed = False
        self._starter = threading.Thread(target=self._start, daemon=True)
        self._is_started = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the running workers."""
        return [worker.process.pid for worker in self._workers]

    def start(self) -> None:
        """Start the processes in the background, once."""
        if not self._is_started and not self._is_closed:
            self._is_started = True
            atexit.register(self.close)
            _start_server()
            self._starter.start()

    def wait_until_ready(self) -> None:
        """Wait until every worker is ready or cannot be started."""
        self.start()
        self._starter.join()

    def map(self, loader: Loader, planned: Iterator[MicroBatch]) -> Iterator[Batch]:
        flight: deque[tuple[int, _Worker, MicroBatch]] = deque()
        try:
            while True:
                workers = self._ready()
                while workers and len(flight) < _AHEAD * len(workers):
                    item = next(planned, None)
                    if item is None:
                        break
                    flight.append(self._send(workers, loader, item))
                if flight:
                    result = self._receive(loader, *flight[0])
                    flight.popleft()
                    if isinstance(result, Exception):
                        raise result
                    yield result
                    continue
                item = next(planned, None)
                if item is None:
                    return
                batch = loader(item)
                self.start()  # after the first batch: the start does not slow it down
                yield batch
        finally:
            for ticket, _, _ in flight:
                if self._results.pop(ticket, None) is None:
                    self._dropped.add(ticket)

    def _ready(self) -> list[_Worker]:
        if not self._is_started or self._starter.is_alive() or self._is_closed:
            return []
        return self._workers

    def _send(
        self, workers: list[_Worker], loader: Loader, item: MicroBatch
    ) -> tuple[int, _Worker, MicroBatch]:
        worker = workers[self._tickets % len(workers)]
        ticket = self._tickets = self._tickets + 1
        if loader not in self._loaders:
            self._loaders.append(loader)
        number = self._loaders.index(loader)
        worker.requests.put((ticket, number, None if number in worker.known else loader, item))
        worker.known.add(number)
        return ticket, worker, item

    def _receive(self, loader: Loader, ticket: int, worker: _Worker, item: MicroBatch) -> Batch | Exception:
        """Return the result of a ticket; results of other streams may arrive first and are kept."""
        while ticket not in self._results:
            got, answer = self._answer(loader, worker, item)
            if got == _FOR_ALL:
                raise self._end_of(worker, answer, _place(loader, item))
            if got in self._dropped:
                self._dropped.remove(got)
            else:
                self._results[got] = answer if isinstance(answer, Exception) else _unpack(answer)
        return self._results.pop(ticket)

    def _answer(self, loader: Loader, worker: _Worker, item: MicroBatch) -> tuple[int, Any]:
        """The worker's next answer. Raises MachineError after the time-out, Preempted after a stop."""
        begun, stopped = time.monotonic(), math.inf
        while True:
            try:
                answer: tuple[int, Any] = worker.answers.get(
                    timeout=min(_SLICE_SECONDS, self.timeout_seconds)
                )
                return answer
            except Empty:
                now = time.monotonic()
            stopped = min(stopped, now) if self.stop_requested() else math.inf
            silent, place = f"data worker {worker.process.pid} gave no answer for", _place(loader, item)
            if now - stopped >= _STOP_SECONDS:
                raise Preempted(f"{silent} {_STOP_SECONDS:g} s after a stop request ({place})")
            if now - begun >= self.timeout_seconds:
                raise MachineError(
                    f"{silent} {self.timeout_seconds:g} s ({place}); "
                    "check the storage, or raise data.timeout_seconds"
                )

    @staticmethod
    def _end_of(worker: _Worker, error: Exception, place: str) -> Exception:
        """The error of a broken link: a MachineError with the worker's exit code or signal."""
        if not isinstance(error, EOFError | OSError):
            return error
        worker.answers.put((_FOR_ALL, error))  # for whoever asks next
        worker.process.join(5)
        code = worker.process.exitcode
        how = f"was killed by signal {-code}" if (code or 0) < 0 else f"ended with code {code}"
        return MachineError(
            f"data worker {worker.process.pid} {how} ({place}); if memory or /dev/shm is full, "
            "lower data.workers (0 decodes in this process) or data.batch"
        )

    def _start(self) -> None:
        started: list[_Worker] = []
        try:
            context = multiprocessing.get_context("forkserver")
            folder = multiprocessing.util.get_temp_dir()  # of the server's socket
            for _ in range(self.count):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs, folder), daemon=True)
                process.start()
                theirs.close()  # then the link breaks when the worker dies
                started.append(_Worker(process, ours))
            for worker in started:
                self._connect(worker)
        except Exception as error:  # this process loads instead, more slowly
            if not self._is_closed:
                kind = type(error).__name__
                _log.warning("data workers cannot start (%s: %s); this process decodes", kind, error)
            for worker in started:
                worker.link.close()
                worker.process.kill()
            return
        self._workers = started

    def _connect(self, worker: _Worker) -> None:
        """Wait until a worker is ready. Raises TimeoutError after the time-out or after close()."""
        deadline = time.monotonic() + self.timeout_seconds
        while not worker.link.poll(_SLICE_SECONDS):
            if self._is_closed or time.monotonic() >= deadline:
                raise TimeoutError(f"no answer for {self.timeout_seconds:g} s")
        worker.link.recv()
        worker.connect()

    def close(self) -> None:
        """Stop the workers; micro-batches in flight are lost."""
        self._is_closed = True
        atexit.unregister(self.close)
        if self._is_started:
            self._starter.join()
        for worker in self._workers:
            worker.hang_up()
        for worker in self._workers:
            worker.process.join(5)
            worker.process.kill()
            worker.process.join()
        self._workers = []


def open_workers(count: int, timeout_seconds: float) -> Workers:
    """Return ``count`` workers, not started yet, or by ``automatic_workers`` if it is -1. 0 is this process.

    Raises ValueError for invalid arguments.
    """
    if timeout_seconds <= 0:
        raise ValueError(f"timeout_seconds={timeout_seconds}: it must be above 0")
    if not -1 <= count <= 256:  # Each worker is a process of 200 MB.
        raise ValueError(f"workers={count}: need -1 <= workers <= 256")
    if count < 0:
        count = automatic_workers()
    return Processes(count, timeout_seconds) if count else InProcess()


def automatic_workers() -> int:
    """Return one fewer than this rank's share of the usable cores, at most 8 (see LOCAL_WORLD_SIZE)."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    cores = len(usable_cpus())
    if is_number(ranks):
        cores //= max(1, int(ranks))
    return max(0, min(8, cores - 1))


def _start_server() -> None:
    """Start the fork server. Like a rank, it imports nothing from the current folder.

    It imports once what every worker needs, including the program's own module, which multiprocessing
    otherwise imports again in each worker.
    """
    program = getattr(sys.modules["__main__"], "__spec__", None)
    own = [program.name] if program is not None and not program.name.endswith("__main__") else []
    multiprocessing.forkserver.set_forkserver_preload(["speechtrain.data.worker_preload", *own])
    is_set = "PYTHONSAFEPATH" in os.environ
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # Python's -P, which only ranks have and pass on
    with suppress(OSError):  # the first worker meets it, too, and reports it
        multiprocessing.forkserver.ensure_running()
    if not is_set:
        del os.environ["PYTHONSAFEPATH"]


def _pack(batch: Batch) -> dict[str, Any]:
    """Return a batch's fields, with small tensors as arrays: shared memory costs 0.5 ms per tensor."""
    return {
        name: value.numpy() if isinstance(value, Tensor) and value.nbytes < _SMALL_BYTES else value
        for name, value in vars(batch).items()
    }


def _unpack(fields: dict[str, Any]) -> Batch:
    for name, value in fields.items():
        if isinstance(value, np.ndarray):
            fields[name] = torch.from_numpy(value)
    return Batch(**fields)


def _place(loader: Loader, item: MicroBatch) -> str:
    """Where the run is, and which recordings are in the batch."""
    names = loader.recordings(item) if isinstance(loader, BatchLoader) else []
    more = [f"and {len(names) - _NAMED} more"] if len(names) > _NAMED else []
    listed = "".join(f", {name}" for name in [*names[:_NAMED], *more])
    return f"at micro-batch {item.index} of epoch {item.epoch}{listed}"


def _work(link: Connection, folder: str) -> None:
    """Run a worker: load each micro-batch from the link until it closes.

    If the program was killed, remove the fork server's ``folder``, as the program itself does otherwise.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave_soon)
    torch.set_num_threads(1)
    # The worker is ready: signals to the group no longer end it. If the program has ended already, the first
    # ``recv`` below fails.
    with suppress(OSError):
        link.send(None)
    answers: SimpleQueue[tuple[int, Batch | Exception]] = SimpleQueue()
    # a thread sends answers, and this one always reads: the two ends cannot deadlock
    threading.Thread(target=_answer, args=(link, answers), daemon=True).start()
    loaders: dict[int, Loader] = {}
    while True:
        try:
            ticket, number, loader, item = link.recv()
        except (EOFError, OSError):
            if (program := multiprocessing.parent_process()) is not None and not program.is_alive():
                shutil.rmtree(folder, ignore_errors=True)
            return
        except Exception as error:  # e.g. this process cannot import the tokenizer's module
            problem = f"a data worker cannot import its loader ({type(error).__name__}: {error})"
            answers.put((_FOR_ALL, MachineError(f"{problem}; use data.workers=0 to decode without workers")))
            continue
        if loader is not None:
            loaders[number] = loader
        answers.put((ticket, _load(loaders[number], item)))


def _leave_soon(number: int, frame: FrameType | None) -> None:
    # The default action of SIGALRM ends the process, even while C code decodes audio.
    signal.alarm(_GRACE_SECONDS)


def _load(loader: Loader, item: MicroBatch) -> Batch | Exception:
    try:
        return loader(item)
    except SpeechtrainError as error:
        return error
    except Exception as error:  # a bug: its name and line, because a trace cannot be pickled
        place = traceback.extract_tb(error.__traceback__)[-1]
        return RuntimeError(
            f"data worker {os.getpid()}: {type(error).__name__}: {error} ({place.filename}:{place.lineno})"
        )


def _answer(link: Connection, answers: SimpleQueue[tuple[int, Batch | Exception]]) -> None:
    while True:
        ticket, answer = answers.get()
        try:
            try:
                link.send((ticket, _pack(answer) if isinstance(answer, Batch) else answer))
            except RuntimeError as error:  # from torch, before it writes: shared memory is full
                link.send((ticket, MachineError(f"a batch does not fit into /dev/shm ({error}); enlarge it")))
        except OSError:  # the other end is closed; the reading thread exits too
            return
