"""Errors that a user can act on: one line each, and an exit code for each class.

The command prints ``speechtrain: error: <line>`` and exits with the code of the class. The trace is written
to a file in the run directory. The codes are part of the interface. ``docs/reference/exit-codes.md`` is
written from the docstrings here: the first paragraph is the meaning, the second one is the advice.
"""

from __future__ import annotations

import difflib
import errno
import re
import sys
import unicodedata
from collections.abc import Iterable
from typing import Any, TextIO

EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: saved after a signal, the same command continues
EXIT_KILLED = 130  # the second Ctrl-C

MALFORMED = (ValueError, OverflowError, RecursionError, MemoryError)
"""The errors of readers of a stranger's file: bad syntax or UTF-8, numbers too long, nesting too deep."""

SPELLING = "\u200c\u200d\u200e\u200f\u061c\u06dd"
"""Format characters that transcripts in some scripts need: joiners, direction marks, ends of verses."""


class SpeechtrainError(Exception):
    """Base of all errors with a message for the user: one line that names the cause and the fix."""

    exit_code = 1


class ConfigError(SpeechtrainError):
    """An unknown or ill-typed key, choice or combination, such as a launcher of other hosts without a device.

    The line names the key and the nearest valid one.
    """

    exit_code = 2


class DataError(SpeechtrainError):
    """A missing or unusable manifest, recording, transcript or tokenizer.

    The line names the file.
    """

    exit_code = 3


class MachineError(SpeechtrainError):
    """A device, vendor package, precision, CPUs, memory or disk space that this machine lacks.
    A path that cannot be read or written, a rank that hangs or was killed, or a lost host.

    The line names it.
    """

    exit_code = 4


class OutOfMemory(MachineError):
    """A step needs more memory than the device has. A study handles it by a key of its own."""


class RunError(SpeechtrainError):
    """A run directory that is in use, belongs to another config, or has no usable checkpoint.

    The line names it.
    """

    exit_code = 5


class Diverged(SpeechtrainError):
    """Non-finite updates in a row, a loss that was never finite, or codebooks that collapse.

    Lower the learning rate for the first, of which ``replay.pt`` has the batches. For the last, the line
    names the key to change.
    """

    exit_code = 6


class Preempted(SpeechtrainError):
    """Saved after a signal, or stopped by it before the ranks had started.

    The same command continues.
    """

    exit_code = EXIT_PREEMPTED


def class_of(exit_code: int) -> type[SpeechtrainError]:
    """Return the class of the errors that end with ``exit_code``."""
    for error_class in SpeechtrainError.__subclasses__():
        if error_class.exit_code == exit_code:
            return error_class
    return SpeechtrainError


DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}
_PATH = {errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP, errno.EACCES, errno.EPERM}
_PATH |= {errno.ENXIO, errno.EINVAL, errno.ENAMETOOLONG}


def explain_disk_error(error: Exception) -> Exception:
    """Return a MachineError for an error of a disk or a path, and any other ``error`` as it is.

    The disk is full, read-only or broken, or the path is of the wrong kind or not accessible.
    """
    if isinstance(error, OSError):
        path = error.filename2 or error.filename
        if error.errno in DISK:
            cause = f"{path or 'a file'}: {error.strerror}"
            return MachineError(f"{cause}. With room on the disk, the same command continues")
        if error.errno in _PATH and path:
            return MachineError(f"{path}: {error.strerror}. Move it away, or make it readable and writable")
    return error


# The names of other toolkits for keys and choices of this project.
_ALIASES = {
    "gpu": "cuda",
    "gaudi": "hpu",
    "learning_rate": "lr",
    "batch_size": "count",
    "devices": "world_size",
}


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Return a question for the candidate that is most similar to ``name``, or an empty text.

    The question follows a semicolon, so that a message can end with it.
    """
    parent, dot, leaf = name.rpartition(".")  # Keys with the same parent are compared by their ends.
    full_names = {key.removeprefix(parent + dot): key for key in candidates if key != name}
    ends = {short_name: short_name.rpartition(".")[2] for short_name in full_names}
    similar = [short_name for short_name, end in ends.items() if end == _ALIASES.get(leaf)]
    if not similar:
        similar = difflib.get_close_matches(leaf, full_names)
    if not similar:
        same_end = [short_name for short_name, end in ends.items() if difflib.get_close_matches(leaf, [end])]
        similar = difflib.get_close_matches(name, same_end)
    return f"; did you mean {full_names[similar[0]]!r}?" if similar else ""


def require_least(minimum: float, **values: float | None) -> None:
    """Raise ValueError, which names the key, for a value below ``minimum``. None is accepted."""
    for name, value in values.items():
        if value is not None and not value >= minimum:
            raise ValueError(f"{name} is {value}: it must be at least {minimum:g}")


def require_shares(**values: float) -> None:
    """Raise ValueError, which names the key, for a value that is not at least 0 and below 1."""
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name} is {value}: it must be at least 0 and below 1")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return str(error).strip().partition("\n")[0]


def one_line(message: str, limit: int = 8_000) -> str:
    """Return a message on one line: printable, without repeated spaces, and at most ``limit`` characters."""
    return escape_controls(shorten(" ".join(message.split()), limit))


def print_notice(message: str) -> None:
    """Print a message as one line on the standard error, after the program's name."""
    print(one_line(f"speechtrain: {message}"), file=sys.stderr, flush=True)


def shorten(text: str, limit: int) -> str:
    """Return ``text``, or its two ends if it is longer than ``limit`` characters.

    A stranger's file may put megabytes between the cause of an error and the fix.
    """
    half = (limit - 3) // 2
    return text if len(text) <= limit else f"{text[:half]}...{text[-half:]}"


def escape_controls(text: str, keep: str = "") -> str:
    """Return ``text`` with escapes for characters that a terminal obeys or cannot print.

    These have the Unicode categories Cc and Cf (colours, titles, reversed lines), Cs, Zl and Zp. Characters
    in ``keep`` are exceptions. Transcripts keep ``SPELLING``, and names keep nothing.
    """
    if text.isprintable():
        return text
    characters = []
    for character in text:
        if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in keep:
            character = ascii(character)[1:-1]
        characters.append(character)
    return "".join(characters)


_BAR_MOVES = re.compile(r"\r|(\x1b\[A)+\Z")  # tqdm begins a line of a progress bar with these moves


class Terminal:
    """A standard stream that escapes control and direction characters, as ``escape_controls`` does.

    Line breaks, tabs, ``SPELLING`` and the moves of progress bars stay as they are. rich writes its colours
    and moves to ``rich_proxied_file``.
    """

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        """Write ``text`` with escapes."""
        moves = _BAR_MOVES.match(text)
        start = moves.end() if moves else 0
        return self.rich_proxied_file.write(text[:start] + escape_controls(text[start:], SPELLING + "\n\t"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


def escape_output() -> None:
    """Escape the output of this process. A library may print names from a stranger's file."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, Terminal):
            setattr(sys, name, Terminal(stream))
