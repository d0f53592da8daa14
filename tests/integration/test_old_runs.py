"""Runs that earlier releases made: they evaluate, transcribe and continue as they did then."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import Command

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "old_runs"
RUNS = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
RECOGNISERS = [name for name in RUNS if name != "wav2vec2"]
MOST_BYTES = 6_000_000


def expected(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((GOLDEN / name / "expected.json").read_text())
    return content


@pytest.fixture
def copy_of(command: Callable[..., Command]) -> Callable[..., Command]:
    """``copy_of("rnnt", "finished")``: a copy of a run under another name."""

    def make(name: str, kind: str) -> Command:
        run = command(f"{name}-{kind}")
        shutil.copytree(GOLDEN / name / kind, run.run_dir)
        return run

    return make


def test_every_file_is_tracked() -> None:
    files = {p for p in GOLDEN.rglob("*") if p.is_file()}
    listed = subprocess.run(
        ["git", "ls-files", "-z", "."], cwd=GOLDEN, capture_output=True, text=True, check=True
    )
    tracked = {GOLDEN / name for name in listed.stdout.split("\0") if name}
    assert files == tracked
    assert {f"{name}/{kind}/config.yaml" for name in RUNS for kind in ("finished", "interrupted")} <= {
        str(p.relative_to(GOLDEN)) for p in files
    }
    assert sum(p.stat().st_size for p in files) <= MOST_BYTES


@pytest.mark.parametrize("name", RUNS)
def test_a_finished_run_is_evaluated_as_then(copy_of: Callable[..., Command], name: str) -> None:
    run = copy_of(name, "finished")
    done = run.tool("evaluate", str(run.run_dir), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["metrics"]
    assert found == {
        key: pytest.approx(metrics, rel=1e-4) for key, metrics in expected(name)["evaluation"].items()
    }


@pytest.mark.parametrize("name", RECOGNISERS)
def test_a_finished_run_transcribes_as_then(
    copy_of: Callable[..., Command], tmp_path: Path, name: str
) -> None:
    run = copy_of(name, "finished")
    sample = tmp_path / "sample.wav"
    assert run.tool("prepare", "sample", str(sample)).returncode == 0
    done = run.tool("transcribe", str(run.run_dir), str(sample))
    assert done.returncode == 0, done.stderr
    text = expected(name)["transcript"]
    assert text  # an empty one would be equal to anything that fails
    assert done.stdout == f"{sample}\t{text}\n"
