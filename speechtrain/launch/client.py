"""Calls of a cluster's client programs, such as kubectl and sbatch."""

from __future__ import annotations

import re
import subprocess

from speechtrain.errors import MachineError

_TIMEOUT_SECONDS = 120.0
# kubectl also writes log lines to its standard error. They begin with a level and a date: "W1121 …".
_KUBECTL_LOG = re.compile(r"[IWEF]\d{4} ")


def call_client(command: list[str], title: str, text: str = "") -> str:
    """Run ``command`` with ``text`` as its standard input, and return its standard output.

    Raises MachineError if the program fails or does not answer. Its message begins with ``title``.
    """
    try:
        completed = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            # In this process's session, a terminal's Ctrl-C would end the program without output, as if the
            # job had left the queue.
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise MachineError(f"{title} got no answer in {_TIMEOUT_SECONDS:.0f} s") from None
    if completed.returncode:
        words: list[str] = []
        for line in completed.stderr.splitlines():
            if not _KUBECTL_LOG.match(line):
                words += line.split()
        message = " ".join(words)
        if not message:
            message = f"exit code {completed.returncode}"
        raise MachineError(f"{title} failed: {message}")
    return completed.stdout


def ask_client(command: list[str]) -> str | None:
    """Run ``command`` and return its standard output, or None if it fails or does not answer."""
    try:
        return call_client(command, command[0])
    except MachineError:
        return None
