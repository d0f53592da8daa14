"""Finds files with equal content."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Hashable, Iterable

from speechtrain.data.tar_members import file_of
from speechtrain.files import open_regular


def equal_files(paths: Iterable[str]) -> list[list[str]]:
    """Return the groups of two or more files with equal content, each group sorted.

    Files that cannot be read and members of a tar are in no group. Only files of equal size are read.
    """
    files = {path for path in paths if file_of(path) == path}  # without members of a tar
    groups = []
    for files_of_size in _groups_by(os.path.getsize, sorted(files)):
        groups += _groups_by(_content_hash, files_of_size)
    return groups


def _groups_by(signature: Callable[[str], Hashable], paths: list[str]) -> list[list[str]]:
    """Return the groups of two or more paths with equal signatures. Unreadable files are left out."""
    groups: dict[Hashable, list[str]] = {}
    for path in paths:
        try:
            groups.setdefault(signature(path), []).append(path)
        except (OSError, ValueError):
            continue
    return [group for group in groups.values() if len(group) > 1]


def _content_hash(path: str) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
