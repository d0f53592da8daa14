"""The tree of this host's processes, read with psutil."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import psutil


def handles_signal(pid: int, number: int) -> bool:
    """Return whether the process ``pid`` handles or blocks the signal ``number``.

    A program that is still starting does neither, and the signal would kill it. Returns True if the system
    has no ``/proc`` to read.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
    bit = 1 << (number - 1)  # The masks of the blocked and the handled signals have a bit for each signal.
    for line in status.splitlines():
        if line.startswith(("SigBlk:", "SigCgt:")):
            _, mask = line.split()
            if int(mask, 16) & bit:
                return True
    return False


def children_of(pid: int) -> set[int]:
    """Return the pids of the children of ``pid``."""
    return {child.pid for child in _children(pid)}


def descendants_of(pid: int) -> set[int]:
    """Return the pids of the children of ``pid``, of their children, and so on."""
    return {child.pid for child in _children(pid, recursive=True)}


def _children(pid: int, recursive: bool = False) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive)
    except psutil.Error:  # The process has ended.
        return []


def descendants_running(pid: int, module: str) -> set[int]:
    """Return the pids of the processes below ``pid`` that run ``python -P -m module``.

    Programs that start the module (mpirun, a wrapper script) do not count, although they have its command at
    the end of their command line. Descendants of a match do not count either: forks of the module, such as
    data workers, have the same command line.
    """
    pids: set[int] = set()
    for child in _children(pid):
        options = _arguments_of(child)[1:4]
        if options == ["-P", "-m", module]:
            pids.add(child.pid)
        else:
            pids |= descendants_running(child.pid, module)
    return pids


def processes_with(*arguments: str) -> set[int]:
    """Return the pids of this host's processes that have all ``arguments`` on their command line."""
    pids = set()
    for process in psutil.process_iter():
        if set(arguments).issubset(_arguments_of(process)):
            pids.add(process.pid)
    return pids


def _arguments_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # The process has ended, or belongs to another user.
        return []


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process, if it still runs and belongs to this user."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def kill_descendants(pid: int) -> None:
    """Kill all descendants of ``pid``, such as the data workers of a rank.

    A worker in the stopped state (SIGSTOP) would otherwise outlive the rank.
    """
    for descendant in descendants_of(pid):
        kill(descendant)


def is_running(pid: int) -> bool:
    """Return whether a process runs. A zombie does not run, it only keeps its exit code for its parent."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False


def ancestors_of(pid: int) -> list[int]:
    """Return the pids of the ancestors of ``pid``, its parent first."""
    try:
        return [parent.pid for parent in psutil.Process(pid).parents()]
    except psutil.Error:  # The process has ended.
        return []


def siblings_of(pid: int) -> dict[int, dict[str, str]]:
    """Return the other children of ``pid``'s parent: pids, each with the environment it was started with."""
    environments = {}
    for sibling in _children(psutil.Process(pid).ppid()):
        if sibling.pid != pid:
            with contextlib.suppress(psutil.Error):  # The process has ended, or belongs to another user.
                environments[sibling.pid] = sibling.environ()
    return environments
