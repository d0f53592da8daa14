"""The watchdog: it finds the rank that hangs, reports the state of every rank, and ends all ranks.

1. The trainer and the process group set the step and phase of a rank in its ``RankStatus``.
2. A thread of each rank, the ``Watch``, checks this status. It writes no file while the rank makes progress.
3. A rank without progress for too long writes an empty file in the run directory.
   All ranks look for this file.
4. Each rank then writes a ``HangReport`` with its phase and its stack.
5. All ranks make the same ``HangDiagnosis`` from the reports, and exit.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from speechtrain.distributed.rank_status import RankStatus
from speechtrain.errors import MachineError
from speechtrain.files import read_json, write_json, write_text
from speechtrain.launch.process_tree import kill_descendants
from speechtrain.rank.attempt import Attempt
from speechtrain.run_directory import ERROR, STUCK, rank_folder, write_result

HANG = "hang"
"""The name of the empty file by which a rank tells all ranks that it hangs."""
# Before its first step, a rank may wait for a peer for this time, because the peer may read data and compile.
START_SECONDS = 1800.0
# After a hang, ranks wait at least and at most this time for reports. Network file systems are slow.
REPORT_SECONDS = (2.0, 30.0)
# The timeout of a collective is longer than the watchdog's limit by this time. So the watchdog reports first.
MARGIN_SECONDS = 60.0
# The process exits by force this time after the wait for reports, even if the watchdog's thread hangs.
_EXIT_SECONDS = 6.0
_MIN_TICK, _MAX_TICK = 0.1, 2.0  # seconds between two checks
_TICKS = 20  # checks within the time limit of a phase
_RANK0_HEAD_START_SECONDS = 1.0
"""Other ranks exit later by this time, so that rank 0 can print before torchrun kills all ranks."""


@dataclass(frozen=True)
class HangReport:
    """The state of a rank after a hang."""

    rank: int
    step: int
    phase: str
    phase_count: int
    is_waiting: bool = False  # in a collective
    is_odd: bool = False  # in a collective, in a phase in which no collective of this rank has completed
    still_seconds: float = 0.0  # the time since the last progress
    host: str = ""
    location: str = ""  # the innermost frames of the main thread
    stack: str = ""  # the stack of the main thread
    other_stacks: str = ""  # the stacks of the other threads

    def __str__(self) -> str:
        return f"rank {self.rank} (step {self.step}, {self.phase})"


@dataclass(frozen=True)
class HangDiagnosis:
    """The rank that causes the hang, and the message about it."""

    rank: int
    message: str
    reporter: int  # the rank whose result has the message: the same rank, or the first one that answers
    stack: str = ""  # the stack of the rank's main thread


class Stuck(MachineError):
    """A rank makes no progress, or waits in another collective than its peers."""


def diagnose(reports: Iterable[HangReport], size: int, seconds: float) -> HangDiagnosis:
    """Return which of ``size`` ranks causes the hang. ``seconds`` is the time limit, for the message.

    Every rank makes the same diagnosis from the same reports. The first rule that applies finds the rank:

    1. Some ranks have no report: the lowest of them.
    2. Some ranks are outside of collectives: the one that is furthest behind.
    3. All ranks wait in collectives: the one in a collective with fewer ranks than the others.
       If two collectives have the same number of ranks, it is the rank in a phase that had no collective
       before. If both phases had collectives, it is the rank ahead, which has left out a collective.
    """
    reports = sorted(reports, key=lambda report: report.rank)
    silent = set(range(size)) - {report.rank for report in reports}
    limit = f"trainer.timeout_seconds={seconds:g} sets the limit"
    if silent:
        rank = min(silent)
        message = f"rank {rank} does not answer: it is stopped, or hangs with the interpreter's lock held"
        return HangDiagnosis(rank, f"{message}; {_list_states(reports)}; {limit}", reports[0].rank)
    outside_collectives = [report for report in reports if not report.is_waiting]
    if outside_collectives:
        # The furthest behind has the lowest phase count. Of several, it has been still for the longest time.
        cause = min(outside_collectives, key=lambda report: (report.phase_count, -report.still_seconds))
        message = f"stands still for {cause.still_seconds:.1f} s"
        if size > 1:
            peers = [report for report in reports if report is not cause]
            message += f"; {_list_states(peers)}"
    else:
        cause, message = _rank_in_other_collective(reports)
    position = f"rank {cause.rank} on {cause.host}: step {cause.step}, phase {cause.phase}"
    message = f"{position}, {message}; at {cause.location}; {limit}"
    return HangDiagnosis(cause.rank, message, cause.rank, cause.stack)


def _list_states(reports: list[HangReport]) -> str:
    """Return a text with the states of the first three ranks and the number of further ranks."""
    states = []
    for report in reports[:3]:
        state = "waits" if report.is_waiting else "stands still"
        states.append(f"{report} {state}")
    text = ", ".join(states)
    if len(reports) > 3:
        text += f" and {len(reports) - 3} more"
    return text


def _rank_in_other_collective(reports: list[HangReport]) -> tuple[HangReport, str]:
    """Return the report of the rank that waits in another collective than most ranks, and a message.

    Ranks with the same phase count wait in the same collective.
    """
    groups: dict[int, list[HangReport]] = {}  # by phase count
    for report in reports:
        groups.setdefault(report.phase_count, []).append(report)

    def sort_key(group: list[HangReport]) -> tuple[int, bool, int]:
        """Order groups by size, then groups with an odd rank first, then the group furthest ahead first."""
        has_odd_rank = any(report.is_odd for report in group)
        phase_count = group[0].phase_count
        return len(group), not has_odd_rank, -phase_count

    likeliest_group, *other_groups = sorted(groups.values(), key=sort_key)
    cause = likeliest_group[0]
    duration = f"for {cause.still_seconds:.1f} s"
    if not other_groups:
        return cause, f"waits in the same collective as all ranks {duration}: check the network"
    largest_group = other_groups[-1]
    return cause, f"waits in another collective than {largest_group[0]} {duration}: one left it out"


@dataclass(eq=False)
class Watch:
    """A thread that tells the other ranks if its rank hangs, and reacts if another rank hangs.

    Time in which this thread did not run (in a stopped process, or on an overloaded machine) does not count.
    """

    rank_status: RankStatus
    rank: int
    size: int  # the number of ranks
    folder: Path  # the files of one attempt of the run. All its ranks read and write here.
    seconds: float  # the time limit of a rank without progress
    leave: Callable[[HangDiagnosis, HangReport], None]  # gets this rank's report, and ends the process
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.tick = min(_MAX_TICK, max(_MIN_TICK, self.seconds / _TICKS))
        shortest, longest = REPORT_SECONDS
        self.report_seconds = min(longest, max(shortest, self.seconds / _TICKS))
        self.still_seconds = 0.0
        self._last_counts = self.rank_status.counts
        self._last_check_time = self.clock()
        self._is_closed = threading.Event()
        self._has_hung = False
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> Watch:
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop watching. After a hang this does not return, because ``leave`` ends the process."""
        self._is_closed.set()
        if self._has_hung:
            self._thread.join()

    def _run(self) -> None:
        while not self._is_closed.wait(self.tick):
            if self.check_hang():
                self._has_hung = True
                # The forced exit needs neither the interpreter's lock nor a disk. File 2 is stderr.
                faulthandler.dump_traceback_later(self.report_seconds + _EXIT_SECONDS, exit=True, file=2)
                report = self.write_report()
                diagnosis = diagnose(self._collect_reports(report), self.size, self.seconds)
                self.leave(diagnosis, report)
                faulthandler.cancel_dump_traceback_later()  # Only the ``leave`` of a test returns.
                return

    def check_hang(self) -> bool:
        """Return whether this rank or a peer hangs. If this rank hangs, tell the peers.

        The thread calls this method at each tick.
        """
        check_time = self.clock()
        # The process was stopped if more than two ticks have passed. The surplus does not count.
        passed_seconds = min(check_time - self._last_check_time, 2 * self.tick)
        self._last_check_time = check_time
        counts = self.rank_status.counts
        if counts == self._last_counts:
            self.still_seconds += passed_seconds
        else:
            self.still_seconds = 0.0
        self._last_counts = counts
        hang_file = self.folder / HANG
        if self._is_stuck():
            # If the file cannot be written, the other ranks notice the hang by their own limits.
            with contextlib.suppress(OSError):
                write_text(hang_file, "", durable=False)
            return True
        return self.size > 1 and hang_file.exists()

    def _is_stuck(self) -> bool:
        """Return whether this rank has made no progress for too long.

        Before its first step, a rank may compute for any time. It is stuck only if it waits for a peer for
        ``START_SECONDS`` and for the limit.
        """
        if self.rank_status.step:
            return self.still_seconds >= self.seconds
        return self.rank_status.is_waiting and self.still_seconds >= max(self.seconds, START_SECONDS)

    def write_report(self) -> HangReport:
        """Write this rank's report to ``folder``, for all ranks. Return the report."""
        status = self.rank_status
        frames = sys._current_frames()
        stacks = {}  # by the name of the thread. The outermost frame of a stack comes first.
        for thread in threading.enumerate():
            if thread.ident in frames:
                stacks[thread.name] = "".join(traceback.format_stack(frames[thread.ident]))
        main_thread = threading.main_thread()
        calls = traceback.extract_stack(frames[main_thread.ident or 0], limit=3)[::-1]
        report = HangReport(
            rank=self.rank,
            step=status.step,
            phase=status.phase,
            phase_count=status.phase_count,
            is_waiting=status.is_waiting,
            is_odd=status.is_waiting and status.phase not in status.collective_phases,
            still_seconds=self.still_seconds,
            host=platform.node(),
            location=" < ".join(f"{Path(call.filename).name}:{call.lineno} in {call.name}" for call in calls),
            stack=stacks.pop(main_thread.name),
            other_stacks="\n".join(f"{name}:\n{stack}" for name, stack in stacks.items()),
        )
        with contextlib.suppress(OSError):
            write_json(self.folder / f"rank-{self.rank}.json", asdict(report), durable=False)
        return report

    def _collect_reports(self, own_report: HangReport) -> list[HangReport]:
        """Return ``own_report`` and the reports that other ranks write in time."""
        # Another rank may notice the hang one tick later than this rank.
        deadline = time.monotonic() + self.report_seconds + self.tick
        reports = [own_report]
        missing_ranks = set(range(self.size)) - {self.rank}
        while missing_ranks and time.monotonic() < deadline:
            for rank in sorted(missing_ranks):
                fields = read_json(self.folder / f"rank-{rank}.json")
                if not fields:
                    continue  # The rank has not written its report yet.
                with contextlib.suppress(TypeError):  # The file has other fields than a report.
                    reports.append(HangReport(**fields))
                    missing_ranks.discard(rank)
            if missing_ranks:
                time.sleep(_MIN_TICK)
        return reports


def watch(attempt: Attempt, run_dir: Path, seconds: float) -> Watch:
    """Start and return this rank's watchdog. All ranks must call this function.

    A rank without progress for ``seconds`` counts as stuck. The reports of all ranks are in the same folder,
    whose name is the start time of rank 0.
    """
    group, world = attempt.group, attempt.group.world
    start_time = group.from_rank_0(time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()))
    folder = run_dir / STUCK / start_time
    leave = partial(_exit_stuck, attempt, rank_folder(run_dir, world.rank))
    watchdog = Watch(group.rank_status, world.rank, world.size, folder=folder, seconds=seconds, leave=leave)
    return watchdog.start()


def _exit_stuck(attempt: Attempt, folder: Path, diagnosis: HangDiagnosis, report: HangReport) -> NoReturn:
    """Write the failed result of this rank and end its process, although its main thread may hang.

    ``diagnosis`` is the same on all ranks and names the stuck rank. ``report`` has the phase and the stack of
    this rank.
    """
    # The reporter is marked as the cause of the failure. The launcher kills ranks that do not answer.
    is_reporter = report.rank == diagnosis.reporter
    message = f"{report}: rank {diagnosis.rank} is stuck"
    if is_reporter:
        message = diagnosis.message
    failure = {"rank": report.rank, "failed_at": time.time(), "is_cause": is_reporter}
    result = {**attempt.result(), "error": message, "exit_code": Stuck.exit_code, **failure}
    with contextlib.suppress(OSError):
        write_text(
            folder / ERROR, f"{diagnosis.message}\n\n{report.other_stacks}{report.stack}", durable=False
        )
        write_result(folder, result)
    with contextlib.suppress(OSError, ValueError):
        stack = f"speechtrain: the stack of rank {diagnosis.rank}:\n{diagnosis.stack}"
        print(stack, file=sys.stderr, flush=True)
    if report.rank:
        time.sleep(_RANK0_HEAD_START_SECONDS)
    kill_descendants(os.getpid())
    os._exit(Stuck.exit_code)
