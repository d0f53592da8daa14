"""Commands that are given in a folder with modules of a stranger: none of their processes imports one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

from tests.support.strange_folder import write_modules

from .conftest import TINY

SHORT = ["trainer.max_steps=3", "data.workers=1", "data.valid_batch.count=2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("strange")
    write_modules(folder)
    return folder


def call(folder: Path, environment: dict[str, str], command: str, *arguments: str) -> str:
    """The output of a console command that is given in ``folder`` and ends well there."""
    line = [str(Path(sys.executable).parent / f"speechtrain-{command}"), *arguments]
    done = subprocess.run(
        line, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert not (folder / "ran").exists(), (folder / "ran").read_text()
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def run_dir(folder: Path, environment: dict[str, str]) -> Path:
    call(folder, environment, "train", *TINY, *SHORT, "run_dir=one")
    return folder / "one"


def test_one_rank_and_its_data_worker(run_dir: Path) -> None:
    assert json.loads((run_dir / "result.json").read_text())["steps"] == 3


def test_other_commands(run_dir: Path, environment: dict[str, str], tmp_path: Path) -> None:
    folder, path = run_dir.parent, tmp_path / "one.wav"
    soundfile.write(path, np.random.default_rng(0).standard_normal(8000) / 10, 16_000)
    line = {"audio_filepath": str(path), "text": "one", "duration": 0.5}
    (tmp_path / "train.jsonl").write_text(json.dumps(line) + "\n")
    call(folder, environment, "evaluate", str(run_dir), "data.workers=1")
    call(folder, environment, "transcribe", str(run_dir), str(path))
    call(folder, environment, "report", str(run_dir))
    call(
        folder,
        environment,
        "prepare",
        "manifest",
        str(tmp_path / "train.jsonl"),
        "--out",
        str(tmp_path / "a"),
    )
    call(folder, environment, "doctor", *TINY)


PROGRAM = """
import sys
sys.path[:] = [path for path in sys.path if path]  # as a console command has it
from speechtrain.data.workers import Workers
if __name__ == "__main__":
    workers = Workers(1, 60.0)
    workers.wait_until_ready()
    print("workers", len(workers.pids))
    workers.close()
"""


def test_the_data_workers_of_a_users_own_program(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    line = [sys.executable, str(tmp_path / "program.py")]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "workers 1\n"), done.stderr
    assert not (folder / "ran").exists(), (folder / "ran").read_text()
