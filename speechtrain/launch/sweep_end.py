"""The end of a sweep whose jobs run in processes of Hydra's launcher, such as the workers of joblib."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import time
from collections.abc import Iterator

from speechtrain.errors import EXIT_PREEMPTED
from speechtrain.launch.launcher import WORKER
from speechtrain.launch.process_tree import descendants_running, handles_signal, is_running, kill

_POLL_SECONDS = 0.5
_job_lock = threading.Lock()  # held while a job runs in this process


def stop_ranks() -> None:
    """Send SIGTERM once to each rank below this process, and wait until no rank is left.

    The processes between get no signal, because a second one would kill their ranks.
    """
    signalled_pids: set[int] = set()
    while pids := descendants_running(os.getpid(), WORKER):
        for pid in pids - signalled_pids:
            if handles_signal(pid, signal.SIGTERM):
                signalled_pids.add(pid)
                kill(pid, signal.SIGTERM)
        time.sleep(_POLL_SECONDS)


@contextlib.contextmanager
def ending_with(command_pid: int) -> Iterator[None]:
    """Return a context for a job in this process, which ends with the command of the sweep.

    If the command has ended, this process gets a SIGTERM, which makes a training run save and stop, and the
    process exits after its job. A process that waits for its next job exits, too.
    """
    _watch(command_pid)
    with _job_lock:
        yield


@functools.cache  # one thread for all jobs of this process
def _watch(command_pid: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # submitit ignores it.
    threading.Thread(target=_end_with, args=(command_pid,), daemon=True).start()


def _end_with(command_pid: int) -> None:
    while is_running(command_pid):
        time.sleep(_POLL_SECONDS)
    kill(os.getpid(), signal.SIGTERM)
    with _job_lock:
        os._exit(EXIT_PREEMPTED)
