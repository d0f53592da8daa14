"""Who started whom: the processes of this host as a tree, as psutil sees it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil


def acts_on(pid: int, number: int) -> bool:
    """Whether ``pid`` handles or blocks a signal; True where that is not known (psutil reads no masks).

    A program that is still starting does neither, and the signal would end it.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
    masks = [line.split()[1] for line in status.splitlines() if line.startswith(("SigBlk:", "SigCgt:"))]
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


def children_of(pid: int, all_generations: bool = False) -> set[int]:
    """The processes that ``pid`` has started, or with ``all_generations`` theirs as well."""
    return {child.pid for child in _children(pid, all_generations)}


def _children(pid: int, all_generations: bool = False) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(all_generations)
    except psutil.Error:  # ended since
        return []


def descendants_running(pid: int, module: str) -> set[int]:
    """The descendants of ``pid`` that are a Python with ``-m module``, without their own descendants.

    Programs that only start it (mpirun, a script around it) have its line at the end of theirs. The forks
    of such a process have its command line too, and belong to it.
    """
    found: set[int] = set()
    for child in _children(pid):
        is_one = _arguments_of(child)[1:3] == ["-m", module]
        found |= {child.pid} if is_one else descendants_running(child.pid, module)
    return found


def processes_with(*arguments: str) -> set[int]:
    """The processes of this host that have all of ``arguments`` on their command line."""
    return {process.pid for process in psutil.process_iter() if {*arguments} <= {*_arguments_of(process)}}


def _arguments_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # ended since, or another user's
        return []


def is_running(pid: int) -> bool:
    """Whether a process has not ended yet; a zombie, whose end nobody has asked for, has ended."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False


def ancestors_of(pid: int) -> list[int]:
    """The process that started ``pid``, the one that started that, and so on; nearest first."""
    try:
        return [parent.pid for parent in psutil.Process(pid).parents()]
    except psutil.Error:  # ended since
        return []


def siblings_of(pid: int) -> dict[int, dict[str, str]]:
    """The other children of ``pid``'s parent, with the environment variables that they started with."""
    found = {}
    for sibling in _children(psutil.Process(pid).ppid()):
        if sibling.pid != pid:
            with contextlib.suppress(psutil.Error):  # ended since, or another user's
                found[sibling.pid] = sibling.environ()
    return found
