"""Data workers: processes that load planned micro-batches ahead and return them in order.

torch's DataLoader is not used for four reasons. Its workers belong to one data set, so training and
validation would each start their own (3 s). It draws from the global generator. It detects a dead
worker only after a timeout. It does not report which recordings a stuck worker was loading.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util  # Its exit handler must be registered before the handler of this module.
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
from itertools import islice
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

_AHEAD = 2  # the most micro-batches in flight for each worker
_NO_TICKET = 0  # the ticket of an error that belongs to no micro-batch
_SMALL_BYTES = 2**20  # tensors below this size are sent through the pipe
_GRACE_SECONDS = 60  # how long a worker runs after a SIGTERM to its process group
_STOP_SECONDS = 10.0  # how long a stop request waits for the batch that ends the step
_SLICE_SECONDS = 0.5  # the time between two checks for a stop request
_MOST_NAMES = 3  # the most recordings in a message


def _never() -> bool:
    return False


class Workers(ABC):
    """Loads planned micro-batches, in this process or in other processes."""

    # Without staticmethod, the call would pass ``self``.
    stop_requested: Callable[[], bool] = staticmethod(_never)
    """Returns whether the run has been asked to stop. The run sets its own function."""

    @abstractmethod
    def map(self, loader: Loader, planned: Iterator[MicroBatch]) -> Iterator[Batch]:
        """Yield the batch that ``loader`` returns for each planned micro-batch, in order.

        Raises every error of ``loader``.
        """

    def close(self) -> None:  # noqa: B027 - empty by default
        """Stop the workers."""


class InProcess(Workers):
    """Loads in this process, on demand."""

    def map(self, loader: Loader, planned: Iterator[MicroBatch]) -> Iterator[Batch]:
        return map(loader, planned)


@dataclass
class _Worker:
    """A worker process and the link to it.

    Two threads send and receive, so that the trainer never waits for the rest of a message.
    """

    process: Any  # BaseProcess of the start method
    link: Connection
    loader_numbers: set[int] = field(default_factory=set)  # loaders that the worker has received
    requests: SimpleQueue[Any] = field(default_factory=SimpleQueue)
    answers: SimpleQueue[tuple[int, Any]] = field(default_factory=SimpleQueue)

    def start_threads(self) -> None:
        """Start the two threads. They end with the link."""
        for function in (self._send_requests, self._receive_answers):
            threading.Thread(target=function, daemon=True).start()

    def _send_requests(self) -> None:
        while True:
            try:
                self.link.send(self.requests.get())
            except OSError:  # The worker is dead, which the other thread reports.
                return
            except Exception as error:  # The loader cannot be pickled.
                self.answers.put((_NO_TICKET, error))

    def _receive_answers(self) -> None:
        try:
            while True:
                self.answers.put(self.link.recv())
        except Exception as error:  # The worker is dead. Its shared memory may fail to open, too.
            self.answers.put((_NO_TICKET, error))

    def shut_down_link(self) -> None:
        """Shut down the link. The worker and both threads notice it. ``close`` would not wake a thread."""
        with socket.socket(fileno=os.dup(self.link.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)
        self.requests.put(None)  # The sending thread may wait for a request. Its next send fails and ends it.


@dataclass(frozen=True)
class _Request:
    """A micro-batch in flight: a worker loads it."""

    ticket: int  # the number of the request, from 1
    worker: _Worker
    loader: Loader
    micro_batch: MicroBatch

    def position(self) -> str:
        """Return the position of the micro-batch in the run, and its first recordings."""
        parts = [f"at micro-batch {self.micro_batch.index} of epoch {self.micro_batch.epoch}"]
        if isinstance(self.loader, BatchLoader):
            recordings = self.loader.recordings(self.micro_batch)
            parts += recordings[:_MOST_NAMES]
            if len(recordings) > _MOST_NAMES:
                parts.append(f"and {len(recordings) - _MOST_NAMES} more")
        return ", ".join(parts)


class Processes(Workers):
    """Loads ahead in ``count`` processes.

    A fork server starts them in the background. It has no threads, and the workers inherit no
    threads, devices or sockets of this process. Until they are ready, this process loads. A worker

    - uses one thread,
    - ignores Ctrl-C,
    - ends when this process ends for any reason,
    - runs for another 60 s after a SIGTERM, long enough for a last checkpoint.

    Each call of ``map`` is a stream of batches. Several streams, such as training and validation, share the
    workers.

    ``map`` raises MachineError if a worker has died or has not answered for ``timeout_seconds``. It raises
    Preempted if a worker has not answered for 10 s after a stop request.
    """

    def __init__(self, count: int, timeout_seconds: float) -> None:
        self.count = count
        self.timeout_seconds = timeout_seconds
        self._workers: list[_Worker] = []
        self._loaders: list[Loader] = []
        self._results: dict[int, Batch | Exception] = {}  # by ticket, until a stream yields them
        self._dropped_tickets: set[int] = set()  # requests in flight of streams that have ended
        self._last_ticket = 0
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
        requests: deque[_Request] = deque()
        try:
            while True:
                workers = self._ready_workers()
                room = max(0, _AHEAD * len(workers) - len(requests))
                for micro_batch in islice(planned, room):
                    requests.append(self._send(workers, loader, micro_batch))
                result: Batch | Exception | None
                if requests:
                    result = self._receive(requests[0])
                    requests.popleft()
                else:
                    result = self._load_here(loader, planned)
                if result is None:
                    return
                if isinstance(result, Exception):
                    raise result
                yield result
        finally:
            for request in requests:
                if self._results.pop(request.ticket, None) is None:
                    self._dropped_tickets.add(request.ticket)

    def _load_here(self, loader: Loader, planned: Iterator[MicroBatch]) -> Batch | None:
        """Load the next micro-batch in this process, then start the workers. Return None after the last one.

        The workers start after the first batch, so that their start does not slow that batch down.
        """
        micro_batch = next(planned, None)
        if micro_batch is None:
            return None
        batch = loader(micro_batch)
        self.start()
        return batch

    def _ready_workers(self) -> list[_Worker]:
        if not self._is_started or self._starter.is_alive() or self._is_closed:
            return []
        return self._workers

    def _send(self, workers: list[_Worker], loader: Loader, micro_batch: MicroBatch) -> _Request:
        """Send a micro-batch to the next worker. A worker receives each loader once."""
        worker = workers[self._last_ticket % len(workers)]
        self._last_ticket += 1
        if loader not in self._loaders:
            self._loaders.append(loader)
        number = self._loaders.index(loader)
        new_loader = None if number in worker.loader_numbers else loader
        worker.requests.put((self._last_ticket, number, new_loader, micro_batch))
        worker.loader_numbers.add(number)
        return _Request(self._last_ticket, worker, loader, micro_batch)

    def _receive(self, request: _Request) -> Batch | Exception:
        """Return the result of a request. Results of other streams may arrive first, and are kept."""
        while request.ticket not in self._results:
            ticket, answer = self._next_answer(request)
            if ticket == _NO_TICKET:
                raise self._worker_error(request, answer)
            if ticket in self._dropped_tickets:
                self._dropped_tickets.remove(ticket)
            else:
                self._results[ticket] = answer if isinstance(answer, Exception) else _unpack(answer)
        return self._results.pop(request.ticket)

    def _next_answer(self, request: _Request) -> tuple[int, Any]:
        """Return the next answer of the request's worker: a ticket, and the fields of a batch or an error.

        Raises MachineError after the time-out, Preempted if a stop request has waited for 10 s.
        """
        slice_seconds = min(_SLICE_SECONDS, self.timeout_seconds)
        no_answer = f"data worker {request.worker.process.pid} gave no answer for"
        start_time = time.monotonic()
        stop_time: float | None = None  # when the stop request was noticed
        while True:
            with suppress(Empty):
                return request.worker.answers.get(timeout=slice_seconds)
            clock = time.monotonic()
            if not self.stop_requested():
                stop_time = None
            elif stop_time is None:
                stop_time = clock
            if stop_time is not None and clock - stop_time >= _STOP_SECONDS:
                raise Preempted(
                    f"{no_answer} {_STOP_SECONDS:g} s after a stop request ({request.position()})"
                )
            if clock - start_time >= self.timeout_seconds:
                raise MachineError(
                    f"{no_answer} {self.timeout_seconds:g} s ({request.position()}). "
                    "Check the storage, or raise data.timeout_seconds"
                )

    @staticmethod
    def _worker_error(request: _Request, error: Exception) -> Exception:
        """Return the error to raise for an answer without a ticket.

        For a broken link it is a MachineError with the worker's exit code or signal.
        """
        if not isinstance(error, EOFError | OSError):
            return error
        worker = request.worker
        worker.answers.put((_NO_TICKET, error))  # Other streams get the error, too.
        worker.process.join(5)
        code = worker.process.exitcode
        end = f"ended with code {code}"
        if code is not None and code < 0:
            end = f"was killed by signal {-code}"
        return MachineError(
            f"data worker {worker.process.pid} {end} ({request.position()}). If memory or /dev/shm is full, "
            "lower data.workers (0 loads in this process) or data.batch"
        )

    def _start(self) -> None:
        started: list[_Worker] = []
        try:
            context = multiprocessing.get_context("forkserver")
            folder = multiprocessing.util.get_temp_dir()  # It holds the server's socket.
            for _ in range(self.count):
                link, worker_link = context.Pipe()
                process = context.Process(target=_run_worker, args=(worker_link, folder), daemon=True)
                process.start()
                worker_link.close()  # Only the worker has this end now, so the link breaks when it dies.
                started.append(_Worker(process, link))
            for worker in started:
                self._connect(worker)
        except Exception as error:  # This process loads instead, more slowly.
            if not self._is_closed:
                kind = type(error).__name__
                _log.warning("data workers cannot start (%s: %s). This process loads instead", kind, error)
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
        worker.start_threads()

    def close(self) -> None:
        """Stop the workers. Micro-batches in flight are lost."""
        self._is_closed = True
        atexit.unregister(self.close)
        if self._is_started:
            self._starter.join()
        for worker in self._workers:
            worker.shut_down_link()
        for worker in self._workers:
            worker.process.join(5)
            worker.process.kill()
            worker.process.join()
        self._workers = []


def open_workers(count: int, timeout_seconds: float) -> Workers:
    """Return ``count`` workers that are not started yet. A count of 0 loads in this process.

    A count of -1 stands for ``automatic_workers()``. Raises ValueError for invalid arguments.
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

    The server imports the modules that every worker needs. The program's module is one of them, because
    multiprocessing otherwise imports it again in each worker.
    """
    preload = ["speechtrain.data.worker_preload"]
    program = getattr(sys.modules["__main__"], "__spec__", None)
    if program is not None and not program.name.endswith("__main__"):
        preload.append(program.name)
    multiprocessing.forkserver.set_forkserver_preload(preload)
    is_set = "PYTHONSAFEPATH" in os.environ
    # The server inherits this variable, which acts like Python's -P. In a rank, it is set already.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    with suppress(OSError):  # The start of the first worker fails, too, and reports the error.
        multiprocessing.forkserver.ensure_running()
    if not is_set:
        del os.environ["PYTHONSAFEPATH"]


def _pack(batch: Batch) -> dict[str, Any]:
    """Return a batch's fields, with small tensors as arrays: shared memory costs 0.5 ms per tensor."""
    fields = dict(vars(batch))
    for name, content in fields.items():
        if isinstance(content, Tensor) and content.nbytes < _SMALL_BYTES:
            fields[name] = content.numpy()
    return fields


def _unpack(fields: dict[str, Any]) -> Batch:
    for name, content in fields.items():
        if isinstance(content, np.ndarray):
            fields[name] = torch.from_numpy(content)
    return Batch(**fields)


def _run_worker(link: Connection, folder: str) -> None:
    """Load each micro-batch from the link until the link closes.

    If the program was killed, remove the fork server's ``folder``. Otherwise the program removes it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end_after_grace)
    torch.set_num_threads(1)
    # The worker is ready: signals to the group no longer end it. If the program has ended already, the first
    # ``recv`` below fails.
    with suppress(OSError):
        link.send(None)
    answers: SimpleQueue[tuple[int, Batch | Exception]] = SimpleQueue()
    # A thread sends answers, and this thread always reads, so the two ends cannot deadlock.
    threading.Thread(target=_send_answers, args=(link, answers), daemon=True).start()
    loaders: dict[int, Loader] = {}
    while True:
        try:
            ticket, loader_number, new_loader, micro_batch = link.recv()
        except (EOFError, OSError):
            program = multiprocessing.parent_process()
            if program is not None and not program.is_alive():
                shutil.rmtree(folder, ignore_errors=True)
            return
        except Exception as error:  # For example, this process cannot import the tokenizer's module.
            problem = f"a data worker cannot import its loader ({type(error).__name__}: {error})"
            fix = "Use data.workers=0 to load without workers"
            answers.put((_NO_TICKET, MachineError(f"{problem}. {fix}")))
            continue
        if new_loader is not None:
            loaders[loader_number] = new_loader
        answers.put((ticket, _load(loaders[loader_number], micro_batch)))


def _end_after_grace(signal_number: int, frame: FrameType | None) -> None:
    # The default action of SIGALRM ends the process, even while C code decodes audio.
    signal.alarm(_GRACE_SECONDS)


def _load(loader: Loader, micro_batch: MicroBatch) -> Batch | Exception:
    try:
        return loader(micro_batch)
    except SpeechtrainError as error:
        return error
    except Exception as error:  # The message of a bug names its line, because a trace cannot be pickled.
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return RuntimeError(
            f"data worker {os.getpid()}: {type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
        )


def _send_answers(link: Connection, answers: SimpleQueue[tuple[int, Batch | Exception]]) -> None:
    while True:
        ticket, result = answers.get()
        try:
            try:
                content = _pack(result) if isinstance(result, Batch) else result
                link.send((ticket, content))
            except RuntimeError as error:  # torch raises it before it writes, if shared memory is full.
                link.send((ticket, MachineError(f"a batch does not fit into /dev/shm ({error}). Enlarge it")))
        except OSError:  # The other end is closed. The reading thread exits, too.
            return
