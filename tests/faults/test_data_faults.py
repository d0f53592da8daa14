"""Data that change or vanish under a run: named, no update lost, and nothing trained on without a word."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ..integration.conftest import TINY, finish
from ..support.digits import write_digits
from .conftest import SLOW_DATA, Run

PLAN = ["trainer.max_steps=30", "trainer.save_every=100", "trainer.validate_every=10"]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder with 48 and 4 recordings and two manifests, as a user has them."""
    folder = tmp_path / "corpus"
    write_digits(folder, train=48, valid=4)
    return folder


@pytest.fixture
def found(run: Callable[..., Run], corpus: Path) -> Run:
    """A run on the manifests of ``corpus``."""
    made = run("run")
    kept = [a for a in TINY if not a.startswith(("recipe=", "data."))]
    own = ["recipe=demo", "data=manifest", f"data.train={corpus}/train.jsonl", "data.batch.count=4"]
    sets = [f"data.valid.dev={corpus}/valid.jsonl", "data.workers=0", *SLOW_DATA, *PLAN]
    made.arguments = [*own, *kept, *sets, f"run_dir={made.run_dir}"]
    return made


def cuts(manifest: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in manifest.read_text().splitlines()]


def audio_of(cut: Mapping[str, Any]) -> Path:
    return Path(cut["recording"]["sources"][0]["source"])


def test_an_evaluation_file_that_vanishes_loses_no_update(
    found: Run, corpus: Path, figures: Callable[[str], None]
) -> None:
    found.environment["FAULTS_PAUSE"] = "0.2"
    process = found.start("data.max_bad=0")
    found.wait_for_step(2, process)
    audio = audio_of(cuts(corpus / "valid.jsonl")[0])
    audio.rename(audio.with_suffix(".away"))
    ended = finish(process)
    assert ended.returncode == 3, ended.stderr
    assert audio.name in ended.stderr
    reached = found.step()
    assert found.checkpoints()[-1].name == f"step-{reached:08d}"
    audio.with_suffix(".away").rename(audio)
    again = found.run()
    assert again.returncode == 0, again.stderr
    assert [e["step"] for e in found.events("resume")] == [reached]
    assert [e["step"] for e in found.events("valid")] == [10, 20, 30]
    figures(f"code 3, saved at step {reached}, then finished with all validations")


@pytest.mark.ci_share
def test_recordings_that_become_unreadable_end_the_run_saved(
    found: Run, corpus: Path, figures: Callable[[str], None]
) -> None:
    found.environment["FAULTS_PAUSE"] = "0.2"
    process = found.start("data.max_bad=3")
    found.wait_for_step(2, process)
    for cut in cuts(corpus / "train.jsonl")[::2]:
        audio_of(cut).write_bytes(b"RIFFxxxx")
    ended = finish(process)
    assert ended.returncode == 3, ended.stderr
    assert "training recordings are unusable" in ended.stderr
    assert found.checkpoints()[-1].name == f"step-{found.step():08d}"
    listed = (found.run_dir / "skipped.jsonl").read_text().splitlines()
    assert len(listed) == 4
    figures(f"code 3 after {len(listed)} unreadable recordings, saved at step {found.step()}")
