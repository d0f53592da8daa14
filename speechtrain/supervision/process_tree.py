"""Who started whom: the processes of this host as a tree."""

from __future__ import annotations

import subprocess
from pathlib import Path

PROC = Path("/proc")


def acts_on(pid: int, number: int) -> bool:
    """Whether ``pid`` has a handler for a signal or lets it wait; True where that is not to be known.

    A program that is still starting would be ended by it.
    """
    try:
        status = (PROC / str(pid) / "status").read_text()
    except OSError:
        return True
    masks = [line.split()[1] for line in status.splitlines() if line.startswith(("SigBlk:", "SigCgt:"))]
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


def children_of(pid: int, all_generations: bool = False) -> set[int]:
    """The processes that ``pid`` has started, or with ``all_generations`` theirs as well."""
    parents = _parents()
    found: set[int] = set()
    latest = {pid}
    while latest:
        latest = {child for child, parent in parents.items() if parent in latest} - found
        found |= latest
        if not all_generations:
            break
    return found


def descendants_running(pid: int, module: str) -> set[int]:
    """The descendants of ``pid`` that are a Python with ``-m module``, but none of their own.

    Those that only start it (mpirun, a script around it) have its line at the end of theirs. What such a
    process has forked looks like it, and is its affair.
    """
    children: dict[int, set[int]] = {}
    for child, parent in _parents().items():
        children.setdefault(parent, set()).add(child)
    found: set[int] = set()
    waiting = [*children.get(pid, ())]
    while waiting:
        candidate = waiting.pop()
        if _arguments_of(candidate)[1:3] == ["-m", module]:
            found.add(candidate)
        else:
            waiting += children.get(candidate, ())
    return found


def processes_with(*arguments: str) -> set[int]:
    """The processes of this host that have all of ``arguments`` on their command line."""
    return {pid for pid in _parents() if set(arguments) <= set(_arguments_of(pid))}


def _arguments_of(pid: int) -> list[str]:
    if not PROC.is_dir():
        listed = subprocess.run(
            ["ps", "-o", "args=", "-p", str(pid)], capture_output=True, text=True, check=False
        )
        return listed.stdout.split()
    try:
        return (PROC / str(pid) / "cmdline").read_text(errors="replace").split("\0")
    except OSError:  # ended since
        return []


def _parents() -> dict[int, int]:
    """Every visible process's parent."""
    parents = {}
    if not PROC.is_dir():
        listed = subprocess.run(["ps", "-axo", "pid=,ppid="], capture_output=True, text=True, check=False)
        return {int(child): int(parent) for child, parent in map(str.split, listed.stdout.splitlines())}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            parents[int(entry.name)] = parent_of(int(entry.name))
    return parents


def is_running(pid: int) -> bool:
    """Whether a process has not ended yet; one whose end nobody has asked for has (Linux)."""
    try:
        stat = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def parent_of(pid: int) -> int:
    """The process that started ``pid``; 0 where that is not to be known (Linux)."""
    try:
        stat = (PROC / str(pid) / "stat").read_text()
    except OSError:  # ended since
        return 0
    return int(stat.rpartition(")")[2].split()[1])  # the name before it may hold anything


def ancestors_of(pid: int) -> list[int]:
    """Who started ``pid``, who started that one, and so on; nearest first."""
    found: list[int] = []
    while (pid := parent_of(pid)) > 0 and pid not in found:
        found.append(pid)
    return found


def siblings_of(pid: int) -> dict[int, dict[str, str]]:
    """The other processes that ``pid``'s starter has started, with the variables they began with (Linux)."""
    found = {}
    for sibling in children_of(parent_of(pid)) - {pid}:
        try:
            content = (PROC / str(sibling) / "environ").read_text(errors="replace")
        except OSError:  # ended since, or another user's
            continue
        pairs = (entry.partition("=") for entry in content.split("\0") if "=" in entry)
        found[sibling] = {name: value for name, _, value in pairs}
    return found
