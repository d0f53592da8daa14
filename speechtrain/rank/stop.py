"""The request to stop a rank: a signal, or the end of the command that started it."""

from __future__ import annotations

import ctypes
import os
import signal
from types import FrameType

from speechtrain.distributed.world import is_number
from speechtrain.launch.launcher import PARENT
from speechtrain.launch.process_tree import ancestors_of, is_running


class StopRequest:
    """A function that returns True after this process has got SIGTERM or SIGINT. Trainers call it every step.

    The launcher starts this process with both signals blocked, and the constructor unblocks them. If
    ``command`` is set and the process with this pid has exited, that also counts as a stop request.
    """

    def __init__(self) -> None:
        self.received = False
        self.command: int | None = None  # pid of the command that has started this process
        signals = (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            signal.signal(number, self._receive)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True

    def __call__(self) -> bool:
        if self.command is not None and not is_running(self.command):
            self.received = True
        return self.received


def stop_with_parent(stop: StopRequest) -> None:
    """Request a stop when the command that started this process on this host ends (Linux only).

    The kernel sends SIGTERM when the parent of this process ends. If the parent is not the command but a
    process between them, such as mpirun, it may outlive the command. So ``stop`` also checks whether the
    command runs.
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
