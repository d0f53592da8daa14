"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from speechtrain.errors import MachineError


def flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def writing(what: object, fix: str) -> Iterator[None]:
    """A context in which an OSError becomes a MachineError: ``what`` cannot be written, why, and the fix."""
    try:
        yield
    except OSError as error:
        raise MachineError(f"{what} cannot be written ({error.strerror or error}); {fix}") from error


@contextlib.contextmanager
def atomic(path: Path, durable: bool = True) -> Iterator[Path]:
    """A temporary path in the folder of ``path``; it replaces ``path`` if the block ends without an error.

    A reader sees the old file or the new one. A missing folder is made first. An error removes the
    temporary. ``durable`` flushes its bytes to the disk before the rename. Raises OSError if the
    disk is full or read-only.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        yield temporary
        if durable:
            flush(temporary)
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def append_line(path: Path, line: bytes) -> None:
    """Append a line, in one write: lines of several processes stay apart. A missing folder is made first.

    After an incomplete line (killed process, full disk), it starts on a new line. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else b"\n" + line
        file.write(line + b"\n")


def json_lines(lines: Iterable[bytes | str]) -> Iterator[dict[str, Any]]:
    """The JSON objects in ``lines``; a line that is none, as an incomplete one after a kill, is left out."""
    for line in lines:
        with contextlib.suppress(ValueError):  # also for bytes that are not UTF-8
            if isinstance(record := json.loads(line), dict):
                yield record


def write_json(path: Path, content: Mapping[str, Any], durable: bool = True) -> None:
    """Replace ``path`` by ``content`` as JSON, in one step as ``atomic`` does."""
    with atomic(path, durable) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The mapping in ``path``; empty if the file is missing, unreadable or not a mapping."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
