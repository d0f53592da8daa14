"""Commands that use a run start again with the variables of its device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from speechtrain.devices.cpu import CPU


def variables_of(process: subprocess.Popen[str]) -> dict[str, str]:
    """Return the environment that a process got at its latest ``execve``. It is empty after the end."""
    try:
        content = Path(f"/proc/{process.pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition("=") for entry in content.decode().split("\0"))
    return {name: value for name, _, value in pairs}


@pytest.mark.parametrize("command", ["evaluate", "transcribe"])
def test_the_device_sets_the_variables_of_a_command(run_dir: Path, command: str, tmp_path: Path) -> None:
    program = Path(sys.executable).with_name(f"speechtrain-{command}")
    recording = str(next(Path(__file__).parents[3].glob("speechtrain/data/corpora/digits_audio/valid.flac")))
    arguments = [recording, "--out", str(tmp_path)] if command == "transcribe" else ["--worst", "0"]
    expected = CPU(threads=1).environment(1)
    environment = {name: value for name, value in os.environ.items() if name not in expected}
    environment["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "17"  # The user's own value stays.
    line = [str(program), str(run_dir), *arguments, "device.threads=1"]
    process = subprocess.Popen(
        line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    variables: dict[str, str] = {}
    while process.poll() is None:
        variables = variables_of(process) or variables
        try:
            process.wait(0.01)
        except subprocess.TimeoutExpired:
            continue
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert {name: variables.get(name) for name in expected} == {
        **expected,
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "17",
    }
