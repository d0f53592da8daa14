"""Finds files with equal content."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Hashable, Iterable

from speechtrain.data.tar_members import file_of
from speechtrain.files import open_regular

_BEGINNING = 2**16  # bytes at the start of a file, which are compared before the whole file


def equal_files(paths: Iterable[str]) -> list[list[str]]:
    """Return the groups of files with equal content, each sorted.

    Files that cannot be read and members of a tar are in no group. Files of different sizes are not read.
    Files of equal size are compared by their first 64 KiB, and then, if these are equal, by a hash of the
    whole content.
    """
    groups = [sorted({path for path in paths if file_of(path) == path})]
    for signature in (_size, _beginning, _content):
        smaller_groups = []
        for group in groups:
            smaller_groups += _split(group, signature)
        groups = smaller_groups
    return groups


def _split(paths: list[str], signature: Callable[[str], Hashable]) -> list[list[str]]:
    """Return the groups of two or more paths with equal signatures."""
    groups: dict[Hashable, list[str]] = {}
    for path in paths:
        try:
            groups.setdefault(signature(path), []).append(path)
        except (OSError, ValueError):
            continue
    return [group for group in groups.values() if len(group) > 1]


def _size(path: str) -> int:
    return os.stat(path).st_size


def _beginning(path: str) -> bytes:
    with open_regular(path) as file:
        return file.read(_BEGINNING)


def _content(path: str) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
