"""The watchdog. It names a rank that hangs, reports the state of each rank, and ends all ranks.

The trainer and the process group set a rank's step and phase as attributes. A thread of each rank reads them,
and nothing is written while a run moves. A rank that has not moved for too long raises an alarm, which is a
file in the run directory that all ranks look for. Each rank then writes a report with its phase and its
stack. All ranks make the same diagnosis from the reports, and exit. This module does not import torch.
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
# Before its first step, a rank may wait this time for a peer, because the peer may read data and compile.
START_SECONDS = 1800.0
REPORT_SECONDS = (2.0, 30.0)  # lowest and highest limit for the reports. Network file systems are slow.
MARGIN_SECONDS = 60.0  # the timeout of a collective is longer by this, so that the watchdog reports first
_EXIT_SECONDS = 6.0  # from the limit for reports to a forced exit, even if this thread hangs
_MIN_TICK, _MAX_TICK = 0.1, 2.0
_TICKS = 20  # checks within the time limit of a phase

_Arguments = ParamSpec("_Arguments")
_Returned = TypeVar("_Returned")


class RankStatus:
    """A rank's step and phase, for its watchdog. Setting them takes 0.2 µs, without input or output."""

    def __init__(self) -> None:
        self.step = 0
        self.phase = "start"
        self.phase_count = 0  # phases so far. Every rank has the same phases, so a lower count is behind.
        self.collective_phases: set[str] = set()  # phases in which a collective has completed
        self._entered = 0
        self._left = 0
        self._lock = threading.Lock()  # Threads of a backend also call ``leave``.

    def begin_phase(self, step: int, phase: str) -> None:
        """Record that the rank starts ``phase`` of ``step``, or the next part of a long phase."""
        self.step, self.phase = step, phase
        self.phase_count += 1

    def enter(self) -> None:
        """Record that a collective starts."""
        with self._lock:
            self._entered += 1

    def leave(self) -> None:
        """Record that a collective has completed."""
        with self._lock:
            self._left += 1
        self.collective_phases.add(self.phase)

    @property
    def is_waiting(self) -> bool:
        """Whether a collective has started and not completed."""
        return self._entered > self._left

    @property
    def counts(self) -> tuple[int, int, int]:
        """The numbers of phases, started and completed collectives. One of them changes if the rank moves."""
        return self.phase_count, self._entered, self._left

    def __str__(self) -> str:
        return f"step {self.step}, {self.phase}"


def collective(
    method: Callable[Concatenate[Any, _Arguments], _Returned],
) -> Callable[Concatenate[Any, _Arguments], _Returned]:
    """Make ``method``, which waits for all peers, record its start and end in ``self.rank_status``."""

    @functools.wraps(method)
    def recorded(self: Any, /, *arguments: _Arguments.args, **keywords: _Arguments.kwargs) -> _Returned:
        self.rank_status.enter()
        returned = method(self, *arguments, **keywords)  # If this raises, the collective has not completed.
        self.rank_status.leave()
        return returned

    return recorded


@dataclass(frozen=True)
class HangReport:
    """A rank's state after an alarm."""

    rank: int
    step: int
    phase: str
    phase_count: int
    is_waiting: bool = False
    is_odd: bool = False  # The rank waits for a collective, and this phase never had one before.
    still_seconds: float = 0.0  # the time since the rank moved
    host: str = ""
    location: str = ""  # the innermost frames of the main thread
    stack: str = ""  # the stack of the main thread
    other_stacks: str = ""  # the stacks of the other threads

    def __str__(self) -> str:
        return f"rank {self.rank} (step {self.step}, {self.phase})"


@dataclass(frozen=True)
class HangDiagnosis:
    """The rank that hangs, and the message about it."""

    rank: int
    message: str
    stack: str = ""
    silent_ranks: frozenset[int] = field(default_factory=frozenset)


class Stuck(MachineError):
    """A rank does not move, or waits in another collective than its peers."""


def diagnose(reports: Iterable[HangReport], size: int, seconds: float) -> HangDiagnosis:
    """Find the rank that the others wait for. The same reports give the same diagnosis on every rank.

    - If ranks have no report, it is the first of them.
    - Else, if ranks are outside of collectives, it is the one that is furthest behind.
    - Else, all ranks wait, and it is the rank that waits in another collective than most ranks.

    If as many ranks wait in one collective as in another, it is the rank in a phase that had no collective
    before. If both phases had collectives, it is the rank ahead, which has left out a collective.
    """
    reports = sorted(reports, key=lambda report: report.rank)
    silent = frozenset(range(size)) - {report.rank for report in reports}
    limit = f"trainer.timeout_seconds={seconds:g} sets the limit"
    if silent:
        rank = min(silent)
        waiting = ", ".join(map(str, reports[:3]))
        message = f"rank {rank} does not answer: it is stopped, or hangs with the interpreter's lock held"
        return HangDiagnosis(rank, f"{message}; {waiting} waited for it; {limit}", silent_ranks=silent)
    outside = [report for report in reports if not report.is_waiting]
    if outside:
        # The lowest phase count is furthest behind. Then the rank that has stood still longest is.
        cause = min(outside, key=lambda report: (report.phase_count, -report.still_seconds, report.rank))
        message = f"stands still for {cause.still_seconds:.1f} s"
        if size > 1:
            message += f"; {_list_states([report for report in reports if report is not cause])}"
    else:
        cause, message = _rank_in_other_collective(reports)
    position = f"rank {cause.rank} on {cause.host}: step {cause.step}, phase {cause.phase}"
    return HangDiagnosis(cause.rank, f"{position}, {message}; at {cause.location}; {limit}", cause.stack)


def _list_states(reports: list[HangReport]) -> str:
    """Return the states of at most three ranks, and the number of the remaining ranks."""
    states = []
    for report in reports[:3]:
        state = "waits" if report.is_waiting else "stands still"
        states.append(f"{report} {state}")
    text = ", ".join(states)
    if len(reports) > 3:
        text += f" and {len(reports) - 3} more"
    return text


def _rank_in_other_collective(reports: list[HangReport]) -> tuple[HangReport, str]:
    """Return the rank that waits in another collective than most ranks, with a message."""
    groups: dict[int, list[HangReport]] = {}
    for report in reports:
        groups.setdefault(report.phase_count, []).append(report)

    def sort_key(group: list[HangReport]) -> tuple[int, bool, int]:
        """Order groups: the smallest first, then one in an odd phase, then the one that is furthest ahead."""
        has_odd_rank = any(report.is_odd for report in group)
        phases_behind = -group[0].phase_count
        return len(group), not has_odd_rank, phases_behind

    likeliest, *other_groups = sorted(groups.values(), key=sort_key)
    cause = likeliest[0]
    seconds = f"for {cause.still_seconds:.1f} s"
    if not other_groups:
        return cause, f"waits in the same collective as all ranks {seconds}: check the network"
    peer = other_groups[-1][0]
    return cause, f"waits in another collective than {peer} {seconds}: one left it out"


@dataclass(eq=False)
class Watch:
    """A thread that raises an alarm for its rank and answers the alarms of other ranks.

    ``folder`` belongs to one attempt of a run, and all its ranks see it. The function ``leave``
    gets the diagnosis and this rank's report, and ends the process. Time in which this thread did not run (in
    a stopped process, or on an overloaded machine) does not count.
    """

    rank_status: RankStatus
    rank: int
    size: int
    folder: Path
    seconds: float
    leave: Callable[[HangDiagnosis, HangReport], None]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.tick = min(_MAX_TICK, max(_MIN_TICK, self.seconds / _TICKS))
        shortest, longest = REPORT_SECONDS
        self.report_seconds = min(longest, max(shortest, self.seconds / _TICKS))
        self.still_seconds = 0.0
        self._counts = self.rank_status.counts
        self._last_look = self.clock()
        self._main_thread = threading.main_thread().ident or 0
        self._is_closed = threading.Event()
        self._is_leaving = False
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> Watch:
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop watching. After an alarm this does not return, because ``leave`` ends the process."""
        self._is_closed.set()
        if self._is_leaving:
            self._thread.join()

    def _run(self) -> None:
        while not self._is_closed.wait(self.tick):
            if self.find_alarm():
                self._is_leaving = True
                # The forced exit needs neither the interpreter's lock nor a disk.
                faulthandler.dump_traceback_later(self.report_seconds + _EXIT_SECONDS, exit=True, file=2)
                report = self.write_report()
                self.leave(diagnose(self._collect_reports(report), self.size, self.seconds), report)
                faulthandler.cancel_dump_traceback_later()  # Only the ``leave`` of a test returns.
                return

    def find_alarm(self) -> bool:
        """Raise an alarm if this rank is stuck. Return whether this rank or a peer has raised one.

        The thread calls this once a tick.
        """
        look_time = self.clock()
        # If more time has passed, the process was stopped.
        passed_seconds = min(look_time - self._last_look, 2 * self.tick)
        self._last_look = look_time
        counts = self.rank_status.counts
        self.still_seconds += passed_seconds
        if counts != self._counts:
            self.still_seconds = 0.0
        self._counts = counts
        if self._is_stuck():
            with contextlib.suppress(OSError):  # Without the file, the other ranks still notice the hang.
                write_text(self.folder / ALARM, "", durable=False)
            return True
        return self.size > 1 and (self.folder / ALARM).exists()

    def _is_stuck(self) -> bool:
        """Return whether this rank has not moved for too long.

        Before its first step a rank may take any time. It is stuck if it waits too long for a peer.
        """
        if self.rank_status.step:
            return self.still_seconds >= self.seconds
        return self.rank_status.is_waiting and self.still_seconds >= max(self.seconds, START_SECONDS)

    def write_report(self) -> HangReport:
        """Write this rank's report for all ranks to read, and return it."""
        rank_status = self.rank_status
        frame = sys._current_frames().get(self._main_thread)
        stack, other_stacks = _stacks(self._main_thread)
        report = HangReport(
            rank=self.rank,
            step=rank_status.step,
            phase=rank_status.phase,
            phase_count=rank_status.phase_count,
            is_waiting=rank_status.is_waiting,
            is_odd=rank_status.is_waiting and rank_status.phase not in rank_status.collective_phases,
            still_seconds=self.still_seconds,
            host=platform.node(),
            location=_innermost_frames(frame),
            stack=stack,
            other_stacks=other_stacks,
        )
        with contextlib.suppress(OSError):
            write_json(self.folder / f"rank-{self.rank}.json", asdict(report), durable=False)
        return report

    def _collect_reports(self, report: HangReport) -> list[HangReport]:
        """Return ``report``, which is this rank's, and the reports of the ranks that answer in time."""
        deadline = time.monotonic() + self.report_seconds + self.tick
        reports = [report]
        missing_ranks = set(range(self.size)) - {self.rank}
        while missing_ranks and time.monotonic() < deadline:
            for rank in sorted(missing_ranks):
                fields = read_json(self.folder / f"rank-{rank}.json")
                if not fields:
                    continue  # The rank has not written its report yet.
                with contextlib.suppress(TypeError):  # Other fields are not a report.
                    reports.append(HangReport(**fields))
                    missing_ranks.discard(rank)
            if missing_ranks:
                time.sleep(_MIN_TICK)
        return reports


def _innermost_frames(frame: FrameType | None) -> str:
    """Return file, line and function of the three innermost frames, the innermost first."""
    if frame is None:
        return ""
    calls = reversed(traceback.extract_stack(frame, limit=3))
    return " < ".join(f"{Path(call.filename).name}:{call.lineno} in {call.name}" for call in calls)


def _stacks(main_thread: int) -> tuple[str, str]:
    """Return the stack of the main thread, and the stacks of all other threads except the caller's.

    The outermost frames stand first.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    other_stacks = ""
    for ident in frames.keys() - {main_thread, threading.get_ident()}:
        other_stacks += f"{names.get(ident, ident)}:\n{_stack_text(frames[ident])}\n"
    return _stack_text(frames.get(main_thread)), other_stacks


def _stack_text(frame: FrameType | None) -> str:
    return "".join(traceback.format_stack(frame)) if frame else ""
