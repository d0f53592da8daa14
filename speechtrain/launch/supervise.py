"""Run a command as a child process: pass stop signals on to it, and copy its log.

The command is one rank, or an agent (torchrun, mpirun) whose children are the ranks.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from speechtrain.errors import EXIT_PREEMPTED, print_notice
from speechtrain.files import open_append
from speechtrain.launch.launcher import PARENT, WORKER
from speechtrain.launch.process_tree import (
    children_of,
    descendants_of,
    descendants_running,
    handles_signal,
    kill,
)

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1  # the option of Linux's prctl that sends a signal when the parent process ends
_POLL_SECONDS = 0.2
_LAST_LINES_SECONDS = 5.0  # the time to copy the lines that an agent has written before its end
_QUIET_SECONDS = 30.0  # after this time without a rank, the agent's last line is shown
_TRACE = "Traceback (most recent call last):"
_OWN_LINES = ("speechtrain: ", "warning  ")  # the beginnings of lines that ranks write, not libraries
# The first line of a log record of torch: "E1121 03:40:12.123000 torch/distributed/…]", "[rank0]:[W1121 03:…"
_RECORD = re.compile(r"(\[\w+\]:)?\[?[A-Z]\d{4} \d\d:\d\d:\d\d")
# The further lines of a log record of torch's C++ code. Its last line is empty.
_RECORD_STACK = re.compile(r"Exception raised from |frame #\d+: |<omitting python frames>|$")


@contextmanager
def stop_signals(receive: Callable[[], None]) -> Iterator[None]:
    """Return a context in which each SIGINT and SIGTERM calls ``receive`` and does nothing else."""
    previous_handlers = {}
    for number in STOP_SIGNALS:
        previous_handlers[number] = signal.signal(number, lambda *_: receive())
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def wait_for_job(
    exit_code: Callable[[], int | None],
    stop: Callable[[int], bool],
    poll_seconds: float,
    start: Callable[[], None] = lambda: None,
) -> int:
    """Wait until a job on other machines has ended, and return its exit code.

    - ``start()`` is called first. Signals count from then on, so none is lost while the job starts.
    - ``exit_code()`` returns None while the job runs. It is called every ``poll_seconds``.
    - ``stop(signals)`` asks the cluster to stop the job, and returns whether the cluster accepted. After a
      SIGINT or SIGTERM it is called with the number of signals so far, at each poll until it returns True.

    Raises KeyboardInterrupt at the end of the job if there were two signals.
    """
    signal_count = 0

    def receive() -> None:
        nonlocal signal_count
        signal_count += 1

    accepted_count = 0  # the signals for which the cluster has accepted the stop request
    pause = min(0.1, poll_seconds)
    with stop_signals(receive):
        start()
        while True:
            current_count = signal_count  # A further signal may come while ``stop`` runs.
            if current_count > accepted_count and stop(current_count):
                accepted_count = current_count
            code = exit_code()
            if code is not None:
                break
            deadline = time.monotonic() + poll_seconds
            # This first pause also limits the polls of a cluster that does not accept a stop request.
            time.sleep(pause)
            while time.monotonic() < deadline and signal_count == accepted_count:
                time.sleep(pause)
    if signal_count > 1:
        raise KeyboardInterrupt
    return code


def supervise(
    command: list[str],
    environment: Mapping[str, str],
    agent_log: Path | None = None,
    has_indirect_ranks: bool = False,
) -> int:
    """Run ``command`` in a new session and return its exit code.

    - The first SIGINT or SIGTERM to this process is passed on as SIGTERM, which means "save and exit".
    - The second one kills the command and all its descendants, and raises KeyboardInterrupt.
    - The new session keeps a terminal's Ctrl-C away from the command, which gets its signals from here.
    - Both signals are blocked in the child from its first instruction. A worker unblocks them once it can
      handle them. Otherwise a signal that comes while the worker imports its libraries would kill it.

    With ``agent_log``, the command is an agent whose children are the ranks:

    - The first signal is sent to the ranks, not to the agent. An agent that gets a signal ends its ranks.
    - All lines of stderr are appended to ``agent_log``. The lines of the ranks also go to this process's
      stderr.
    - The agent is killed when this process ends (Linux).
    - An agent without ranks is killed after the first signal, and the code is ``EXIT_PREEMPTED``.
    - ``has_indirect_ranks`` says that there are further processes between the agent and the ranks (MPI). Then
      an agent without ranks is not killed.
    """
    environment = {**environment, PARENT: str(os.getpid())}
    child = _Child(is_agent=agent_log is not None, has_indirect_ranks=has_indirect_ranks)
    stderr, before_exec = None, None
    if child.is_agent:
        stderr, before_exec = subprocess.PIPE, _kill_with_parent()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    with stop_signals(child.receive):
        try:
            process = subprocess.Popen(
                command,
                env=environment,
                start_new_session=True,
                stderr=stderr,
                text=True,
                errors="backslashreplace",
                preexec_fn=before_exec,
            )
            child.pid = process.pid
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        child.handle_signals()  # Another thread may have got a signal before the child had a pid.
        code = _wait_for_agent(process, child, _AgentLog(agent_log)) if agent_log else process.wait()
    if child.signals > 1:
        raise KeyboardInterrupt
    return code


@dataclass(eq=False)
class _Child:
    """A child process and the stop signals for it. If the child is an agent, its ranks get the signals."""

    is_agent: bool
    has_indirect_ranks: bool  # whether there are further processes between the agent and its ranks
    pid: int = 0  # 0 until the child has been started
    signals: int = 0  # the number of stop signals so far
    signalled_pids: set[int] = field(default_factory=set)  # the processes that have got SIGTERM
    warning_time: float = field(default_factory=lambda: time.monotonic() + _QUIET_SECONDS)
    has_ranks: bool = False
    """Whether a rank has been seen. From then on the agent ends, or starts the ranks again, by itself."""

    def receive(self) -> None:
        """Count a stop signal, and handle it."""
        self.signals += 1
        self.handle_signals()

    def handle_signals(self) -> None:
        """Pass the first signal on, and kill at the second one. Before the child has started, do nothing."""
        if not self.pid or not self.signals:  # A signal to pid 0 would go to this process's group.
            return
        if self.signals == 1:
            self.pass_on()
        else:
            self.kill()

    def check_agent(self, last_line: str) -> None:
        """Do the regular work for a running agent. ``supervise`` calls this every ``_POLL_SECONDS``.

        After a first signal, kill an agent that has no ranks, or pass the signal on to new ranks. If an agent
        has no ranks for a long time, show the last line of its log once.
        """
        if not self.has_ranks:  # Ranks below further processes count as seen, because nobody looks for them.
            self.has_ranks = self.has_indirect_ranks or bool(children_of(self.pid))
        if self.signals == 1 and self.has_ranks:
            self.pass_on()
        elif self.signals == 1:
            self.kill()
        elif last_line and not self.has_ranks and time.monotonic() > self.warning_time:
            self.warning_time = math.inf
            print_notice(f"warning: no rank runs yet; {last_line}")

    def kill(self) -> None:
        """Kill the child's session and all descendants, some of which may have sessions of their own."""
        descendants = descendants_of(self.pid)  # A process without a parent is not found.
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        for pid in descendants:
            kill(pid)

    def pass_on(self) -> None:
        """Send SIGTERM to the child, or to each rank of an agent, unless the process has already got it.

        Ranks may start after the signal, so this method is called again.
        """
        if not self.is_agent:
            pids = {self.pid}
        elif self.has_indirect_ranks:
            # MPI engines unblock the signals in ranks. A rank that does not handle SIGTERM yet gets it later.
            workers = descendants_running(self.pid, WORKER)
            pids = {pid for pid in workers if handles_signal(pid, signal.SIGTERM)}
        else:
            pids = children_of(self.pid)
            if pids:
                self.has_ranks = True
        for pid in pids - self.signalled_pids:
            self.signalled_pids.add(pid)
            kill(pid, signal.SIGTERM)


def _kill_with_parent() -> Callable[[], None] | None:
    """Return a function that a child calls before it runs its command: it is then killed with this process.

    Returns None if the system is not Linux.
    """
    try:
        # The library is loaded here, before the fork. In the child, the loader could wait forever for a lock
        # that another thread of this process held at the fork.
        prctl = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):
        return None
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait_for_agent(process: subprocess.Popen[str], child: _Child, log: _AgentLog) -> int:
    """Wait for an agent, copy its stderr and handle its signals.

    Returns the agent's exit code, or ``EXIT_PREEMPTED`` if it was killed because it had no ranks.
    """
    thread = threading.Thread(target=log.copy, args=(process.stderr,), daemon=True)
    thread.start()
    code = None
    while code is None:
        child.check_agent(log.last_line)
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(_POLL_SECONDS)
    thread.join(_LAST_LINES_SECONDS)  # A process that outlives the agent may keep the pipe open.
    return EXIT_PREEMPTED if child.signals == 1 and not child.has_ranks else code


@dataclass(eq=False)
class _AgentLog:
    """Copies the stderr of an agent and its ranks to a log, and the lines of the ranks to this stderr."""

    path: Path
    last_line: str = ""  # the latest line that is not empty
    is_in_trace: bool = False  # whether the latest line belongs to a Python traceback
    is_in_record: bool = False  # whether the latest line belongs to a log record of torch

    def copy(self, stream: IO[str]) -> None:
        """Copy all lines until the end of ``stream``."""
        with stream:
            for line in stream:
                self._copy_line(line)

    def _copy_line(self, line: str) -> None:
        with suppress(OSError), open_append(self.path) as file:  # A full disk must not block ranks.
            file.write(line.encode())
        if line.strip():
            self.last_line = line.strip()
        is_record_start = _RECORD.match(line) is not None
        # A traceback has no clear end. The next line that speechtrain itself has written ends it.
        if _TRACE in line:
            self.is_in_trace = True
        elif line.startswith(_OWN_LINES):
            self.is_in_trace = False
        continues_record = self.is_in_record and _RECORD_STACK.match(line) is not None
        self.is_in_record = is_record_start or continues_record
        if not self.is_in_trace and not self.is_in_record:
            sys.stderr.write(line)
            sys.stderr.flush()
