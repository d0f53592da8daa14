"""Commands that use a run start again with the variables of its device."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from speechtrain.data.corpora import digits
from speechtrain.devices.cpu import CPU

pytestmark = pytest.mark.slow

SCRIPTS = Path(sys.executable).parent
RECORDING = Path(digits.__file__).parent / "digits_audio" / "valid.flac"


def variables_of(process: subprocess.Popen[str]) -> dict[str, str]:
    """Return the environment that a process got at its latest ``execve``. It is empty after the end."""
    try:
        content = Path(f"/proc/{process.pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition("=") for entry in content.decode().split("\0"))
    return {name: value for name, _, value in pairs}


def last_variables(process: subprocess.Popen[str]) -> dict[str, str]:
    """Wait for the end of a process. Return the last environment that was read before it."""
    variables: dict[str, str] = {}
    while process.poll() is None:
        variables = variables_of(process) or variables
        time.sleep(0.01)
    return variables


@pytest.mark.parametrize("command", ["speechtrain evaluate", "speechtrain-transcribe"])
def test_the_device_sets_the_variables_of_a_command(run_dir: Path, command: str, tmp_path: Path) -> None:
    name, *words = command.split()
    arguments = ["--worst", "0"]
    if command == "speechtrain-transcribe":
        arguments = [str(RECORDING), "--out", str(tmp_path)]
    device = CPU(threads=1)
    expected = {**device.environment(1), **device.facts.evaluation_variables}
    assert expected["GOMP_SPINCOUNT"] == "3000"
    environment = {name: value for name, value in os.environ.items() if name not in expected}
    user_value = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "17"}
    line = [str(SCRIPTS / name), *words, str(run_dir), *arguments, "device.threads=1"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(line, env=environment | user_value, stdout=pipe, stderr=pipe, text=True)
    variables = last_variables(process)
    assert (process.returncode, process.communicate()[1]) == (0, "")
    assert {name: variables.get(name) for name in expected} == expected | user_value
