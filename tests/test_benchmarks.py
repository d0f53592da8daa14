"""The programs of benchmarks/ still run. What they measure is in docs/benchmarks, and is no matter here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
SMALLEST = {
    "accelerators": ("--smoke",),
    "cpu_step": ("--smoke",),
    "data_resume": ("--cuts", "300"),
    "resampling": ("--seconds", "1", "--rounds", "1"),
    "features": ("--rows", "1", "--seconds", "1", "--rounds", "1"),
    "greedy": ("speechtrain/decoding/greedy.py", "--smoke"),
    "memory": ("--smoke",),
    "negatives": ("--smoke",),
    "openmp": ("--smoke",),
    "scaling": ("--smoke",),
    "stack_time": ("--smoke",),
    "transducer_loss": ("--smoke",),
    "wav2vec2": ("--smoke",),
}
# These train for minutes or hours, or need a run.
TRAINS = {
    "ladder",
    "decoders",
    "evaluation",
    "first_contact",
    "pretraining",
    "recipes",
    "scratch",
    "survival",
    "transcribe",
}
PEERS = {"parakeet", "parakeet_speech"}  # in the environment of `make peers`


def run(name: str, *arguments: str) -> None:
    command = [sys.executable, str(FOLDER / f"{name}.py"), *arguments]
    done = subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()


def test_every_benchmark_is_known() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {*SMALLEST, *TRAINS, *PEERS}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLEST)
def test_at_its_smallest(name: str) -> None:
    run(name, *SMALLEST[name])


@pytest.mark.parametrize("name", sorted(TRAINS | PEERS))
def test_its_imports_and_its_help(name: str) -> None:
    run(name, "--help")
