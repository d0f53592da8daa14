"""Pickles as a stranger writes them: they call a function or grow when they are read."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch


class Calls:
    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.called = (function, arguments)

    def __reduce__(self) -> Any:
        return self.called


def doubled(levels: int) -> bytes:
    """A tuple of a tuple twice, and so on, as a key."""
    level = b"".join(b"h%ch%c\x86q%c" % (i, i, i + 1) for i in range(levels))
    return b"\x80\x02K\x01\x85q\x00" + level + b"}h" + bytes([levels]) + b"K\x01s."


def tenfold(levels: int) -> list[Any]:
    nested: list[Any] = ["x"]
    for _ in range(levels):
        nested = [nested] * 10
    return nested


def saved(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()
