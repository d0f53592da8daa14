"""The state of a process."""

from __future__ import annotations


def state_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/status") as file:
            return file.read()
    except OSError:
        return "(zombie)"
