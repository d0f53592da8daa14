"""Commands and ranks without their imports: forked from one process that has made them for all.

``python starting.py`` reads a line of JSON for each command from its standard input, answers with the
process id, and leaves the exit code in the file that the line names. A command that is executed anew
takes 3 s of CPU to import what it needs; the ranks that a command starts are always executed.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

_SHARED = (
    *("torch", "torch._dynamo", "hydra._internal.hydra", "speechtrain.start.job"),
    *("speechtrain.commands.train", "speechtrain.optim.adamw", "speechtrain.data.module"),
    *("speechtrain.models.rnnt", "speechtrain.features.logmel", "speechtrain.commands.evaluate"),
    *("speechtrain.rank.main", "speechtrain.data.corpora.digits", "soundfile"),
    *("lhotse", "speechtrain.report.page", "speechtrain.study.sweep", "speechtrain.study.output"),
)
_POLL_SECONDS = 0.005


class Started:
    """A command that was forked: what the tests ask of a Popen."""

    def __init__(self, args: list[str], pid: int, base: Path) -> None:
        self.args = args
        self.pid = pid
        self._base = base

    @property
    def returncode(self) -> int | None:
        with contextlib.suppress(OSError):
            return int(self._base.with_suffix(".code").read_text())
        return None

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float) -> int:
        begun = time.monotonic()
        while (code := self.returncode) is None:
            if time.monotonic() - begun > timeout:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(_POLL_SECONDS)
        return code

    def communicate(self, timeout: float = 60.0) -> tuple[str, str]:
        """What it and its ranks have printed by its end."""
        self.wait(timeout)
        out = self._base.with_suffix(".out")
        return out.read_text() if out.exists() else "", self._base.with_suffix(".err").read_text()

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Starter:
    """The process to fork from, begun with the first command; one for each process of pytest's."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._numbers = count()

    def start(
        self,
        argv: list[str],
        environment: Mapping[str, str],
        module: str = "train",
        out: str = "",
        err: str = "",
    ) -> Started:
        """A command, by the name of its module, or a ``rank``. Its output may go to other files."""
        if self._process is None:
            self._folder = tempfile.TemporaryDirectory(prefix="started-")
            pipe = subprocess.PIPE
            line = [sys.executable, __file__]
            self._process = subprocess.Popen(line, stdin=pipe, stdout=pipe, text=True)
            atexit.register(self._process.kill)
        base = Path(self._folder.name) / str(next(self._numbers))
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # Another command of this name would start again with the variables of its device.
        program = "speechtrain-train" if module == "train" else module
        path = "rank.main" if module == "rank" else f"commands.{module}"
        request = {"module": f"speechtrain.{path}", "argv": [program, *argv]}
        request |= {"environment": dict(environment), "base": str(base), "cwd": os.getcwd()}
        request |= {"out": out or f"{base}.out", "err": err or f"{base}.err"}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Started(argv, int(self._process.stdout.readline()), base)


def _command(asked: dict[str, Any]) -> NoReturn:
    """In the child: what a shell would set up, then the command."""
    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, name in ((0, os.devnull), (1, asked["out"]), (2, asked["err"])):
        opened = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.path[:0] = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p not in sys.path]
    os.chdir(asked["cwd"])
    sys.argv = asked["argv"]
    code = 70
    try:
        returned = importlib.import_module(asked["module"]).main()
        code = code if returned is None else returned
    except SystemExit as left:
        code = int(left.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def prepare() -> None:
    """Do once what each command would do: import, read the YAML files, and look for Hydra's plugins."""
    for name in _SHARED:
        importlib.import_module(name)
    sys.path.append(str(Path(__file__).parents[2]))
    importlib.import_module("tests.support.parsed_once").install()
    sys.path.pop()
    importlib.import_module("speechtrain.start.compose").compose(["recipe=demo", "dry_run=true"])


def main() -> None:
    prepare()
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    bases: dict[int, Path] = {}
    while True:
        ready, _, _ = select.select([0, awake], [], [])
        if awake in ready:
            os.read(awake, 512)
            for pid in [*bases]:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    temporary = bases[pid].with_suffix(".new")
                    temporary.write_text(str(os.waitstatus_to_exitcode(status)))
                    temporary.rename(bases.pop(pid).with_suffix(".code"))
        if 0 in ready:
            line = _line()
            if not line:
                return
            asked = json.loads(line)
            child = os.fork()
            if not child:
                _command(asked)
            bases[child] = Path(asked["base"])
            os.write(1, f"{child}\n".encode())


def _line() -> bytes:
    """One line of the standard input, without reading ahead, which ``select`` would not see."""
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(0, 1)
        if not part:
            return b""
        line += part
    return line


if __name__ == "__main__":
    main()
