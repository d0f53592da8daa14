"""Decoding ahead: processes that turn planned micro-batches into batches, in the order asked for.

Not torch's DataLoader: its workers belong to one data set, so that training and validation would
each start their own (3 s); it draws from the global generator; it sees that a worker has died only
at the end of a time-out; and it does not say which recordings a stuck worker had in hand.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import multiprocessing.util  # its exit handler must be registered before the one here
import os
import signal
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from queue import SimpleQueue
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.multiprocessing  # registers how large tensors travel: by shared memory
from torch import Tensor

from speechtrain.batch import Batch
from speechtrain.data.sampler import MicroBatch
from speechtrain.errors import MachineError, SpeechtrainError

Decode = Callable[[MicroBatch], Batch]

_log = logging.getLogger(__name__)

_AHEAD = 2  # micro-batches in hand for each worker
_FOR_ALL = 0  # instead of a ticket
_SMALL_BYTES = 2**20  # of a tensor that travels through the pipe
_GRACE_SECONDS = 60  # a worker outlives a SIGTERM of its whole process group by this much


class Workers(ABC):
    """Who decodes."""

    @abstractmethod
    def map(self, decode: Decode, planned: Iterator[MicroBatch]) -> Iterator[Batch]:
        """``decode`` of each planned micro-batch, in order. Raises what ``decode`` raises."""

    def close(self) -> None:  # noqa: B027 - nothing is a sensible default
        """Stop."""


class InProcess(Workers):
    """This process decodes, when asked."""

    def map(self, decode: Decode, planned: Iterator[MicroBatch]) -> Iterator[Batch]:
        return map(decode, planned)


@dataclass
class _Worker:
    process: Any  # BaseProcess of the start method
    link: Connection
    known: set[int] = field(default_factory=set)  # decoders that it has been sent


class Processes(Workers):
    """``count`` processes decode ahead of the one that asks.

    They are started in the background by a fork server, which never runs a thread, so nothing that
    this process has opened (threads, devices, sockets) comes along; until they are there, batches
    are decoded here. Each uses one thread. They ignore Ctrl-C, end when this process ends, however
    that happens, and outlive a SIGTERM long enough for a last checkpoint. ``map`` raises
    MachineError when a worker has died, or has not answered for ``timeout_seconds``.
    """

    def __init__(self, count: int, timeout_seconds: float) -> None:
        self.count = count
        self.timeout_seconds = timeout_seconds
        self._workers: list[_Worker] = []
        self._decoders: list[Decode] = []
        self._results: dict[int, Batch | Exception] = {}  # by ticket, of streams that wait their turn
        self._dropped: set[int] = set()
        self._tickets = 0
        self._turn = 0
        self._is_closed = False
        self._starter = threading.Thread(target=self._start, daemon=True)
        self._is_started = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that run."""
        return [worker.process.pid for worker in self._workers]

    def start(self) -> None:
        """Start the processes in the background, unless that has been done."""
        if not self._is_started and not self._is_closed:
            self._is_started = True
            atexit.register(self.close)
            self._starter.start()

    def wait_until_ready(self) -> None:
        """Return when every worker is ready (or cannot be started)."""
        self.start()
        self._starter.join()

    def map(self, decode: Decode, planned: Iterator[MicroBatch]) -> Iterator[Batch]:
        flight: deque[tuple[int, _Worker, MicroBatch]] = deque()
        try:
            while True:
                workers = self._ready()
                while workers and len(flight) < _AHEAD * len(workers):
                    item = next(planned, None)
                    if item is None:
                        break
                    flight.append(self._send(workers, decode, item))
                if flight:
                    result = self._receive(*flight[0])
                    flight.popleft()
                    if isinstance(result, Exception):
                        raise result
                    yield result
                    continue
                item = next(planned, None)
                if item is None:
                    return
                batch = decode(item)
                self.start()  # the first batch does not share the processor with their start
                yield batch
        finally:
            self._dropped.update(ticket for ticket, _, _ in flight if ticket not in self._results)
            for ticket, _, _ in flight:
                self._results.pop(ticket, None)

    def _ready(self) -> list[_Worker]:
        if not self._is_started or self._starter.is_alive() or self._is_closed:
            return []
        return self._workers

    def _send(
        self, workers: list[_Worker], decode: Decode, item: MicroBatch
    ) -> tuple[int, _Worker, MicroBatch]:
        worker = workers[self._turn % len(workers)]
        self._turn += 1
        ticket = self._tickets = self._tickets + 1
        number = next((i for i, known in enumerate(self._decoders) if known is decode), len(self._decoders))
        if number == len(self._decoders):
            self._decoders.append(decode)
        with self._or_dead(worker, item):
            worker.link.send((ticket, number, None if number in worker.known else decode, item))
        worker.known.add(number)
        return ticket, worker, item

    def _receive(self, ticket: int, worker: _Worker, item: MicroBatch) -> Batch | Exception:
        """The result of a ticket; a worker answers in order, so those of other streams may come first."""
        while ticket not in self._results:
            with self._or_dead(worker, item):
                if not worker.link.poll(self.timeout_seconds):
                    raise MachineError(
                        f"data worker {worker.process.pid} gave no answer for {self.timeout_seconds:g} s "
                        f"({_place(item)}); is the storage stuck? data.timeout_seconds sets the limit"
                    )
                got, answer = worker.link.recv()
            if got == _FOR_ALL:
                raise answer
            if got in self._dropped:
                self._dropped.remove(got)
            else:
                self._results[got] = answer if isinstance(answer, Exception) else _unpack(answer)
        return self._results.pop(ticket)

    @contextlib.contextmanager
    def _or_dead(self, worker: _Worker, item: MicroBatch) -> Iterator[None]:
        """Turns a broken link into a MachineError that says how the worker died."""
        try:
            yield
        except (EOFError, ConnectionError, BrokenPipeError, FileNotFoundError) as error:
            worker.process.join(5)
            code = worker.process.exitcode
            how = (
                f"was killed by signal {-code}"
                if code is not None and code < 0
                else f"ended with code {code}"
            )
            raise MachineError(
                f"data worker {worker.process.pid} {how} ({_place(item)}); out of memory or of /dev/shm? "
                "lower data.workers (0 decodes in this process) or data.batch"
            ) from error

    def _start(self) -> None:
        started: list[_Worker] = []
        try:
            methods = multiprocessing.get_all_start_methods()
            context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
            if "forkserver" in methods:
                # the server imports once what every worker needs, the program's own module included:
                # multiprocessing makes each worker import that again
                program = getattr(sys.modules["__main__"], "__spec__", None)
                own = [program.name] if program is not None and not program.name.endswith("__main__") else []
                context.set_forkserver_preload(["speechtrain.data.worker_preload", *own])
            for _ in range(self.count):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs,), daemon=True)  # type: ignore[attr-defined]
                process.start()
                theirs.close()  # so that the link breaks when the worker dies
                started.append(_Worker(process, ours))
            for worker in started:
                if not worker.link.poll(self.timeout_seconds):
                    raise TimeoutError(f"no sign of life for {self.timeout_seconds:g} s")
                worker.link.recv()
        except Exception as error:  # this process can do what they would have done, only slower
            _log.warning(
                "data workers cannot be started (%s: %s); decoding here", type(error).__name__, error
            )
            for worker in started:
                worker.link.close()
                worker.process.kill()
            return
        self._workers = started

    def close(self) -> None:
        """Stop the workers; what they have in hand is lost."""
        self._is_closed = True
        atexit.unregister(self.close)
        if self._is_started:
            self._starter.join()
        for worker in self._workers:
            worker.link.close()  # the worker reads its end and leaves
        for worker in self._workers:
            worker.process.join(5)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self._workers = []


def _pack(batch: Batch) -> dict[str, Any]:
    """A batch's fields, small tensors as arrays: shared memory costs 0.5 ms each, however small."""
    return {
        name: value.numpy() if isinstance(value, Tensor) and value.nbytes < _SMALL_BYTES else value
        for name, value in vars(batch).items()
    }


def _unpack(fields: dict[str, Any]) -> Batch:
    for name, value in fields.items():
        if isinstance(value, np.ndarray):
            fields[name] = torch.from_numpy(value)
    return Batch(**fields)


def _place(item: MicroBatch) -> str:
    return f"at micro-batch {item.index} of epoch {item.epoch}"


def _work(link: Connection) -> None:
    """A worker: decodes what it is sent until the link ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "alarm"):
        signal.signal(signal.SIGTERM, _leave_soon)
    torch.set_num_threads(1)
    link.send(None)  # ready: from here on no signal of the group ends it
    answers: SimpleQueue[tuple[int, Batch | Exception]] = SimpleQueue()
    # answers leave by a thread: this one always reads, so neither end can wait for the other
    threading.Thread(target=_answer, args=(link, answers), daemon=True).start()
    decoders: dict[int, Decode] = {}
    while True:
        try:
            ticket, number, decode, item = link.recv()
        except (EOFError, OSError):
            return
        except Exception as error:  # a tokenizer, say, of a module that this process cannot import
            problem = f"a data worker cannot load what it was sent ({type(error).__name__}: {error})"
            answers.put((_FOR_ALL, MachineError(f"{problem}; data.workers=0 does without workers")))
            continue
        if decode is not None:
            decoders[number] = decode
        answers.put((ticket, _decode(decoders[number], item)))


def _leave_soon(number: int, frame: FrameType | None) -> None:
    # the default action of SIGALRM ends the process, even inside a decoder
    signal.alarm(_GRACE_SECONDS)


def _decode(decode: Decode, item: MicroBatch) -> Batch | Exception:
    try:
        return decode(item)
    except SpeechtrainError as error:
        return error
    except Exception as error:  # a bug: its name and place, since a trace does not travel
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
            except RuntimeError as error:  # torch, before anything was written: no shared memory
                link.send((ticket, MachineError(f"a batch does not fit into /dev/shm ({error}); enlarge it")))
        except OSError:  # nobody is there any more; the reading thread sees it too
            return
