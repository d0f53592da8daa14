"""Errors with a message of one line for the user, and the escaping of texts for a terminal.

The command prints ``speechtrain: error: <line>`` and exits with the code of the error's class. The trace is
written to a file in the run directory. The codes are part of the public interface (``docs/runs.md``).
"""

from __future__ import annotations

import difflib
import errno
import inspect
import os
import re
import sys
import unicodedata
from collections.abc import Iterable
from typing import Any, TextIO

EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: the run was saved after a signal, the same command continues
EXIT_KILLED = 130  # the user pressed Ctrl-C twice

MALFORMED = (ValueError, OverflowError, RecursionError, MemoryError)
"""Errors that parsers raise for a malformed file: bad syntax or UTF-8, long numbers, deep nesting."""

FORMAT_CHARACTERS = "\u200c\u200d\u200e\u200f\u061c\u06dd"
"""Format characters that transcripts in some scripts need: joiners, direction marks, ends of verses."""


class SpeechtrainError(Exception):
    """Base of all errors with a message for the user: one line that names the cause and the fix."""

    exit_code = 1


class ConfigError(SpeechtrainError):
    """A key, a choice or a combination of keys that is unknown or has the wrong type.

    The line names the key and the nearest valid key.
    """

    exit_code = 2


class NeedsWholeRecordings(ConfigError):
    """A part or a setting that cannot encode a stream."""


class DataError(SpeechtrainError):
    """A missing or unusable manifest, recording, transcript or tokenizer.

    The line names the file.
    """

    exit_code = 3


class RecordingError(DataError):
    """A recording that cannot be transcribed, or a folder or a manifest of recordings.

    ``name`` is the path as the user named it, or the id in a manifest. ``audio`` is the path of the file.
    """

    def __init__(self, message: str, name: str, audio: str) -> None:
        super().__init__(message)
        self.name, self.audio = name, audio


class MachineError(SpeechtrainError):
    """The machine lacks a device, a vendor's package, a precision, CPUs, memory or disk space.
    Also a path that cannot be read or written, a rank that hangs or was killed, and a lost host.

    The line names the cause.
    """

    exit_code = 4


class MissingPackage(MachineError):
    """An optional package of Python that is not installed. The line says how to install it.

    A dry run only warns, because another machine may execute the printed lines.
    """


class OutOfMemory(MachineError):
    """A step needs more memory than the device has. A study has a separate key for this error."""


class RunError(SpeechtrainError):
    """A run directory that is in use, belongs to another config, or has no usable checkpoint.

    The line names the run directory.
    """

    exit_code = 5


class Diverged(SpeechtrainError):
    """Non-finite updates in a row, a loss that was never finite, or codebooks that collapse.

    After non-finite updates, ``replay.safetensors`` has their batches, and a lower learning rate may help.
    If the codebooks collapse, the line names the key to change.
    """

    exit_code = 6


class Preempted(SpeechtrainError):
    """A signal ended the run. The run was saved, or its ranks had not started.

    The same command continues the run.
    """

    exit_code = EXIT_PREEMPTED


def class_of(exit_code: int) -> type[SpeechtrainError]:
    """Return the class of the errors that end with ``exit_code``."""
    for error_class in SpeechtrainError.__subclasses__():
        if error_class.exit_code == exit_code:
            return error_class
    return SpeechtrainError


DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}
"""Error numbers of a disk that is full, read-only or broken."""
_PATH_ERRORS = {
    errno.EACCES,
    errno.EEXIST,
    errno.EINVAL,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.ENOTEMPTY,
    errno.ENXIO,
    errno.EPERM,
}
"""Error numbers of a path that is of the wrong kind or not accessible."""


def explain_disk_error(error: Exception) -> Exception:
    """Return a MachineError with a fix if ``error`` is about a disk or a path, otherwise ``error`` itself."""
    if isinstance(error, OSError):
        if error.errno == errno.ENOLCK:  # The error of a lock has no path.
            return MachineError(
                "the disk of the run or of the study has no locks. Set run_dir to another disk"
            )
        path = error.filename2 or error.filename
        if error.errno in DISK:
            cause = f"{path or 'a file'}: {error.strerror}"
            return MachineError(f"{cause}. With room on the disk, the same command continues")
        if error.errno in _PATH_ERRORS and path:
            return MachineError(f"{path}: {error.strerror}. Move it away, or make it readable and writable")
    return error


# Names in other toolkits, and the last parts of the equivalent keys and choices of this project.
_ALIASES = {
    "gpu": "cuda",
    "gaudi": "hpu",
    "learning_rate": "lr",
    "batch_size": "count",
    "devices": "world_size",
}


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Return ``; did you mean 'KEY'?`` with the candidate that is most similar to ``name``.

    The text is the end of a message. It is empty if no candidate is similar. A candidate is found by an alias
    of the last part of ``name``, by the similarity of keys with the same parent, or by similar last parts.
    """
    parent, dot, leaf = name.rpartition(".")
    # A candidate with the same parent has a short name without the parent.
    full_names = {key.removeprefix(parent + dot): key for key in candidates if key != name}
    leaves = {short_name: short_name.rpartition(".")[2] for short_name in full_names}
    similar = [short_name for short_name, key_leaf in leaves.items() if key_leaf == _ALIASES.get(leaf)]
    if not similar:
        similar = difflib.get_close_matches(leaf, full_names)
    if not similar:
        with_similar_leaf = []
        for short_name, key_leaf in leaves.items():
            if difflib.get_close_matches(leaf, [key_leaf]):
                with_similar_leaf.append(short_name)
        similar = difflib.get_close_matches(name, with_similar_leaf)
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


def shown_path(path: str) -> str:
    """Return ``path``, relative to the current folder if it is in this folder."""
    return path.removeprefix(f"{os.getcwd()}/")


def require_contract(is_kept: bool, part: object, problem: str) -> None:
    """Raise ConfigError, which begins with the place of the class of ``part``, unless ``is_kept``."""
    if not is_kept:
        name, line = type(part).__name__, inspect.getsourcelines(type(part))[1]
        raise ConfigError(f"{shown_path(inspect.getfile(type(part)))}:{line} in {name}: {problem}")


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
    """Return ``text`` if it has at most ``limit`` characters, else its first and last characters.

    The end is included, because a message starts with the cause and ends with the fix. A malicious file can
    make the part between them megabytes long.
    """
    half = (limit - 3) // 2
    return text if len(text) <= limit else f"{text[:half]}...{text[-half:]}"


def escape_controls(text: str, keep: str = "") -> str:
    """Return ``text`` with escapes for characters that control a terminal or cannot be printed.

    They have the Unicode categories Cc and Cf (such as colours and right-to-left marks), Cs (surrogates), Zl
    and Zp (line and paragraph separators). Characters in ``keep`` are not escaped. For a transcript, ``keep``
    is ``FORMAT_CHARACTERS``.
    """
    if text.isprintable():
        return text
    characters = []
    for character in text:
        if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in keep:
            character = ascii(character)[1:-1]  # the escape without the quotes of ``ascii``
        characters.append(character)
    return "".join(characters)


_CURSOR_MOVES = re.compile(r"\r|(\x1b\[A)+\Z")
"""Moves of the cursor with which tqdm begins a line of a progress bar."""


class Terminal:
    """A standard stream that escapes control characters, as ``escape_controls`` does.

    Line breaks, tabs, ``FORMAT_CHARACTERS`` and the cursor moves of progress bars are not escaped. rich looks
    for the attribute ``rich_proxied_file``, and writes its colours and moves directly to this stream.
    """

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        """Write ``text`` with escapes."""
        moves = _CURSOR_MOVES.match(text)
        moves_end = moves.end() if moves else 0
        escaped = escape_controls(text[moves_end:], FORMAT_CHARACTERS + "\n\t")
        return self.rich_proxied_file.write(text[:moves_end] + escaped)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


def escape_output() -> None:
    """Replace stdout and stderr by ``Terminal`` streams.

    Names in a stranger's file may have control characters, and a library may print them.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, Terminal):
            setattr(sys, name, Terminal(stream))
