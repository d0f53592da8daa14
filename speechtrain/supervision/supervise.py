"""Run a command as a child process: its stop signals, its ranks and its log."""

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
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from speechtrain.errors import EXIT_PREEMPTED, print_notice
from speechtrain.files import open_append
from speechtrain.launcher import PARENT, WORKER
from speechtrain.supervision.process_tree import acts_on, children_of, descendants_running, kill

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.2
_LAST_WORDS_SECONDS = 5.0
_QUIET_SECONDS = 30.0  # after so long without a rank, the agent's last line is shown
_TRACE = "Traceback (most recent call last):"
_OURS = ("speechtrain: ", "warning  ")
# torch's own records, as in "E1121 03:40:12.123000 torch/distributed/…]" or "[rank0]:[W1121 03:40:12.1 …"
_AGENTS_LINE = re.compile(r"(\[\w+\]:)?\[?[A-Z]\d{4} \d\d:\d\d:\d\d")
# the lines after such a record of torch's C++; the last of them is empty
_AGENTS_STACK = re.compile(r"Exception raised from |frame #\d+: |<omitting python frames>|$")
# torchrun ends a rank after another has failed
_CLOSING = re.compile(r"Sending process (\d+) closing signal")


@contextmanager
def stop_signals(receive: Callable[[], None]) -> Iterator[None]:
    """A context in which each SIGINT and SIGTERM calls ``receive`` and does nothing else."""
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
    received = 0

    def receive() -> None:
        nonlocal received
        received += 1

    handled, pause = 0, min(0.1, poll_seconds)
    with stop_signals(receive):
        while True:
            signals = received
            if signals > handled and stop(signals):
                handled = signals
            code = exit_code()
            if code is not None:
                break
            deadline = time.monotonic() + poll_seconds
            time.sleep(pause)  # also while a signal waits for a cluster that does not answer
            while time.monotonic() < deadline and received == handled:
                time.sleep(pause)
    if received > 1:
        raise KeyboardInterrupt
    return code


def supervise(
    command: list[str],
    environment: Mapping[str, str],
    agent_log: Path | None = None,
    is_deep: bool = False,
    grace: float | None = None,
) -> int:
    """Run ``command`` in a session of its own and return its exit code.

    The first SIGINT or SIGTERM is passed on as SIGTERM (save and exit). The second kills the command and
    all its descendants, and raises KeyboardInterrupt. Without a session of its own, the command would get
    a terminal's Ctrl-C at the same time as this process.

    Both signals are blocked in the child from its first instruction. A worker unblocks them once it can
    handle them: a signal that comes while it imports its libraries would otherwise kill it.

    With ``agent_log``, the command is an agent whose children are the ranks. The first signal is sent to
    the ranks, because an agent that gets a signal ends them. The agent's stderr goes to that file, and
    the ranks' lines go to stderr, too. The agent is killed when this process ends (Linux). With
    ``is_deep`` there are further processes between the agent and the ranks. Else an agent without ranks is
    killed after the first signal, and the code is ``EXIT_PREEMPTED``. A rank that torchrun ends, because
    another has failed, is killed ``grace`` seconds later: inside a library, it does not handle the signal.
    """
    environment = {**environment, PARENT: str(os.getpid())}
    supervised = _Supervised(is_agent=agent_log is not None, is_deep=is_deep)
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    with stop_signals(supervised.receive):
        try:
            process = subprocess.Popen(
                command,
                env=environment,
                start_new_session=True,
                stderr=None if agent_log is None else subprocess.PIPE,
                text=True,
                errors="backslashreplace",
                preexec_fn=None if agent_log is None else _dying_with_parent(),
            )
            supervised.pid = process.pid
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        with nullcontext() if agent_log is None else _split(process, agent_log, grace, supervised.said):
            while (code := _wait(process, None if agent_log is None else _POLL_SECONDS)) is None:
                supervised.look()
                if supervised.received == 1:
                    supervised.pass_on()
    if supervised.received > 1:
        raise KeyboardInterrupt
    return EXIT_PREEMPTED if supervised.is_ended else code


@dataclass(eq=False)
class _Supervised:
    """A child process and its stop signals; those of an agent go to its ranks."""

    is_agent: bool
    is_deep: bool
    pid: int = 0
    received: int = 0
    told: set[int] = field(default_factory=set)
    begun: float = field(default_factory=time.monotonic)
    has_ranks: bool = False
    """A rank has been seen: from then on the agent ends, or starts them again, by itself."""
    is_ended: bool = False
    said: list[str] = field(default_factory=list)
    """The agent's last line."""

    def receive(self) -> None:
        self.received += 1
        if not self.pid:  # the child could not be started; 0 would mean this process's own group
            return
        if self.received == 1:
            self.pass_on()
        else:
            self.kill()

    def look(self) -> None:
        """Until an agent has ranks: end it after a signal, and show once what it waits for."""
        self.has_ranks = self.has_ranks or self.is_deep or bool(children_of(self.pid))
        if not self.has_ranks and self.received == 1:
            self.is_ended = True
            self.kill()
        elif not self.has_ranks and self.said and time.monotonic() - self.begun > _QUIET_SECONDS:
            self.begun = math.inf
            print_notice(f"warning: no rank runs yet; {self.said[0]}")

    def kill(self) -> None:
        descendants = children_of(self.pid, all_generations=True)  # before any of them is orphaned
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        for pid in descendants:
            kill(pid)

    def pass_on(self) -> None:
        """Send SIGTERM once to each process that needs it; some ranks may only start after the signal."""
        if not self.is_agent:
            addressees = {self.pid}
        elif self.is_deep:
            found = descendants_running(self.pid, WORKER)
            addressees = {pid for pid in found if acts_on(pid, signal.SIGTERM)}  # engines unblock signals
        else:
            addressees = children_of(self.pid)
            self.has_ranks = self.has_ranks or bool(addressees)
        for pid in addressees - self.told:
            self.told.add(pid)
            kill(pid, signal.SIGTERM)


def _dying_with_parent() -> Callable[[], None] | None:
    """A function that a child calls first, to be killed when this process ends; None if not on Linux."""
    try:  # looked up before the fork: the child must not take a lock that another thread had
        prctl = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):
        return None
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait(process: subprocess.Popen[str], seconds: float | None) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def _kill_child(agent: int, pid: int) -> None:
    if pid in children_of(agent):
        kill(pid)


@contextmanager
def _split(process: subprocess.Popen[str], log: Path, grace: float | None, said: list[str]) -> Iterator[None]:
    """Copy an agent's stderr to ``log``, and the lines of its ranks to this process's stderr, too.

    ``said`` gets its last line. Ranks that it ends, as its log shows, are killed ``grace`` seconds later.
    """

    def copy() -> None:
        assert process.stderr is not None
        is_trace = is_agents = False
        with process.stderr:
            for line in process.stderr:
                with suppress(OSError), open_append(log) as file:  # a full disk must not block ranks
                    file.write(line.encode())
                said[:] = [line.strip()] if line.strip() else said
                if grace is not None and (closing := _CLOSING.search(line)) and _AGENTS_LINE.match(line):
                    timer = threading.Timer(grace, _kill_child, (process.pid, int(closing[1])))
                    timer.daemon = True
                    timer.start()
                is_trace = _TRACE in line or (is_trace and not line.startswith(_OURS))
                pattern = _AGENTS_STACK if is_agents else _AGENTS_LINE
                is_agents = bool(pattern.match(line) or _AGENTS_LINE.match(line))
                if not is_trace and not is_agents:
                    sys.stderr.write(line)
                    sys.stderr.flush()

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(_LAST_WORDS_SECONDS)  # a process that outlives the agent may keep the pipe open
