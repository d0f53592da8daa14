"""The tree of this host's processes, read with psutil."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import psutil


def acts_on(pid: int, number: int) -> bool:
    """Whether ``pid`` handles or blocks a signal; True if that is unknown (psutil reads no masks).

    A program that is still starting does neither, and the signal would kill it.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
    masks = [line.split()[1] for line in status.splitlines() if line.startswith(("SigBlk:", "SigCgt:"))]
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


def children_of(pid: int, all_generations: bool = False) -> set[int]:
    """The children of ``pid``, or with ``all_generations`` all its descendants."""
    return {child.pid for child in _children(pid, all_generations)}


def _children(pid: int, all_generations: bool = False) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(all_generations)
    except psutil.Error:  # it has ended
        return []


def descendants_running(pid: int, module: str) -> set[int]:
    """The descendants of ``pid`` that run ``python -P -m module``, without their own descendants.

    Programs that only start it (mpirun, a wrapper script) have its command at the end of their command
    line. Forks of a found process have the same command line and belong to it.
    """
    found: set[int] = set()
    for child in _children(pid):
        is_one = _arguments_of(child)[1:4] == ["-P", "-m", module]
        found |= {child.pid} if is_one else descendants_running(child.pid, module)
    return found


def processes_with(*arguments: str) -> set[int]:
    """The processes of this host that have all of ``arguments`` on their command line."""
    return {process.pid for process in psutil.process_iter() if {*arguments} <= {*_arguments_of(process)}}


def _arguments_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has ended, or is another user's
        return []


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process; nothing if it has ended, or is another user's."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def kill_descendants(pid: int) -> None:
    """Kill all descendants of ``pid``: of a rank, its data workers, which would outlive it if stopped."""
    for descendant in children_of(pid, all_generations=True):
        kill(descendant)


def is_running(pid: int) -> bool:
    """Whether a process runs; a zombie, which has ended and waits for its parent, does not."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False


def ancestors_of(pid: int) -> list[int]:
    """The ancestors of ``pid``, its parent first."""
    try:
        return [parent.pid for parent in psutil.Process(pid).parents()]
    except psutil.Error:  # it has ended
        return []


def siblings_of(pid: int) -> dict[int, dict[str, str]]:
    """The other children of ``pid``'s parent, with the environment variables that they started with."""
    found = {}
    for sibling in _children(psutil.Process(pid).ppid()):
        if sibling.pid != pid:
            with contextlib.suppress(psutil.Error):  # it has ended, or is another user's
                found[sibling.pid] = sibling.environ()
    return found
