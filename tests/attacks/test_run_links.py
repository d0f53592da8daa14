"""Training on in a stranger's run whose files are links to the user's own: none of them changes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ARGUMENTS = [
    *("model=rnnt_small", "device.threads=1", "device.autotune=false", "tracking=jsonl", "data.workers=0"),
    *("data.train.utterances=40", "data.valid.unheard.utterances=6", "encoder.hidden=32"),
]
FILES = ["config.yaml", "run.json", "result.json", "metrics.jsonl", "output.log", "device.json", "error.log"]
FILES += ["report.html", "skipped.jsonl", "filtered.jsonl", "lock", "agent.log", "profile-4-4.json"]
FOLDERS = ["checkpoints", "ranks", "stuck", "tensorboard"]


def train(run_dir: Path, steps: int, *more: str) -> subprocess.CompletedProcess[str]:
    program = str(Path(sys.executable).with_name("speechtrain-train"))
    line = [program, *ARGUMENTS, f"trainer.max_steps={steps}", f"run_dir={run_dir}", *more]
    return subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("good") / "run"
    done = train(run_dir, 2)
    assert done.returncode == 0, done.stderr
    return run_dir


@pytest.mark.parametrize("name", [*FILES, pytest.param(FOLDERS[0], marks=pytest.mark.ci_share), *FOLDERS[1:]])
def test_a_link_of_a_strangers_run_leads_nowhere(name: str, good: Path, tmp_path: Path) -> None:
    run_dir, home = tmp_path / "run", tmp_path / "home"
    shutil.copytree(good, run_dir)
    home.mkdir()
    path, own = run_dir / name, home / "own"
    if name in FOLDERS:
        shutil.rmtree(path, ignore_errors=True)
        (own / "step-00000001").mkdir(parents=True)
        (own / "step-00000001" / "kept").write_text("the user's own\n")
    else:
        own.write_text(path.read_text() if path.exists() else "the user's own\n")
        path.unlink(missing_ok=True)
    path.symlink_to(os.path.relpath(own, run_dir))
    before = {file: file.read_bytes() for file in home.rglob("*") if file.is_file()}
    done = train(run_dir, 4, "trainer.profile=4:4")
    assert {file: file.read_bytes() for file in home.rglob("*") if file.is_file()} == before
    assert "internal error" not in done.stderr
    assert "Traceback" not in done.stderr
    if done.returncode:
        assert len([line for line in done.stderr.splitlines() if "speechtrain: error:" in line]) == 1
