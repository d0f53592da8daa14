"""Relations of real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from speechtrain.supervision.process_tree import (
    ancestors_of,
    children_of,
    descendants_running,
    handles_signal,
    is_running,
)

WAITING = "import sys; print(flush=True); sys.stdin.read()"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the signals that a process acts on")
@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ("signal.signal(signal.SIGTERM, print)", True),
        ("signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])", True),
        ("signal.signal(signal.SIGTERM, signal.SIG_DFL)", False),
    ],
)
def test_who_would_be_ended_by_a_signal(first: str, expected: bool) -> None:
    line = [sys.executable, "-c", f"import signal; {first}; {WAITING}"]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert handles_signal(child.pid, signal.SIGTERM) is expected
        child.communicate()


def test_a_module_is_found_below_those_that_only_start_it() -> None:
    """``env`` and a shell have the module's line in their own, and its fork looks like it."""
    inner = [sys.executable, "-P", "-m", "http.server", "--bind", "127.0.0.1", "0"]
    line = ["sh", "-c", '"$@"; true', "-", "sh", "-c", '"$@"; true', "-", *inner]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as shell:
        assert shell.stdout is not None
        shell.stdout.readline()
        (found,) = descendants_running(shell.pid, "http.server")
        assert len(ancestors_of(found)) == len(ancestors_of(shell.pid)) + 2
        os.kill(found, signal.SIGKILL)


def test_a_process_that_nobody_waits_for_does_not_run() -> None:
    with subprocess.Popen([sys.executable, "-c", WAITING], stdin=subprocess.PIPE) as child:
        assert is_running(child.pid)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not is_running(child.pid)
    assert not is_running(child.pid)


def test_the_way_up_and_down() -> None:
    line = ["sh", "-c", '"$@"; true', "-", sys.executable, "-c", WAITING, "here"]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as shell:
        assert shell.stdout is not None
        shell.stdout.readline()
        inner = max(children_of(shell.pid))
        assert ancestors_of(inner) == [shell.pid, os.getpid(), *ancestors_of(os.getpid())]
        shell.communicate()
    assert ancestors_of(inner) == []
