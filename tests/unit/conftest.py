"""One tiny trained run for the tests of programs that open runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tiny_run import TINY


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder that every test here shares."""
    folder = tmp_path_factory.mktemp("cache")
    before = os.environ.get("SPEECHTRAIN_CACHE")
    os.environ["SPEECHTRAIN_CACHE"] = str(folder)
    yield folder
    if before is None:
        os.environ.pop("SPEECHTRAIN_CACHE")
    else:
        os.environ["SPEECHTRAIN_CACHE"] = before


@pytest.fixture(scope="session")
def run_dir(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two steps with a SentencePiece tokenizer whose file is gone since."""
    from speechtrain.commands import prepare, train

    folder = tmp_path_factory.mktemp("runs")
    model = folder / "t.model"
    assert prepare.run(["tokenizer", "--corpus", "digits", "--out", str(model), "--size", "24"]) == 0
    overrides = ("tokenizer=sentencepiece", f"tokenizer.model={model}", f"run_dir={folder / 'tiny'}")
    assert train.run([*TINY, *overrides, "launcher=local", "launcher.inline=true"]) == 0
    model.unlink()
    return folder / "tiny"
