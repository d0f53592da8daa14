"""Commands and data workers import nothing from the folder in which they run: a corpus, unpacked and entered."""

# ruff: noqa: E501 - tables of cases

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .data import Place

MODULES = ("torch", "random", "numpy", "lhotse", "soundfile", "sitecustomize", "usercustomize", "json", "speechtrain",
           "pdb", "scipy", "yaml", "hydra", "omegaconf", "sentencepiece", "multiprocessing", "conf", "launchers")  # fmt: skip
WORKERS = """
import sys
sys.path[:] = [path for path in sys.path if path]  # as in a console script
if __name__ == "__main__":
    from speechtrain.data.workers import Processes
    workers = Processes(1, 60.0)
    workers.wait_until_ready()
    print("workers", len(workers.pids))
    workers.close()
"""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A folder with a module of each name that makes the canary, as a file and as a package."""
    found = Place(tmp_path / "place")
    line = f"open({str(found.canary)!r}, 'a').write(__name__)\nraise ImportError('a stranger')\n"
    for name in MODULES:
        found.file(f"{name}.py", line)
    for name in ("data", "tests", "torchaudio", "sphn", "audioread", "torchcodec"):
        found.file(f"{name}/__init__.py", line)
    return found


def executed(place: Place, *line: object) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    return subprocess.run(
        [*map(str, line)],
        cwd=place.folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.ci_share
def test_the_fork_server_imports_nothing_here(place: Place, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(WORKERS)
    done = executed(place, sys.executable, "-P", program)
    assert not place.canary.exists(), place.canary.read_text()
    assert done.stdout == "workers 1\n", done.stderr


def script(name: str) -> Path:
    return Path(sys.executable).with_name(f"speechtrain-{name}")


@pytest.mark.parametrize("workers", [0, 1])
def test_training_and_evaluating_import_nothing_here(place: Place, workers: int) -> None:
    source = place.lines(*[place.cut(id=str(number)) for number in range(12)])
    own = [
        "model=rnnt_small",
        "data=manifest",
        f"data.train={source}",
        f"data.valid.dev={source}",
        "tracking=none",
    ]
    own += ["trainer.max_steps=1", "device.threads=1", "device.autotune=false", "encoder.hidden=16"]
    own += [f"data.workers={workers}", f"data.cache={place.folder / 'cache'}", "run_dir=run"]
    done = executed(place, script("train"), *own)
    assert not place.canary.exists(), place.canary.read_text()
    assert done.returncode == 0, done.stderr
    for line in (["evaluate", "run", f"data.workers={workers}"], ["transcribe", "run", "ok.wav"], ["report", "run"],
                 ["prepare", "manifest", ".", "--check", "--out", "o.jsonl"]):  # fmt: skip
        done = executed(place, script(line[0]), *line[1:])
        assert not place.canary.exists(), (line, place.canary.read_text())
        assert done.returncode == 0, (line, done.stderr)
