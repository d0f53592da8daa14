"""The example notebook, cell by cell as a person runs it, on a few recordings and a small budget."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"

SMALL = {
    'FOLDER = Path("my_recordings")': 'FOLDER = Path("in")',
    'RUN = Path("my_run")': 'RUN = Path("run")',
    "MORE = []": 'MORE = ["trainer.max_hours=null", "trainer.max_steps=4", "device.threads=1"]',
    "utterances=400": "utterances=24",
}


def test_the_notebook_goes_from_a_folder_to_a_transcript(tmp_path: Path) -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    source = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    for before, after in SMALL.items():
        assert source.count(before) == 1, before
        source = source.replace(before, after)
    (tmp_path / "cells.py").write_text(source + "\nassert outcome.examples\nassert transcript.seconds > 0\n")
    done = subprocess.run(
        [sys.executable, "cells.py"], cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "report:" in done.stdout
    assert "'wer'" in done.stdout
    assert (tmp_path / "run" / "result.json").exists()
    assert not [cell for cell in cells if cell.get("outputs")], "clear the outputs before committing"
