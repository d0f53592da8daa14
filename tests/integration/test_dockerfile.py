"""The Dockerfile's RUN lines in an empty virtual environment, because no Docker daemon runs here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def lines_of(instruction: str) -> list[str]:
    """Return the arguments of each line of the Dockerfile with an instruction such as RUN."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    return re.findall(rf"^{instruction} (.*)$", text, flags=re.MULTILINE)


def build_environment(venv: Path) -> dict[str, str]:
    """Return the variables of the RUN lines: the Dockerfile's defaults, and the commands of a venv."""
    environment = {**os.environ, "PATH": f"{venv}/bin:{os.environ['PATH']}"}
    for argument in lines_of("ARG"):
        name, _, value = argument.partition("=")
        environment[name] = value
    for variables in lines_of("ENV"):
        for pair in variables.split():
            name, _, value = pair.partition("=")
            environment[name] = value
    return environment


def run(command: list[str], folder: Path, environment: dict[str, str]) -> None:
    outcome = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 0, f"{command}\n{outcome.stderr[-2000:]}"


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_run_lines_make_an_environment_in_which_the_demo_starts(tmp_path: Path) -> None:
    folder, venv, run_dir = tmp_path / "speechtrain", tmp_path / "venv", tmp_path / "run"
    run(["git", "clone", "--quiet", str(ROOT), str(folder)], tmp_path, dict(os.environ))
    run([sys.executable, "-m", "venv", str(venv)], tmp_path, dict(os.environ))
    environment = build_environment(venv)
    steps = lines_of("RUN")
    assert len(steps) >= 3
    for step in steps:
        run(["sh", "-c", step], folder, environment)
    (command,) = lines_of("CMD")
    assert "speechtrain" in command
    demo = ["speechtrain", "train", "recipe=demo", "trainer.max_steps=2", f"run_dir={run_dir}"]
    run(demo, tmp_path, environment)
    assert (run_dir / "result.json").is_file()
