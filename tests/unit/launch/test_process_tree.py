"""Tests of the functions that read the process tree, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from speechtrain.launch.process_tree import (
    ancestors_of,
    children_of,
    descendants_running,
    handles_signal,
    is_running,
)

# A program that prints an empty line when it has started, and ends when its standard input ends.
WAIT_FOR_INPUT = "import sys; print(flush=True); sys.stdin.read()"
# A shell that runs the command after it as a child. Without a second command (``true``), the child would
# replace the shell.
SHELL = ["sh", "-c", '"$@"; true', "-"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the signals that a process handles")
@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("signal.signal(signal.SIGTERM, print)", True),
        ("signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])", True),
        ("signal.signal(signal.SIGTERM, signal.SIG_DFL)", False),
    ],
)
def test_handles_signal_is_true_for_a_handled_and_for_a_blocked_signal(
    statement: str, expected: bool
) -> None:
    program = f"import signal; {statement}; {WAIT_FOR_INPUT}"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert handles_signal(process.pid, signal.SIGTERM) is expected
        process.communicate()


def test_descendants_running_skips_shells_that_start_the_module() -> None:
    """The command lines of both shells end with the command of the module."""
    server = [sys.executable, "-P", "-m", "http.server", "--bind", "127.0.0.1", "0"]
    command = [*SHELL, *SHELL, *server]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as outer_shell:
        assert outer_shell.stdout is not None
        outer_shell.stdout.readline()
        (server_pid,) = descendants_running(outer_shell.pid, "http.server")
        # The inner and the outer shell are the two further ancestors.
        assert len(ancestors_of(server_pid)) == len(ancestors_of(outer_shell.pid)) + 2
        os.kill(server_pid, signal.SIGKILL)


def test_is_running_is_false_for_a_zombie_and_for_an_ended_process() -> None:
    with subprocess.Popen([sys.executable, "-c", WAIT_FOR_INPUT], stdin=subprocess.PIPE) as process:
        assert is_running(process.pid)
        process.kill()
        # Wait for the end, and leave the process a zombie.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not is_running(process.pid)
    assert not is_running(process.pid)


def test_children_of_and_ancestors_of_return_the_processes_below_and_above() -> None:
    command = [*SHELL, sys.executable, "-c", WAIT_FOR_INPUT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as shell:
        assert shell.stdout is not None
        shell.stdout.readline()
        (child_pid,) = children_of(shell.pid)
        assert ancestors_of(child_pid) == [shell.pid, os.getpid(), *ancestors_of(os.getpid())]
        shell.communicate()
    assert ancestors_of(child_pid) == []
