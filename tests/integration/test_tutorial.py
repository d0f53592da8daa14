"""The shell blocks of docs/tutorial.md run in an empty folder, and the page of a run's files lists its files.

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


@pytest.mark.parametrize("name", ["first", "tuned"])
def test_the_page_of_a_runs_files_lists_each_file_and_key(folder: Path, name: str) -> None:
    page = (DOCS / "reference/run-files.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    patterns = []
    for entry in listed:
        pattern = re.escape(entry).replace("N", "[0-9]+")
        if entry.endswith("/"):
            pattern += ".+"
        patterns.append(pattern)
    run = folder / "runs" / name
    files = [str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [file for file in files if not re.fullmatch("|".join(patterns), file)] == []
    for path in run.rglob("*.json"):
        keys = read_json(path).keys() - {"sha256"}
        assert keys <= set(listed), path
    for line in (run / "metrics.jsonl").read_text().splitlines():
        event = json.loads(line)["event"]
        assert f"- `{event}`:" in page
