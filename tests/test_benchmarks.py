"""The programs of benchmarks/ still run. What they measure is in docs/benchmarks, and is no matter here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
SMALLEST = {
    "accelerators": ("--smoke",),
    "cpu_step": ("--smoke",),
    "data_resume": ("--smoke",),
    "resampling": ("--seconds", "1", "--rounds", "1"),
    "features": ("--rows", "1", "--seconds", "1", "--rounds", "1"),
    "greedy": ("speechtrain/decoding/greedy.py", "--smoke"),
    "memory": ("--smoke",),
    "negatives": ("--smoke",),
    "openmp": ("--smoke",),
    "scaling": ("--smoke",),
    "stack_time": ("--smoke",),
    "study": ("--rounds", "1"),
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


HELP = """
import contextlib, io, json, runpy, sys, traceback
folder, *names = sys.argv[1:]
sys.path.insert(0, folder)
outcomes = {}
for name in names:
    sys.argv = [f"{folder}/{name}.py", "--help"]
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        outcomes[name] = [end.code or 0, output.getvalue()]
    except Exception:
        outcomes[name] = [1, traceback.format_exc()]
print(json.dumps(outcomes))
"""
"""All in one process, which imports torch once."""


@pytest.fixture(scope="module")
def helps() -> dict[str, tuple[int, str]]:
    """The exit code and the output of ``--help`` of each."""
    command = [sys.executable, "-c", HELP, str(FOLDER), *sorted(TRAINS | PEERS)]
    process = subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True, check=True)
    outcomes: dict[str, tuple[int, str]] = json.loads(process.stdout)
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TRAINS | PEERS))
def test_its_imports_and_its_help(name: str, helps: dict[str, tuple[int, str]]) -> None:
    code, output = helps[name]
    assert code == 0, output
    assert output.strip()
