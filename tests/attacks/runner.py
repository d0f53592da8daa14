"""Runs a command on a stranger's file, and tells how it ended."""

from __future__ import annotations

import contextlib
import os
import time
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from ..integration.conftest import STARTER
from .payloads import CANARY, PRIVATE

MOST_SECONDS = 120.0
MOST_BYTES = 4 * 2**30
"""Of memory that a command and its descendants have touched together."""
LONGEST_LINE = 200_000  # characters: a name of 16,000, as escapes
_POLL_SECONDS = 0.1
_PATIENCE_SECONDS = 5.0


@dataclass
class Ended:
    """How a command ended."""

    code: int  # negative for a signal
    out: str
    err: str
    limit: str = ""
    """``"time"`` or ``"memory"``, whichever it passed and was killed for."""
    left: list[str] = field(default_factory=list)
    """The names of descendants that outlived it."""


def run(
    folder: Path, command: str, *arguments: object, environment: Mapping[str, str] | None = None
) -> Ended:
    """Run ``speechtrain COMMAND`` in ``folder`` to its end; ``environment`` adds to this process's."""
    variables = {**os.environ, **(environment or {})}
    with contextlib.chdir(folder):
        process = STARTER.start([str(argument) for argument in arguments], variables, command)
    begun = time.monotonic()
    seen: dict[int, psutil.Process] = {}
    limit = ""
    while process.poll() is None and not limit:
        time.sleep(_POLL_SECONDS)
        living = _family(process.pid)
        seen.update({one.pid: one for one in living})
        if sum(_touched(one) for one in living) > MOST_BYTES:
            limit = "memory"
        if time.monotonic() - begun > MOST_SECONDS:
            limit = "time"
    if limit:
        for one in _family(process.pid):
            one.kill()
    out, err = process.communicate()
    _, outliving = psutil.wait_procs(seen.values(), timeout=_PATIENCE_SECONDS)
    left = [one.name() for one in outliving]
    for one in outliving:
        one.kill()
    code = process.returncode
    assert code is not None
    return Ended(code, out, err, limit, left)


def _family(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def _touched(process: psutil.Process) -> int:
    """Return the bytes of anonymous and of shared memory that a process has touched."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))
    return 0


def raw_escapes(text: str) -> str:
    """Return the characters that a terminal obeys or cannot print, as escapes."""
    hidden = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return ascii("".join(c for c in text if c not in "\n\t" and unicodedata.category(c) in hidden))[1:-1]


def faults(ended: Ended, folder: Path, refuses: bool | None = None) -> list[str]:
    """Return what is wrong with how a command in ``folder`` ended: an empty list if it kept the rules.

    With ``refuses``, the command must refuse the data; with False, it must succeed; None admits both.
    A refusal is one line. ``prepare --check`` has one line for each bad recording.
    """
    both = ended.out + ended.err
    written = [*folder.rglob(f"{CANARY}*"), *folder.parent.glob(f"{CANARY}*")]
    found = [f"{path}: code ran, or a file was written" for path in written]
    found += [f"it passed the limit of {ended.limit}"] if ended.limit else []
    found += ["an internal error"] if "Traceback" in both or "internal error" in both else []
    found += [f"ended by signal {-ended.code}"] if ended.code < 0 and not ended.limit else []
    found += [f"processes left behind: {ended.left}"] if ended.left else []
    found += [f"raw on the terminal: {raw}"] if (raw := raw_escapes(both)) else []
    found += ["it printed a private text"] if PRIVATE in both else []
    found += ["a long line"] if max(map(len, both.splitlines()), default=0) > LONGEST_LINE else []
    lines = ended.err.count("speechtrain: error:")
    is_listed = ended.code == 3 and "bad: " in ended.out and not lines
    if ended.code > 0 and lines != 1 and not is_listed:
        found.append(f"{lines} lines of error")
    if refuses is not None and refuses != (ended.code != 0):
        found.append(f"code {ended.code}")
    return [*found, both[-2000:]] if found else []
