"""Commands on a stranger's files, each in a fork of one process that has imported everything: 0.1 s a case.

A test asks the fixture ``forks`` for a command and judges how it ended::

    ended = forks.run("prepare", "manifest", path, "--check", "--out", out)
    assert faults(ended, refuses=True, canaries=[canary]) == []

``python forks.py`` is that process: it reads a line of JSON for each command from its standard input, and
answers with a line when the command and all its descendants are gone.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import unicodedata
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil

COMMANDS = ("doctor", "evaluate", "export", "prepare", "report", "train", "transcribe")
MOST_SECONDS = 60.0
"""Of CPU time, of a command and its descendants."""
_MOST_WAITED = 400.0  # seconds; a busy machine may give a tenth of a core
MOST_BYTES = 4 * 2**30
"""Of memory that a command and its descendants touch together."""
LONGEST_TOLD = 200_000
"""Characters of a line of error or of a bad recording: 16,000 of them, as escapes."""
_MOST_ASKED = (
    32 * 2**30
)  # bytes of address space: above what a bomb asks for, so that it is seen to take them
_POLL_SECONDS, _LOOK_SECONDS = 0.005, 0.1  # a look at all processes takes 10 ms of CPU
_IMPORTED = (
    *("torch", "lhotse", "lhotse.cut", "lhotse.audio.backend", "lhotse.augmentation", "soundfile"),
    *("sentencepiece", "transformers", "hydra._internal.hydra", "speechtrain.train_rank"),
    *("speechtrain.runs.jobs", "speechtrain.inference.open_run", "speechtrain.data.module"),
    *("speechtrain.data.corpora.digits", "speechtrain.models.rnnt", "speechtrain.features.logmel"),
    *(f"speechtrain.commands.{name}" for name in COMMANDS),
)


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    """Its exit code, negative for a signal."""
    limit: str
    """``"time"`` or ``"memory"``, whichever it passed and was killed for, or an empty string."""
    left: list[str]
    """The names of descendants that outlived it."""
    mebibytes: int
    out: str
    err: str


class Forks:
    """The process to fork from, begun with the first command; commands run one after the other."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(
        self,
        command: str,
        *arguments: object,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        seconds: float = MOST_SECONDS,
    ) -> Ended:
        """``speechtrain-COMMAND`` with ``arguments``, to its end; ``environment`` adds to this process's."""
        if self._process is None:
            self._folder = tempfile.TemporaryDirectory(prefix="started-")
            line, pipe = [sys.executable, "-P", __file__], subprocess.PIPE
            self._process = subprocess.Popen(line, stdin=pipe, stdout=pipe, text=True)
            atexit.register(self._process.kill)
        asked = {
            "argv": [_text(argument) for argument in (command, *arguments)],
            "environment": {**os.environ, **(environment or {})},
            "cwd": str(cwd or self._folder.name),
            "base": str(Path(self._folder.name) / "case"),
            "seconds": seconds,
        }
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the forking process has died"
        out, err = (Path(f"{asked['base']}.{name}").read_bytes() for name in ("out", "err"))
        said = (text.decode("utf-8", "surrogateescape") for text in (out, err))
        return Ended(**json.loads(answer), **dict(zip(("out", "err"), said, strict=True)))


def _text(argument: object) -> str:
    return argument.decode("utf-8", "surrogateescape") if isinstance(argument, bytes) else str(argument)


def raw_escapes(text: str) -> str:
    """The characters in ``text`` that a terminal obeys or cannot print, as escapes."""
    hidden = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return ascii("".join(c for c in text if c not in "\n\t" and unicodedata.category(c) in hidden))[1:-1]


def faults(
    ended: Ended,
    *,
    refuses: bool | None = None,
    canaries: Iterable[Path] = (),
    private: Iterable[str] = (),
) -> list[str]:
    """What is wrong with how a command on a stranger's files ended; empty if it held.

    It must end within the limits, without an internal error, a raw escape on the terminal, a ``canaries``
    file or a text that is ``private``. With ``refuses``, its exit code is not 0 and it says why in one line
    (``prepare --check``: in one line for each bad recording); with ``refuses`` False, it succeeds; with None,
    either may be.
    """
    both = ended.out + ended.err
    found = [f"{path.name}: code ran, or a file was written" for path in canaries if os.path.lexists(path)]
    found += [f"it passed the limit of {ended.limit}"] if ended.limit else []
    found += ["an internal error"] if "Traceback" in both or "speechtrain: internal error" in both else []
    found += [f"ended by signal {-ended.code}"] if ended.code < 0 and not ended.limit else []
    found += [f"processes left behind: {ended.left}"] if ended.left else []
    found += [f"raw on the terminal: {raw}"] if (raw := raw_escapes(both)) else []
    found += [f"printed {text!r}" for text in private if text in both]
    told = [line for line in both.splitlines() if line.startswith(("speechtrain: ", "bad: "))]
    found += [f"a line of {len(line)} characters" for line in told if len(line) > LONGEST_TOLD]
    lines = ended.err.count("speechtrain: error:")
    is_listed = ended.code == 3 and "bad: " in ended.out and not lines
    if ended.code > 0 and lines != 1 and not is_listed:
        found.append(f"{lines} lines of error")
    if refuses is not None and refuses != (ended.code != 0):
        found.append(f"code {ended.code}")
    return [*found, both[-2000:]] if found else []


def _child(asked: dict[str, Any]) -> NoReturn:
    """What a shell would set up, then the command."""
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: none outlives the tests
    for number, name in ((0, os.devnull), (1, asked["base"] + ".out"), (2, asked["base"] + ".err")):
        opened = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["cwd"])
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + _MOST_ASKED, size + _MOST_ASKED))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # No command restarts under such a name: a restart with the device's variables would run forks.py again.
    sys.argv = asked["argv"]
    code = 70
    try:
        sys.modules[f"speechtrain.commands.{sys.argv[0]}"].main()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1 if left.code else 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _touched(processes: Iterable[psutil.Process]) -> int:
    """Bytes of anonymous memory, and of shared memory that they have made."""
    total = 0
    for process in processes:
        with suppress(OSError):
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))
    return 1024 * total


def _used(processes: Iterable[psutil.Process]) -> float:
    """Seconds of CPU that they and their ended children have taken."""
    total = 0.0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])
    return total


def _descendants() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Run one command to its end; its descendants come back to this process, as to a subreaper."""
    begun = looked = time.monotonic()
    peak, used, limit, base = 0, 0.0, "", _touched([psutil.Process()])
    if not (child := os.fork()):
        _child(asked)
    while not limit:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            break
        if (now := time.monotonic()) > looked + _LOOK_SECONDS:
            looked, processes = now, _descendants()
            peak, used = max(peak, _touched(processes) - base), _used(processes)
        is_late = used > asked["seconds"] or now > begun + _MOST_WAITED
        limit = "memory" if peak > MOST_BYTES else "time" if is_late else ""
        time.sleep(_POLL_SECONDS)
    left = _outliving() if _has_children() and not limit else []
    while _has_children():
        for process in _descendants():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        pid, ended = os.waitpid(-1, 0)
        status = ended if pid == child else status
    code = os.waitstatus_to_exitcode(status)
    return {"code": code, "limit": limit, "left": left, "mebibytes": peak >> 20}


def _has_children() -> bool:
    with suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return True
    return False


def _outliving(seconds: float = 5.0) -> list[str]:
    """Descendants after ``seconds``; a fork server notices the end of its program after the fact."""
    return [" ".join(p.cmdline())[-200:] for p in psutil.wait_procs(_descendants(), timeout=seconds)[1]]


def main() -> None:
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    for name in _IMPORTED:
        importlib.import_module(name)
    for line in sys.stdin:
        os.write(1, (json.dumps(_answer(json.loads(line))) + "\n").encode())


if __name__ == "__main__":
    main()
