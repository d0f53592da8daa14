"""The shell blocks of docs/tutorial.md run in an empty folder.

``NUM_STEPS`` in the environment makes the two runs short.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

DOCS = Path(__file__).resolve().parents[2] / "docs"
STEPS = 5


def shell_blocks() -> list[str]:
    page = (DOCS / "tutorial.md").read_text(encoding="utf-8")
    return re.findall(r"^```sh\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder after the tutorial."""
    folder = tmp_path_factory.mktemp("tutorial")
    environment = dict(os.environ)
    environment["NUM_STEPS"] = str(STEPS)
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    script = "\n".join(["set -eux", *shell_blocks()])
    command = ["bash", "-c", script]
    end = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert end.returncode == 0, f"{end.stdout}\n{end.stderr}"
    return folder


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_the_tutorial_ends_with_two_runs_and_their_outputs(folder: Path) -> None:
    for name in ("first", "tuned"):
        result = read_json(folder / f"runs/{name}/result.json")
        assert (result["status"], result["steps"]) == ("finished", STEPS)
    assert "init_from=runs/first" in read_json(folder / "runs/tuned/run.json")["overrides"]
    assert "tuned" in (folder / "comparison.html").read_text()
    recordings = list(folder.glob("speech/audio/01/*.wav"))
    assert recordings
    assert len(list(folder.glob("captions/**/*.srt"))) == len(recordings)
