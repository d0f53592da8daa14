"""The name of a run, and the number of reads of ``run.json``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from speechtrain.commands import train
from speechtrain.errors import RunError
from speechtrain.run_directory import About, read_about
from speechtrain.runs import run_name
from tests.support.tiny_run import TINY


@pytest.fixture
def reads(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The number of reads of the run.json of each run in the folder of this test, which has two runs."""
    monkeypatch.setenv("OUTPUT_DIR", str(tmp_path))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for file in ("run.json", "config.yaml"):
            (tmp_path / name / file).write_bytes((run_dir / file).read_bytes())
    counts: Counter[str] = Counter()

    def read(folder: Path) -> About:
        counts[folder.name] += 1
        return read_about(folder)

    monkeypatch.setattr(run_name, "read_about", read)
    return counts


def test_a_command_reads_each_run_json_once(reads: Counter[str]) -> None:
    assert train.run([*TINY, "dry_run=true"]) == 0
    assert reads == {"a": 1, "b": 1}


def test_existing_run_matches_a_run_that_is_read_once(reads: Counter[str], run_dir: Path) -> None:
    names = run_name.RunNames(None)
    overrides = read_about(run_dir).overrides
    for _ in range(2):
        with pytest.raises(RunError, match=r"a and .*b started with the same keys"):
            names.existing_run(overrides)
    assert names.existing_run(["seed=3"]) is None
    assert reads == {"a": 1, "b": 1}
