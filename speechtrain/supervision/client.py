"""Calls of a cluster's client programs, such as kubectl and sbatch."""

from __future__ import annotations

import re
import subprocess

from speechtrain.errors import MachineError

_SECONDS = 120.0
_KUBECTL_LOG = re.compile(r"[IWEF]\d{4} ")


def call_client(command: list[str], title: str, text: str = "") -> str:
    """Return the standard output of ``command``, which reads ``text`` on its standard input.

    Raises MachineError, which begins with ``title``, if the program fails or does not answer.
    """
    try:
        completed = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            # Otherwise a terminal's Ctrl-C ends the program, and its job seems to have left the queue.
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise MachineError(f"{title} got no answer in {_SECONDS:.0f} s") from None
    if completed.returncode:
        lines = [line for line in completed.stderr.splitlines() if not _KUBECTL_LOG.match(line)]
        message = " ".join(" ".join(lines).split()) or f"exit code {completed.returncode}"
        raise MachineError(f"{title} failed: {message}")
    return completed.stdout


def ask_client(command: list[str]) -> str | None:
    """Return the standard output of ``command``, or None if the program fails or does not answer."""
    try:
        return call_client(command, command[0])
    except MachineError:
        return None
