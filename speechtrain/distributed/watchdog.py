"""The watchdog, which names a rank that hangs, reports what each rank does, and ends all ranks.

The trainer and the group note a rank's step and phase in a few attributes. A thread of each rank reads
them; nothing is written while a run moves. A rank that has not moved for too long raises an alarm, a file
in the run directory that all ranks look for. Each rank answers with its phase and its stack, all make the
same diagnosis from the answers, and all exit. Imports no torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Concatenate, ParamSpec, TypeVar

from speechtrain.errors import MachineError
from speechtrain.files import read_json, write_json, write_text

ALARM = "alarm"
START_SECONDS = 1800.0  # lowest limit for a peer before its first step: it reads data, compiles
ANSWER_SECONDS = (2.0, 30.0)  # lowest, highest limit for an answer to an alarm; network file systems are slow
MARGIN_SECONDS = 60.0  # by which a collective's timeout is longer, so that the watchdog reports first
_LAST_SECONDS = 6.0  # from the limit for answers to a forced exit, even if this thread hangs
_LEAST_TICK, _MOST_TICK = 0.1, 2.0
_TICKS = 20  # checks within the time limit of a phase

_Arguments = ParamSpec("_Arguments")
_Answer = TypeVar("_Answer")


class RankStatus:
    """A rank's step and phase, for its watchdog. Notes are attributes: 0.2 µs, no input or output."""

    def __init__(self) -> None:
        self.step = 0
        self.phase = "start"
        self.moved = 0  # phases so far; every rank goes through the same ones
        self.usual: set[str] = set()  # phases in which a collective has completed
        self._entered = 0
        self._left = 0
        self._lock = threading.Lock()  # a backend's threads call `leave`, too

    def at(self, step: int, phase: str) -> None:
        """Note that the rank starts ``phase`` of ``step``, or a part of it."""
        self.step, self.phase = step, phase
        self.moved += 1

    def enter(self) -> None:
        """Note that a collective starts."""
        with self._lock:
            self._entered += 1

    def leave(self) -> None:
        """Note that a collective has completed."""
        with self._lock:
            self._left += 1
        self.usual.add(self.phase)

    @property
    def is_waiting(self) -> bool:
        return self._entered > self._left

    @property
    def mark(self) -> tuple[int, int, int]:
        """A value that changes whenever the rank moves."""
        return self.moved, self._entered, self._left

    def __str__(self) -> str:
        return f"step {self.step}, {self.phase}"


def collective(
    method: Callable[Concatenate[Any, _Arguments], _Answer],
) -> Callable[Concatenate[Any, _Arguments], _Answer]:
    """Make ``method``, which waits for all peers, note that in its object's ``rank_status``."""

    @functools.wraps(method)
    def noted(self: Any, /, *arguments: _Arguments.args, **named: _Arguments.kwargs) -> _Answer:
        self.rank_status.enter()
        answer = method(self, *arguments, **named)  # if it raises, it has not completed
        self.rank_status.leave()
        return answer

    return noted


@dataclass(frozen=True)
class HangReport:
    """A rank's answer to an alarm."""

    rank: int
    step: int
    phase: str
    moved: int
    is_waiting: bool = False
    is_odd: bool = False  # it waits in a phase that had no collective before
    still: float = 0.0  # seconds since it moved
    host: str = ""
    at: str = ""  # innermost frames of its main thread
    stack: str = ""  # of its main thread
    others: str = ""  # those of its other threads

    def __str__(self) -> str:
        return f"rank {self.rank} (step {self.step}, {self.phase})"


@dataclass(frozen=True)
class HangDiagnosis:
    """The rank that hangs, and the message about it."""

    rank: int
    message: str
    stack: str = ""
    silent: frozenset[int] = field(default_factory=frozenset)


class Stuck(MachineError):
    """A rank does not move, or is not where its peers wait for it."""


def diagnose(notes: Iterable[HangReport], size: int, seconds: float) -> HangDiagnosis:
    """Name the rank that the others wait for; the same answers give the same diagnosis on every rank.

    The cause is a rank without an answer, else the rank outside of collectives that is furthest behind.
    If all ranks wait, they wait in different collectives. The cause is then the odd one out; of two ranks
    it is the one in a phase without collectives, else the one ahead, which has left out a collective.
    """
    known = {note.rank: note for note in notes}
    silent = frozenset(range(size)) - known.keys()
    limit = f"trainer.timeout_seconds={seconds:g} sets the limit"
    if silent:
        rank = min(silent)
        waiting = ", ".join(str(note) for note in sorted(known.values(), key=lambda n: n.rank)[:3])
        message = f"rank {rank} does not answer: it is stopped, or hangs with the interpreter's lock held"
        return HangDiagnosis(rank, f"{message}; {waiting} waited for it; {limit}", silent=silent)
    outside = [note for note in known.values() if not note.is_waiting]
    if outside:
        cause = min(outside, key=lambda note: (note.moved, -note.still, note.rank))
        others = [note for note in known.values() if note is not cause]
        message = f"stands still for {cause.still:.1f} s" + (f"; {_listed(others)}" if others else "")
    else:
        cause, message = _out_of_step(list(known.values()))
    where = f"rank {cause.rank} on {cause.host}: step {cause.step}, phase {cause.phase}"
    return HangDiagnosis(cause.rank, f"{where}, {message}; at {cause.at}; {limit}", cause.stack)


def _listed(notes: list[HangReport]) -> str:
    notes = sorted(notes, key=lambda note: note.rank)
    shown = [f"{note} {'waits' if note.is_waiting else 'stands still'}" for note in notes]
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")


def _out_of_step(notes: list[HangReport]) -> tuple[HangReport, str]:
    places: dict[int, list[HangReport]] = {}
    for note in notes:
        places.setdefault(note.moved, []).append(note)
    groups = sorted(
        places.values(), key=lambda group: (len(group), not any(n.is_odd for n in group), -group[0].moved)
    )
    cause = min(groups[0], key=lambda note: note.rank)
    if len(groups) == 1:
        return cause, f"waits in the same collective as all ranks for {cause.still:.1f} s: check the network"
    other = groups[-1][0]
    return cause, f"waits in another collective than {other} for {cause.still:.1f} s: one left it out"


@dataclass(eq=False)
class Watch:
    """A thread that raises an alarm for its own rank and answers those of others.

    ``folder`` belongs to one attempt of a run, and all its ranks see it. ``leave`` is called with the
    diagnosis and this rank's own report, and ends the process. Time in which this thread did not run (a
    stopped process, an overloaded machine) does not count.
    """

    rank_status: RankStatus
    rank: int
    size: int
    folder: Path
    seconds: float
    leave: Callable[[HangDiagnosis, HangReport], None]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.tick = min(_MOST_TICK, max(_LEAST_TICK, self.seconds / _TICKS))
        least, most = ANSWER_SECONDS
        self.patience = min(most, max(least, self.seconds / _TICKS))
        self.still = 0.0
        self._mark = self.rank_status.mark
        self._looked = self.clock()
        self._main = threading.main_thread().ident or 0
        self._done = threading.Event()
        self._is_leaving = False
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> Watch:
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop watching. After an alarm this does not return: ``leave`` ends the process."""
        self._done.set()
        if self._is_leaving:
            self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(self.tick):
            if self.look():
                self._is_leaving = True
                # this needs neither the interpreter's lock nor a disk
                faulthandler.dump_traceback_later(self.patience + _LAST_SECONDS, exit=True, file=2)
                note = self.answer()
                self.leave(diagnose(self._answers(note), self.size, self.seconds), note)
                faulthandler.cancel_dump_traceback_later()  # reached if a test's `leave` returns
                return

    def look(self) -> bool:
        """Whether this rank or a peer has raised an alarm; called once a tick."""
        now = self.clock()
        # in a longer time the process was stopped
        passed, self._looked = min(now - self._looked, 2 * self.tick), now
        mark = self.rank_status.mark
        self.still = self.still + passed if mark == self._mark else 0.0
        self._mark = mark
        if self._is_stuck():
            with contextlib.suppress(OSError):  # the other ranks notice it themselves
                write_text(self.folder / ALARM, "", durable=False)
            return True
        return self.size > 1 and (self.folder / ALARM).exists()

    def _is_stuck(self) -> bool:
        """Whether this rank has not moved for too long; before its first step, whether a peer has not."""
        if self.rank_status.step:
            return self.still >= self.seconds
        return self.rank_status.is_waiting and self.still >= max(self.seconds, START_SECONDS)

    def answer(self) -> HangReport:
        """Write this rank's report for all ranks to read."""
        rank_status = self.rank_status
        frame = sys._current_frames().get(self._main)
        stack, others = _stacks(self._main)
        note = HangReport(
            rank=self.rank,
            step=rank_status.step,
            phase=rank_status.phase,
            moved=rank_status.moved,
            is_waiting=rank_status.is_waiting,
            is_odd=rank_status.is_waiting and rank_status.phase not in rank_status.usual,
            still=self.still,
            host=platform.node(),
            at=_innermost(frame),
            stack=stack,
            others=others,
        )
        with contextlib.suppress(OSError):
            write_json(self.folder / f"rank-{self.rank}.json", asdict(note), durable=False)
        return note

    def _answers(self, own: HangReport) -> list[HangReport]:
        """The reports of all ranks, or of those that have answered in time."""
        deadline = time.monotonic() + self.patience + self.tick
        missing, notes = set(range(self.size)) - {self.rank}, [own]
        while missing and time.monotonic() < deadline:
            for rank in sorted(missing):
                with contextlib.suppress(TypeError):  # keys are missing: there is no report yet
                    notes.append(HangReport(**read_json(self.folder / f"rank-{rank}.json")))
                    missing.discard(rank)
            if missing:
                time.sleep(_LEAST_TICK)
        return notes


def _innermost(frame: FrameType | None) -> str:
    found = traceback.extract_stack(frame, limit=3) if frame else []
    return " < ".join(f"{Path(at.filename).name}:{at.lineno} in {at.name}" for at in reversed(found))


def _stacks(main: int) -> tuple[str, str]:
    """The stack of the main thread and those of all others but this one, outermost frames first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    current = sys._current_frames()
    others = current.keys() - {main, threading.get_ident()}
    told = [f"{names.get(ident, ident)}:\n{_told(current[ident])}\n" for ident in others]
    return _told(current.get(main)), "".join(told)


def _told(frame: FrameType | None) -> str:
    return "".join(traceback.format_stack(frame)) if frame else ""
