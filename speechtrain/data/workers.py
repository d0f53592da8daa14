"""Data workers: processes that load planned micro-batches ahead and return them in order.

torch's DataLoader is not used for four reasons:

- Its workers belong to one data set, so training and validation would each start workers, which takes 3 s.
- It draws from torch's global generator.
- It detects a dead worker only after a time-out.
- It does not report which recordings a stuck worker was loading.
"""

from __future__ import annotations

import atexit
import logging
import math
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
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch
import torch.multiprocessing  # makes pickling send large tensors by shared memory
from torch import Tensor

from speechtrain.batch import Batch
from speechtrain.compute_policy import TorchSettings, unchanged_torch, usable_cpus
from speechtrain.data.loader import BatchLoader
from speechtrain.data.sampler import MicroBatch
from speechtrain.distributed.world import is_number
from speechtrain.errors import MachineError, Preempted, SpeechtrainError

Loader = Callable[[MicroBatch], Batch]

_log = logging.getLogger(__name__)

_MOST_IN_FLIGHT = 2  # the most micro-batches that each worker loads ahead
_NO_TICKET = 0  # the ticket of an error that belongs to no request
_SMALL_BYTES = 2**20  # Smaller tensors are sent through the pipe, larger ones by shared memory.
_GRACE_SECONDS = 60  # the time that a worker still runs after a SIGTERM to its process group
_STOP_SECONDS = 10.0  # the time that a stop request waits for a batch, so that the step can end
_POLL_SECONDS = 0.5  # the time between two checks for a stop request
_MOST_NAMES = 3  # the most recordings in a message


@dataclass
class _Worker:
    """A worker process and the link to it.

    One thread sends the requests and one thread receives the answers. So the trainer does not wait while a
    large message is sent or received.
    """

    process: Any  # multiprocessing's BaseProcess. Its class depends on the start method.
    link: Connection
    loader_numbers: set[int] = field(default_factory=set)  # numbers of the loaders that have been sent
    requests: SimpleQueue[Any] = field(default_factory=SimpleQueue)
    answers: SimpleQueue[tuple[int, Any]] = field(default_factory=SimpleQueue)
    """A ticket, and the fields of a batch or an error."""

    def start_threads(self) -> None:
        """Start the two threads. They end when the link is shut down."""
        for function in (self._send_requests, self._receive_answers):
            threading.Thread(target=function, daemon=True).start()

    def _send_requests(self) -> None:
        while True:
            try:
                self.link.send(self.requests.get())
            except OSError:  # The worker is dead. The receiving thread reports it.
                return
            except Exception as error:  # The loader cannot be pickled.
                self.answers.put((_NO_TICKET, error))

    def _receive_answers(self) -> None:
        try:
            while True:
                self.answers.put(self.link.recv())
        except Exception as error:  # The worker is dead, or its shared memory cannot be opened.
            self.answers.put((_NO_TICKET, error))

    def shut_down_link(self) -> None:
        """Shut down the link, which ends the worker and both threads.

        ``link.close()`` would not end a thread that waits for the link.
        """
        with socket.socket(fileno=os.dup(self.link.fileno())) as link_end:
            link_end.shutdown(socket.SHUT_RDWR)
        # The sending thread may wait for a request. It now fails to send None, and ends.
        self.requests.put(None)


@dataclass(frozen=True)
class _Request:
    """A micro-batch in flight, which means that a worker loads it or has loaded it."""

    ticket: int  # the number of the request among the requests to all workers, from 1
    worker: _Worker
    loader: Loader
    micro_batch: MicroBatch

    def position(self) -> str:
        """Return the position of the micro-batch in the run and its first recordings, for a message."""
        parts = [f"at micro-batch {self.micro_batch.index} of epoch {self.micro_batch.epoch}"]
        if isinstance(self.loader, BatchLoader):
            recordings = self.loader.recordings(self.micro_batch)
            parts += recordings[:_MOST_NAMES]
            if len(recordings) > _MOST_NAMES:
                parts.append(f"and {len(recordings) - _MOST_NAMES} more")
        return ", ".join(parts)


class Workers:
    """Loads planned micro-batches ahead in ``count`` processes. With a count of 0, this process loads.

    A fork server starts the workers in the background. The server has no threads, and the workers inherit no
    threads, devices or sockets of this process. Until the workers are ready, this process loads. A worker

    - uses one thread,
    - ignores Ctrl-C,
    - ends when this process ends for any reason,
    - runs for another 60 s after a SIGTERM, because the run may need a few more batches to save a checkpoint.

    Each call of ``map`` is a stream of batches. Several streams, such as training and validation, use the
    same workers.

    ``map`` raises MachineError if a worker has died or has not answered for ``timeout_seconds``. It raises
    Preempted if a worker has not answered for 10 s after ``stop_requested`` has first returned true.
    """

    def __init__(
        self,
        count: int = 0,
        timeout_seconds: float = math.inf,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self.count = count
        self.timeout_seconds = timeout_seconds
        self._stop_requested = stop_requested
        self._workers: list[_Worker] = []
        self._loaders: list[Loader] = []  # all loaders so far. Workers know a loader by its position.
        self._results: dict[int, Batch | Exception] = {}  # results by ticket, until a stream yields them
        self._dropped_tickets: set[int] = set()  # tickets of requests whose stream has ended
        self._last_ticket = 0
        self._is_closed = False
        self._starter = threading.Thread(target=self._start_workers, daemon=True)
        self._is_started = False

    @property
    def pids(self) -> list[int]:
        """The process ids of the running workers."""
        return [worker.process.pid for worker in self._workers]

    def start(self) -> None:
        """Start the processes in the background, once."""
        if self.count and not self._is_started and not self._is_closed:
            self._is_started = True
            atexit.register(self.close)
            _start_server()
            self._starter.start()

    def wait_until_ready(self) -> None:
        """Wait until every worker is ready or cannot be started."""
        self.start()
        self._starter.join()

    def map(self, loader: Loader, planned: Iterator[MicroBatch]) -> Iterator[Batch]:
        """Yield the batch that ``loader`` returns for each planned micro-batch, in order.

        Raises every error of ``loader``.
        """
        requests: deque[_Request] = deque()  # the requests of this stream, in order
        try:
            while True:
                # There are none while they start and after ``close``.
                is_ready = self._is_started and not self._starter.is_alive() and not self._is_closed
                workers = self._workers if is_ready else []
                free_requests = max(0, _MOST_IN_FLIGHT * len(workers) - len(requests))
                for micro_batch in islice(planned, free_requests):
                    requests.append(self._send(workers, loader, micro_batch))
                if requests:
                    result = self._receive(requests[0])
                    requests.popleft()
                    if isinstance(result, Exception):
                        raise result
                    batch = result
                else:
                    next_micro_batch = next(planned, None)
                    if next_micro_batch is None:
                        return
                    with unchanged_torch():
                        # The bits are those of a worker, which has one thread and torch's own fp32 matmul.
                        TorchSettings.current()._replace(threads=1, fp32_matmul="highest").apply()
                        batch = loader(next_micro_batch)
                    # Workers start after the first batch, because their start would slow its loading.
                    self.start()
                yield batch
        finally:
            for request in requests:
                if self._results.pop(request.ticket, None) is None:
                    self._dropped_tickets.add(request.ticket)

    def _send(self, workers: list[_Worker], loader: Loader, micro_batch: MicroBatch) -> _Request:
        """Send a micro-batch to the next worker in turn. The loader is only sent if the worker lacks it."""
        worker = workers[self._last_ticket % len(workers)]
        self._last_ticket += 1
        if loader not in self._loaders:
            self._loaders.append(loader)
        loader_number = self._loaders.index(loader)
        new_loader = None if loader_number in worker.loader_numbers else loader
        worker.requests.put((self._last_ticket, loader_number, new_loader, micro_batch))
        worker.loader_numbers.add(loader_number)
        return _Request(self._last_ticket, worker, loader, micro_batch)

    def _receive(self, request: _Request) -> Batch | Exception:
        """Return the result of a request. Results of other requests may arrive first, and are stored."""
        while request.ticket not in self._results:
            ticket, content = self._next_answer(request)
            if ticket == _NO_TICKET:
                raise self._worker_error(request, content)
            if ticket in self._dropped_tickets:
                self._dropped_tickets.remove(ticket)
            else:
                self._results[ticket] = content if isinstance(content, Exception) else _unpack(content)
        return self._results.pop(request.ticket)

    def _next_answer(self, request: _Request) -> tuple[int, Any]:
        """Return the next answer of the request's worker: a ticket, and the fields of a batch or an error.

        Raises MachineError after the time-out, and Preempted if a stop request has waited for 10 s.
        """
        poll_seconds = min(_POLL_SECONDS, self.timeout_seconds)
        no_answer = f"data worker {request.worker.process.pid} gave no answer for"
        start_time = time.monotonic()
        stop_time: float | None = None  # the time when the stop request was noticed
        while True:
            with suppress(Empty):
                return request.worker.answers.get(timeout=poll_seconds)
            current_time = time.monotonic()
            if not self._stop_requested():
                stop_time = None
            elif stop_time is None:
                stop_time = current_time
            if stop_time is not None and current_time - stop_time >= _STOP_SECONDS:
                raise Preempted(
                    f"{no_answer} {_STOP_SECONDS:g} s after a stop request ({request.position()})"
                )
            if current_time - start_time >= self.timeout_seconds:
                raise MachineError(
                    f"{no_answer} {self.timeout_seconds:g} s ({request.position()}). "
                    "Check the storage, or raise data.timeout_seconds"
                )

    @staticmethod
    def _worker_error(request: _Request, error: Exception) -> Exception:
        """Return the error to raise for an answer without a ticket.

        If the link is broken, this is a MachineError with the worker's exit code or signal. Otherwise it is
        ``error`` itself.
        """
        if not isinstance(error, EOFError | OSError):
            return error
        worker = request.worker
        worker.answers.put((_NO_TICKET, error))  # Another stream that waits for this worker reads the error.
        worker.process.join(5)
        exit_code = worker.process.exitcode
        end = f"ended with code {exit_code}"
        if exit_code is not None and exit_code < 0:
            end = f"was killed by signal {-exit_code}"
        return MachineError(
            f"data worker {worker.process.pid} {end} ({request.position()}). If memory or /dev/shm is full, "
            "lower data.workers (0 loads in this process) or data.batch"
        )

    def _start_workers(self) -> None:
        """Start the workers and wait until they are ready. If one fails, end all and log a warning."""
        workers: list[_Worker] = []
        try:
            context = multiprocessing.get_context("forkserver")
            folder = multiprocessing.util.get_temp_dir()  # It contains the server's socket.
            for _ in range(self.count):
                link, worker_link = context.Pipe()
                process = context.Process(target=_run_worker, args=(worker_link, folder), daemon=True)
                process.start()
                # From now on only the worker has this end. So the link breaks when the worker dies.
                worker_link.close()
                workers.append(_Worker(process, link))
            for worker in workers:
                self._connect(worker)
        except Exception as error:
            if not self._is_closed:
                error_name = type(error).__name__
                _log.warning(
                    "data workers cannot start (%s: %s). This process loads instead", error_name, error
                )
            for worker in workers:
                worker.link.close()
                worker.process.kill()
            return
        self._workers = workers

    def _connect(self, worker: _Worker) -> None:
        """Wait until a worker is ready. Raises TimeoutError after the time-out or after ``close``."""
        deadline = time.monotonic() + self.timeout_seconds
        while not worker.link.poll(_POLL_SECONDS):
            if self._is_closed or time.monotonic() >= deadline:
                raise TimeoutError(f"no answer for {self.timeout_seconds:g} s")
        worker.link.recv()  # This is the None that a worker sends when it is ready.
        worker.start_threads()

    def close(self) -> None:
        """Stop the workers. They do not load their remaining micro-batches."""
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


def open_workers(count: int, timeout_seconds: float, stop_requested: Callable[[], bool]) -> Workers:
    """Return ``count`` workers, which start at first use. With a count of 0, this process loads.

    A count of -1 stands for ``automatic_workers()``. Raises ValueError for invalid arguments.
    """
    if timeout_seconds <= 0:
        raise ValueError(f"timeout_seconds={timeout_seconds}: it must be above 0")
    if not -1 <= count <= 256:  # Each worker is a process of 200 MB.
        raise ValueError(f"workers={count}: need -1 <= workers <= 256")
    if count < 0:
        count = automatic_workers()
    return Workers(count, timeout_seconds, stop_requested)


def automatic_workers() -> int:
    """Return one fewer than the cores of this rank, at most 8.

    The usable cores of the host are divided among its ranks. The launcher sets LOCAL_WORLD_SIZE, the number
    of ranks on this host.
    """
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    cores = len(usable_cpus())
    if is_number(ranks):
        cores //= max(1, int(ranks))
    return max(0, min(8, cores - 1))


def _start_server() -> None:
    """Start the fork server, which imports the modules that every worker needs.

    The program's module is one of these, because multiprocessing would otherwise import it again in each
    worker. Like a rank, the server imports no module from the current folder.
    """
    preloaded_modules = ["speechtrain.data.worker_preload"]
    program = getattr(sys.modules["__main__"], "__spec__", None)
    if program is not None and not program.name.endswith("__main__"):
        preloaded_modules.append(program.name)
    multiprocessing.forkserver.set_forkserver_preload(preloaded_modules)
    was_set = "PYTHONSAFEPATH" in os.environ
    # The server inherits this variable. It removes the current folder from the path of imports, as Python's
    # option -P does. In a rank it is set already.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    with suppress(OSError):  # The start of the first worker then fails and reports the error.
        multiprocessing.forkserver.ensure_running()
    if not was_set:
        del os.environ["PYTHONSAFEPATH"]


def _pack(batch: Batch) -> dict[str, Any]:
    """Return a batch's fields, with small tensors as arrays.

    Arrays are sent through the pipe. Tensors are sent by shared memory, which takes 0.5 ms for each.
    """
    fields = dict(vars(batch))
    for name, content in fields.items():
        if isinstance(content, Tensor) and content.nbytes < _SMALL_BYTES:
            fields[name] = content.numpy()
    return fields


def _unpack(fields: dict[str, Any]) -> Batch:
    """Return the batch of the fields that ``_pack`` returned."""
    for name, content in fields.items():
        if isinstance(content, np.ndarray):
            fields[name] = torch.from_numpy(content)
    return Batch(**fields)


def _run_worker(link: Connection, folder: str) -> None:
    """Load each micro-batch from the link until the link closes.

    If the program was killed, remove the fork server's ``folder``. Otherwise the program removes it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The default action of SIGALRM ends the process, even while C code decodes audio.
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(_GRACE_SECONDS))
    torch.set_num_threads(1)
    # This message says that the worker is ready. From now on, signals to the process group do not end it. If
    # the program has already ended, the first ``recv`` below fails.
    with suppress(OSError):
        link.send(None)
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
            _send_answer(link, _NO_TICKET, MachineError(f"{problem}. {fix}"))
            continue
        if new_loader is not None:
            loaders[loader_number] = new_loader
        _send_answer(link, ticket, _load(loaders[loader_number], micro_batch))


def _load(loader: Loader, micro_batch: MicroBatch) -> Batch | Exception:
    """Return the batch, or the error of the loader. An unexpected error becomes a RuntimeError."""
    try:
        return loader(micro_batch)
    except SpeechtrainError as error:
        return error
    except Exception as error:
        # A traceback cannot be pickled, so the message has the line of the error.
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return RuntimeError(
            f"data worker {os.getpid()}: {type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
        )


def _send_answer(link: Connection, ticket: int, result: Batch | Exception) -> None:
    """Send an answer. A thread of the program reads each answer at once, so this does not block for long."""
    with suppress(OSError):  # The program has closed its end. The next ``recv`` also notices this.
        try:
            link.send((ticket, _pack(result) if isinstance(result, Batch) else result))
        except RuntimeError as error:
            # torch raises this error if shared memory is full. It has sent nothing then.
            link.send((ticket, MachineError(f"a batch does not fit into /dev/shm ({error}). Enlarge it")))
