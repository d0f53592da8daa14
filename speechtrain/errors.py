"""Errors that a user can act on: one line each, and an exit code by class.

The command prints ``speechtrain: error: <line>`` and exits with the class's code; the trace goes
to a file in the run directory. The codes are part of the interface (see ``docs/exit-codes.md``).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: saved after a signal, the same command continues
EXIT_KILLED = 130  # the second Ctrl-C


class SpeechtrainError(Exception):
    """Base of all errors with a message for the user: one line that names the cause and the fix."""

    exit_code = 1


class ConfigError(SpeechtrainError):
    """An unknown or ill-typed key, group choice or combination."""

    exit_code = 2


class DataError(SpeechtrainError):
    """A missing or unusable data file, manifest, recording, transcript or tokenizer."""

    exit_code = 3


class MachineError(SpeechtrainError):
    """Something this machine lacks: a device, a vendor package, a precision, disk space."""

    exit_code = 4


class RunError(SpeechtrainError):
    """A run directory that is busy, belongs to another config, or holds no usable checkpoint."""

    exit_code = 5


class Diverged(SpeechtrainError):
    """Training that cannot continue: non-finite updates in a row, or a loss scale at its floor."""

    exit_code = 6


class Preempted(SpeechtrainError):
    """Not a fault: after a signal everything is saved, and the same command continues."""

    exit_code = EXIT_PREEMPTED


def nearest(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'hidden'?"`` if a name in ``known`` is similar, else an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return str(error).strip().partition("\n")[0]


def one_line(message: str, limit: int | None = None) -> str:
    """A message with line breaks and runs of spaces as one space, cut to ``limit`` characters."""
    return " ".join(message.split())[:limit]
