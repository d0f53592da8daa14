"""Calls of small programs in place of a cluster's clients."""

from __future__ import annotations

import os

import pytest

from speechtrain.errors import MachineError
from speechtrain.launch import client
from speechtrain.launch.client import ask_client, call_client


def test_a_program_reads_the_text_and_its_output_is_returned() -> None:
    assert call_client(["cat"], "cat", "a\nb\n") == "a\nb\n"
    assert ask_client(["echo", "a"]) == "a\n"


def test_a_terminals_signal_does_not_reach_a_program() -> None:
    """A terminal sends Ctrl-C to the processes of its session."""
    session = call_client(["cut", "--delimiter= ", "--fields=6", "/proc/self/stat"], "cut")
    assert int(session) not in (0, os.getsid(0))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'E1121 noise' >&2; echo 'error: You must\nlog in' >&2; exit 1", "error: You must log in"),
        ("exit 3", "exit code 3"),
    ],
)
def test_a_program_that_fails_is_quoted_in_one_line(script: str, message: str) -> None:
    with pytest.raises(MachineError) as raised:
        call_client(["sh", "-c", script], "launcher=slurm: sbatch")
    assert str(raised.value) == f"launcher=slurm: sbatch failed: {message}"
    assert ask_client(["sh", "-c", script]) is None


def test_a_program_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_TIMEOUT_SECONDS", 0.1)
    with pytest.raises(MachineError, match="sbatch got no answer"):
        call_client(["sleep", "60"], "sbatch")
    assert ask_client(["sleep", "60"]) is None
