"""The request to stop a rank: a signal, or the end of the command that started it."""

from __future__ import annotations

import os
import signal
from types import FrameType

from speechtrain.launch.launcher import PARENT
from speechtrain.launch.process_tree import ancestors_of, is_running


class StopRequest:
    """A function that returns True after this process has got SIGTERM or SIGINT. Trainers call it every step.

    The launcher starts this process with both signals blocked, and the constructor unblocks them. The end of
    the command that has started this process on this host, or of a process between them, such as torchrun's
    agent, also counts as a stop request. Mpirun may outlive the command, so both are checked.
    """

    def __init__(self) -> None:
        self.parent = os.getppid()
        self.command = int(os.environ.pop(PARENT, "") or 0)  # the pid of the command, or 0 if there is none
        self.received = self.command not in (0, *ancestors_of(os.getpid()))
        signals = (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            signal.signal(number, self._receive)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True

    def __call__(self) -> bool:
        if self.command and (os.getppid() != self.parent or not is_running(self.command)):
            self.received = True
        return self.received
