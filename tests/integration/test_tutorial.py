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
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "NUM_STEPS": str(STEPS), "PATH": path}
    script = "\n".join(["set -eux", *shell_blocks()])
    end = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=500
    )
    assert end.returncode == 0, f"{end.stdout}\n{end.stderr}"
    return folder


def test_the_tutorial_ends_with_two_runs_and_their_outputs(folder: Path) -> None:
    for name in ("first", "tuned"):
        result = json.loads((folder / "runs" / name / "result.json").read_text())
        assert (result["status"], result["steps"]) == ("finished", STEPS)
    about = json.loads((folder / "runs" / "tuned" / "run.json").read_text())
    assert "init_from=runs/first" in about["overrides"]
    assert "runs/tuned" in (folder / "comparison.html").read_text()
    recordings = list((folder / "speech" / "audio" / "01").glob("*.wav"))
    assert recordings
    assert len(list((folder / "captions").rglob("*.srt"))) == len(recordings)


def test_the_page_of_a_runs_files_lists_each_file_and_key(folder: Path) -> None:
    page = (DOCS / "reference" / "run-files.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    patterns = [re.escape(name).replace("N", "[0-9]+") + ".*" * name.endswith("/") for name in listed]
    for run in (folder / "runs" / "first", folder / "runs" / "tuned"):
        files = [path.relative_to(run) for path in run.rglob("*") if path.is_file()]
        assert len(files) > 10
        missing = [str(path) for path in files if not re.fullmatch("|".join(patterns), str(path))]
        assert missing == []
        for path in files:
            if path.suffix == ".json":
                assert json.loads((run / path).read_text()).keys() - {"sha256"} <= set(listed), path
        for line in (run / "metrics.jsonl").read_text().splitlines():
            assert f"- `{json.loads(line)['event']}`:" in page
