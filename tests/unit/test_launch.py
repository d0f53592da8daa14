"""Supervision of one child: its code, the signals it gets, and how it may be rendered."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from speechtrain.errors import ConfigError
from speechtrain.launch import Job, shell_line, supervise

# what a worker does: act on the signals that waited while it could not
OBEDIENT = """
import pathlib, signal, sys, time
time.sleep({busy})
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))
signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
pathlib.Path({ready!r}).touch()
time.sleep(60)
"""


def signalled(path: Path, code: str, *numbers: int, when: Path | None = None) -> int:
    """Exit code of a supervised ``code``, while this process gets the signals once ``when`` exists."""

    def send() -> None:
        while when is not None and not when.exists():
            time.sleep(0.01)
        for number in numbers:
            time.sleep(0.3)
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        return supervise([sys.executable, "-c", code], os.environ)
    finally:
        thread.join()


def test_the_childs_code_is_returned_and_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    assert supervise([sys.executable, "-c", "raise SystemExit(3)"], os.environ) == 3
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGTERM, signal.SIGINT} == set()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks(tmp_path: Path, number: int) -> None:
    ready = tmp_path / "ready"
    assert signalled(tmp_path, OBEDIENT.format(busy=0, ready=str(ready)), number, when=ready) == 7


def test_a_signal_waits_for_a_child_that_is_still_starting(tmp_path: Path) -> None:
    code = OBEDIENT.format(busy=1.0, ready=str(tmp_path / "ready"))
    assert signalled(tmp_path, code, signal.SIGTERM) == 7


def test_the_second_signal_kills_the_whole_session(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    code = (
        "import subprocess, sys, pathlib, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
        f"pathlib.Path({str(ready)!r}).touch()\n"
        "time.sleep(60)"
    )
    with pytest.raises(KeyboardInterrupt):
        signalled(tmp_path, code, signal.SIGINT, signal.SIGINT, when=ready)
    state = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    begun = time.monotonic()
    while state.exists() and ") Z" not in state.read_text() and time.monotonic() - begun < 10:
        time.sleep(0.01)
    assert not state.exists() or ") Z" in state.read_text()


def test_a_rendered_line_runs_as_given(tmp_path: Path) -> None:
    line = shell_line(["printenv", "A B"], {"NAME": "it's $HOME; rm"})
    assert shlex.split(line) == ["NAME=it's $HOME; rm", "printenv", "A B"]
    done = subprocess.run(
        shell_line(["printenv", "NAME"], {"NAME": "it's $HOME"}), shell=True, capture_output=True
    )
    assert done.stdout == b"it's $HOME\n"


def test_what_the_user_has_set_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    job = Job(Path("c.yaml"), Path(), environment={"OMP_NUM_THREADS": "2", "SPEECHTRAIN_TEST_ONLY": "1"})
    assert job.environ()["OMP_NUM_THREADS"] == "3"
    assert job.environ()["SPEECHTRAIN_TEST_ONLY"] == "1"


def test_the_local_launcher_starts_one_process(tmp_path: Path) -> None:
    from speechtrain.launchers.local import Local

    with pytest.raises(ConfigError, match="set world_size=1"):
        Local().check(Job(tmp_path / "c.yaml", tmp_path, world_size=2))
    rendered = Local().render(Job(tmp_path / "c.yaml", tmp_path, environment={"A": "1"}))
    assert rendered == f"A=1 {sys.executable} -m speechtrain.worker {tmp_path / 'c.yaml'}"
