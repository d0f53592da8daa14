"""What ends a rank before its last update: a signal, and the end of its command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from speechtrain.rank.stop import StopRequest


def test_a_rank_that_outlived_its_command_before_it_could_ask_stops(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from speechtrain.launch.launcher import PARENT\n"
        "from speechtrain.rank.stop import StopRequest\n"
        "for parent in sys.argv[1:]:\n"
        "    os.environ[PARENT] = parent\n"
        "    print(StopRequest()())"
    )
    expected = {
        str(os.getpid()): "False",
        "999999999": "True",  # it has gone
        "": "False",
        str(os.getppid()): "False",  # this process is the agent between
    }
    line = [sys.executable, "-c", code, *expected]
    process = subprocess.run(line, capture_output=True, text=True)
    assert process.stdout.split() == [*expected.values()], process.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_request(number: int) -> None:
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, before)
        signal.pthread_kill(
            threading.get_ident(), number
        )  # waits, as it does while a rank imports its libraries
        stop = StopRequest()
        assert stop()
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)
