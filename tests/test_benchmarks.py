"""The programs of benchmarks/ still run. What they measure is in docs/benchmarks, and is no matter here."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from speechtrain.devices.cpu import CPU
from speechtrain.start.compose import compose

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parent.parent / "benchmarks"
SMALLEST = {
    "accelerators": ("--smoke",),
    "cpu_step": ("--smoke",),
    "data_resume": ("--smoke",),
    "features": ("--rows", "1", "--seconds", "1", "--rounds", "1"),
    "memory": ("--smoke",),
    "scaling": ("--smoke",),
    "study": ("--rounds", "1"),
    "transducer_loss": ("--smoke",),
    "wav2vec2": ("--smoke",),
}
# These train for minutes or hours, or need a run.
TRAINS = {
    "cut_words",
    "decoders",
    "first_contact",
    "onnx",
    "pauses",
    "pretraining",
    "recipes",
    "run_step",
    "scratch",
    "silence",
    "streaming",
    "survival",
    "transcribe",
}
SHARED = {"measuring"}  # imported by others
PEERS = {"parakeet", "parakeet_speech"}  # in the environment of `make peers`


def run(name: str, *arguments: str) -> None:
    command = [sys.executable, str(FOLDER / f"{name}.py"), *arguments]
    done = subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()


def test_every_benchmark_is_known() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {*SMALLEST, *TRAINS, *PEERS, *SHARED}


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


@pytest.mark.parametrize("name", sorted(TRAINS | PEERS))
def test_its_imports_and_its_help(name: str, helps: dict[str, tuple[int, str]]) -> None:
    code, output = helps[name]
    assert code == 0, output
    assert output.strip()


@pytest.fixture
def first_contact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    return runpy.run_path(str(FOLDER / "first_contact.py"))


def test_first_contact_keeps_results_before_a_crash(first_contact: dict[str, Any]) -> None:
    config, values = compose(["device=cpu"]), {"ctc": {"value": 7}}
    with pytest.raises(KeyError):
        first_contact["first_contact"](config, ["device=cpu"], ["ctc", "crash"], values.__getitem__)
    report = json.loads(Path("first-contact-cpu.json").read_text())
    assert report["probes"] == values
    assert "| ctc |" in Path("first-contact-cpu.md").read_text()


def test_first_contact_probes_in_another_process(first_contact: dict[str, Any]) -> None:
    run_in_process = first_contact["run_in_process"]
    assert run_in_process(["device=cpu"], "ctc")["largest relative difference"] == 0
    assert run_in_process(["device=cpu"], "no_memory")["known"]
    assert run_in_process(["device=missing"], "ctc")["error"].startswith("exit code")


def test_first_contact_compares_a_product_that_wraps(first_contact: dict[str, Any], tmp_path: Path) -> None:
    contact = first_contact["Contact"](CPU(), compose(["device=cpu"]), ["device=cpu"], tmp_path)
    values = contact.int64()
    product = 0x7FEB352D * first_contact["_MULTIPLIER"]
    lower_bits = (product + 2**31) % 2**32 - 2**31
    assert values["int32 product"] == values["int32 product on the CPU"] == lower_bits


def test_first_contact_counts_launches(first_contact: dict[str, Any], tmp_path: Path) -> None:
    contact = first_contact["Contact"](CPU(), compose(["device=cpu"]), ["device=cpu"], tmp_path)
    device = torch.device("cpu")
    costs = contact._costs(lambda: torch.ones(2, device=device).add(1))
    assert costs.launches == 2
