"""The commands of docs/tutorial.md run in an empty folder.

The runs are small: ``NUM_STEPS`` in the environment, and SMALL at the end of the first training command.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import INLINE, STARTER, finish

DOCS = Path(__file__).resolve().parents[2] / "docs"
STEPS = 5
SMALL = ("encoder.hidden=32", "model.prediction.hidden=32", "model.prediction.embedding=16")
SMALL += ("model.joint.hidden=32", "decoder.max_symbols=30", "data.valid.unheard.utterances=8")


def shell_blocks() -> Iterator[str]:
    page = (DOCS / "tutorial.md").read_text(encoding="utf-8")
    for match in re.finditer(r"^```sh\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        yield match[1].replace("\\\n", "")


def run_command(line: str) -> None:
    """Run one command of the page. A rank runs in the process of its command."""
    program, name, *words = shlex.split(line)
    assert program == "speechtrain"
    if name == "train":
        words += INLINE
    if "run_dir=runs/first" in words:
        words += SMALL
    end = finish(STARTER.start(words, os.environ | {"NUM_STEPS": str(STEPS)}, name))
    assert end.returncode == 0, f"{line}\n{end.stdout}\n{end.stderr}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder after the tutorial."""
    folder = tmp_path_factory.mktemp("tutorial")
    with contextlib.chdir(folder):
        for block in shell_blocks():
            for line in block.splitlines():
                run_command(line)
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
