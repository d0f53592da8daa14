from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from speechtrain.errors import EXIT_PREEMPTED
from tests.integration.conftest import wait_for

JOB = """
import os, signal, sys, time
from pathlib import Path
from speechtrain.launch.sweep_end import ending_with

folder = Path(sys.argv[1])
saved = []
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with ending_with(int(sys.argv[2])):
    if sys.argv[3] == "training":
        signal.signal(signal.SIGTERM, lambda *_: saved.append("saved"))
    (folder / "started").touch()
    while not saved and sys.argv[3] != "idle":
        time.sleep(0.05)
    (folder / "saved").touch()
while True:
    time.sleep(0.05)
"""


@pytest.mark.parametrize(
    ("phase", "code", "has_saved"),
    [
        ("training", EXIT_PREEMPTED, True),
        ("waiting", -signal.SIGTERM, False),
        ("idle", -signal.SIGTERM, True),
    ],
)
def test_a_process_of_jobs_ends_with_the_command(
    tmp_path: Path, phase: str, code: int, has_saved: bool
) -> None:
    command = subprocess.Popen(["sleep", "1000"])
    job = subprocess.Popen([sys.executable, "-c", JOB, str(tmp_path), str(command.pid), phase])
    wait_for((tmp_path / ("saved" if phase == "idle" else "started")).exists, goal="the job")
    os.kill(command.pid, signal.SIGKILL)
    command.wait()
    assert job.wait(timeout=60) == code
    assert (tmp_path / "saved").exists() == has_saved
