"""The request to stop a rank: a signal, or the end of the command that started it."""

from __future__ import annotations

import ctypes
import os
import signal
from types import FrameType

from speechtrain.launcher import PARENT, is_number
from speechtrain.supervision.process_tree import ancestors_of, is_running


class StopRequest:
    """True after the first SIGTERM or SIGINT. The trainer acts on it at the next step boundary.

    The launcher starts this process with both signals blocked, and the constructor unblocks them. If the
    process ``command`` of this host has exited, that counts as a stop request.
    """

    def __init__(self) -> None:
        self.received = False
        self.command: int | None = None
        numbers = (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            signal.signal(number, self._receive)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True

    def __call__(self) -> bool:
        if self.command is not None and not is_running(self.command):
            self.received = True
        return self.received


def stop_with_parent(stop: StopRequest) -> None:
    """Let the end of the command that started this process on this host act like a SIGTERM (Linux).

    The kernel signals the end of this process's own parent. Agents between it and the command may outlive
    the command (Intel's mpirun is a script around one), so ``stop`` checks the command in every step.
    """
    command = os.environ.pop(PARENT, "")
    if not command:
        return
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    except (OSError, AttributeError):
        return
    if is_number(command) and int(command) in ancestors_of(os.getpid()):
        stop.command = int(command)
    else:  # The command ended before the call of ``prctl``.
        stop.received = True
