"""Job, Result and the Launcher interface: how one command becomes processes."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

WORKER = "speechtrain.worker"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Job:
    """What a launcher starts: the same worker line, ``world_size`` times."""

    config: Path
    run_dir: Path
    world_size: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def command(self) -> list[str]:
        """The worker line of one process."""
        return [sys.executable, "-m", WORKER, str(self.config)]

    def environ(self) -> dict[str, str]:
        """This process's environment plus the job's; what the user has set wins."""
        return {**self.environment, **os.environ}


@dataclass(frozen=True)
class Result:
    """How the processes ended; the run's own outcome is in its ``result.json``."""

    returncode: int


class Launcher(ABC):
    """A way to start a job's processes."""

    @abstractmethod
    def check(self, job: Job) -> None:
        """Raise ConfigError or MachineError where this launcher cannot start ``job``."""

    @abstractmethod
    def launch(self, job: Job) -> Result:
        """Start the processes, pass signals on, wait."""

    @abstractmethod
    def render(self, job: Job) -> str:
        """Exactly what ``launch`` would run, as text."""


def shell_line(command: list[str], environment: Mapping[str, str]) -> str:
    """A line that a POSIX shell runs as given: ``NAME=value … command``, quoted."""
    assignments = [f"{name}={shlex.quote(value)}" for name, value in sorted(environment.items())]
    return " ".join([*assignments, shlex.join(command)])


def supervise(command: list[str], environment: Mapping[str, str]) -> int:
    """Run ``command`` in a session of its own and return its exit code.

    The first SIGINT or SIGTERM reaches it as SIGTERM (save and leave), the second as SIGKILL to
    its whole session: a terminal's Ctrl-C would otherwise hit parent and child at once. Raises
    KeyboardInterrupt after the second.

    Both signals are blocked in the child from its first instruction, and wait for it: a worker
    unblocks them once it can act on them. One that came while it imports its libraries would
    otherwise kill it.
    """
    received = 0

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        if received == 1:
            process.terminate()
        else:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        process = subprocess.Popen(command, env=dict(environment), start_new_session=True)
        previous = {number: signal.signal(number, forward) for number in STOP_SIGNALS}
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    try:
        code = process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if received > 1:
        raise KeyboardInterrupt
    return code
