"""Run a command as a child process: its stop signals, its ranks and its log."""

from __future__ import annotations

import ctypes
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
from speechtrain.launcher import PARENT, WORKER
from speechtrain.supervision.process_tree import children_of, descendants_running, handles_signal, kill

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.2
_LAST_LINES_SECONDS = 5.0  # for the lines that an agent has written before its end
_QUIET_SECONDS = 30.0  # after this time without a rank, the agent's last line is shown
_TRACE = "Traceback (most recent call last):"
_OURS = ("speechtrain: ", "warning  ")
# the first line of a record of torch: "E1121 03:40:12.123000 torch/distributed/…]", "[rank0]:[W1121 03:40 …"
_RECORD = re.compile(r"(\[\w+\]:)?\[?[A-Z]\d{4} \d\d:\d\d:\d\d")
# the further lines of a record of torch's C++, of which the last is empty
_RECORD_STACK = re.compile(r"Exception raised from |frame #\d+: |<omitting python frames>|$")
# Torchrun writes this when it ends a rank after the failure of another rank.
_CLOSING = re.compile(r"Sending process (\d+) closing signal")


@contextmanager
def stop_signals(receive: Callable[[], None]) -> Iterator[None]:
    """Return a context in which each SIGINT and SIGTERM calls ``receive`` and does nothing else."""
    previous = {number: signal.signal(number, lambda *_: receive()) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def wait_for_job(
    exit_code: Callable[[], int | None], stop: Callable[[int], bool], poll_seconds: float
) -> int:
    """Wait until a job on other machines has ended, and return its exit code.

    ``exit_code`` returns None until then. After a SIGINT or SIGTERM, ``stop`` is called with the number of
    signals so far, at each poll until it returns True. Raises KeyboardInterrupt after two signals.
    """
    signals = 0

    def receive() -> None:
        nonlocal signals
        signals += 1

    signals_handled = 0
    pause = min(0.1, poll_seconds)
    with stop_signals(receive):
        while True:
            signals_seen = signals
            if signals_seen > signals_handled and stop(signals_seen):
                signals_handled = signals_seen
            code = exit_code()
            if code is not None:
                break
            deadline = time.monotonic() + poll_seconds
            time.sleep(pause)  # This also slows the polls of a cluster that does not answer a stop request.
            while time.monotonic() < deadline and signals == signals_handled:
                time.sleep(pause)
    if signals > 1:
        raise KeyboardInterrupt
    return code


def supervise(
    command: list[str],
    environment: Mapping[str, str],
    agent_log: Path | None = None,
    is_deep: bool = False,
    grace: float | None = None,
) -> int:
    """Run ``command`` in a new session and return its exit code.

    The first SIGINT or SIGTERM is passed on as SIGTERM (save and exit). The second kills the command and
    all its descendants, and raises KeyboardInterrupt. Without a new session, the command would get a
    terminal's Ctrl-C at the same time as this process.

    Both signals are blocked in the child from its first instruction. A worker unblocks them once it can
    handle them. Otherwise a signal that comes while it imports its libraries would kill it.

    With ``agent_log``, the command is an agent whose children are the ranks:

    - The first signal is sent to the ranks, because an agent that gets a signal ends them.
    - The agent's stderr goes to that file, and the ranks' lines go to stderr, too.
    - The agent is killed when this process ends (Linux).
    - An agent without ranks is killed after the first signal, and the code is ``EXIT_PREEMPTED``.
    - With ``is_deep`` there are further processes between the agent and the ranks, and an agent without
      ranks is not killed.
    - A rank that torchrun ends after the failure of another rank is killed ``grace`` seconds later. A rank
      that is inside a library does not handle the signal.
    """
    environment = {**environment, PARENT: str(os.getpid())}
    child = _Child(is_agent=agent_log is not None, is_deep=is_deep)
    stderr, prepare = None, None
    if child.is_agent:
        stderr, prepare = subprocess.PIPE, _kill_with_parent()
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
                preexec_fn=prepare,
            )
            child.pid = process.pid
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        if agent_log is None:
            code = process.wait()
        else:
            code = _wait_for_agent(process, child, _AgentLog(agent_log, process.pid, grace))
    if child.signals > 1:
        raise KeyboardInterrupt
    return code


@dataclass(eq=False)
class _Child:
    """A child process and its stop signals. The signals of an agent go to its ranks."""

    is_agent: bool
    is_deep: bool
    pid: int = 0
    signals: int = 0
    signalled_pids: set[int] = field(default_factory=set)
    warning_time: float = field(default_factory=lambda: time.monotonic() + _QUIET_SECONDS)
    has_warned: bool = False
    has_ranks: bool = False
    """A rank has been seen. From then on the agent ends, or starts the ranks again, by itself."""
    is_killed_without_ranks: bool = False

    def receive(self) -> None:
        self.signals += 1
        if not self.pid:  # The child could not be started. Pid 0 would mean the group of this process.
            return
        if self.signals == 1:
            self.pass_on()
        else:
            self.kill()

    def check_agent(self, last_line: str) -> None:
        """Kill an agent without ranks after a signal, and pass the signal on to new ranks.

        If an agent has no ranks for a long time, show once its last line.
        """
        self.has_ranks = self.has_ranks or self.is_deep or bool(children_of(self.pid))
        if not self.has_ranks:
            if self.signals == 1:
                self.is_killed_without_ranks = True
                self.kill()
            elif last_line and not self.has_warned and time.monotonic() > self.warning_time:
                self.has_warned = True
                print_notice(f"warning: no rank runs yet; {last_line}")
        if self.signals == 1:
            self.pass_on()

    def kill(self) -> None:
        descendants = children_of(self.pid, all_generations=True)  # before any of them is orphaned
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        for pid in descendants:
            kill(pid)

    def pass_on(self) -> None:
        """Send SIGTERM once to each process that needs it. Some ranks may start after the signal."""
        if not self.is_agent:
            pids = {self.pid}
        elif self.is_deep:
            # An MPI engine unblocks the signals. A signal would kill a rank that does not handle it yet.
            workers = descendants_running(self.pid, WORKER)
            pids = {pid for pid in workers if handles_signal(pid, signal.SIGTERM)}
        else:
            pids = children_of(self.pid)
            self.has_ranks = self.has_ranks or bool(pids)
        for pid in pids - self.signalled_pids:
            self.signalled_pids.add(pid)
            kill(pid, signal.SIGTERM)


def _kill_with_parent() -> Callable[[], None] | None:
    """Return a function by which a child asks to be killed when this process ends. None if not on Linux.

    The child calls it first.
    """
    try:  # This precedes the fork, because the child must not wait for a lock that another thread held.
        prctl = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):
        return None
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _kill_child(agent: int, pid: int) -> None:
    if pid in children_of(agent):
        kill(pid)


@dataclass(eq=False)
class _AgentLog:
    """Copies an agent's stderr to its log, and the lines of its ranks to this process's stderr, too.

    A rank that the agent ends is killed ``grace`` seconds after the agent's line about it.
    """

    path: Path
    agent: int
    grace: float | None
    last_line: str = ""  # the latest line that is not empty
    is_in_trace: bool = False
    is_in_record: bool = False

    def copy(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._copy_line(line)

    def _copy_line(self, line: str) -> None:
        with suppress(OSError), open_append(self.path) as file:  # A full disk must not block ranks.
            file.write(line.encode())
        self.last_line = line.strip() or self.last_line
        is_record_start = _RECORD.match(line) is not None
        closing = _CLOSING.search(line)
        if self.grace is not None and closing and is_record_start:
            timer = threading.Timer(self.grace, _kill_child, (self.agent, int(closing[1])))
            timer.daemon = True
            timer.start()
        if _TRACE in line:
            self.is_in_trace = True
        elif line.startswith(_OURS):
            self.is_in_trace = False
        is_stack = self.is_in_record and _RECORD_STACK.match(line) is not None
        self.is_in_record = is_record_start or is_stack
        if not self.is_in_trace and not self.is_in_record:
            sys.stderr.write(line)
            sys.stderr.flush()


def _wait_for_agent(process: subprocess.Popen[str], child: _Child, log: _AgentLog) -> int:
    """Wait for an agent, copy its stderr and handle its signals.

    Returns its exit code, or ``EXIT_PREEMPTED`` if it was killed because it had no ranks.
    """
    thread = threading.Thread(target=log.copy, args=(process.stderr,), daemon=True)
    thread.start()
    try:
        while True:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(_POLL_SECONDS)
                return EXIT_PREEMPTED if child.is_killed_without_ranks else code
            child.check_agent(log.last_line)
    finally:
        thread.join(_LAST_LINES_SECONDS)  # A process that outlives the agent may keep the pipe open.
