"""One tiny trained run for the tests of the commands that open runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

TINY = (
    *("recipe=demo", "device.threads=1", "trainer.max_steps=2", "data.workers=0"),
    *("data.train.utterances=16", "data.valid.unheard.utterances=4", "decoder.max_symbols=40"),
    *(
        "encoder.hidden=16",
        "model.prediction.hidden=16",
        "model.prediction.embedding=8",
        "model.joint.hidden=16",
    ),
)


def untrained(folder: Path, *overrides: str) -> Path:
    """A run that has saved its initial weights and has not trained."""
    from speechtrain.checkpoint.whole import Checkpointer
    from speechtrain.commands._hydra_app import compose
    from speechtrain.config.resolved import dump
    from speechtrain.train_rank import build_task

    config = compose([*overrides, f"run_dir={folder}"])
    task, tokenizer = build_task(config)
    Checkpointer(folder).save(1, {"task": task}, task.state_dict())
    (folder / "config.yaml").write_text(dump(config))
    tokenizer.save(str(folder))
    return folder


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
    own = ("tokenizer=sentencepiece", f"tokenizer.model={model}", f"run_dir={folder / 'tiny'}")
    assert train.run([*TINY, *own]) == 0
    model.unlink()
    return folder / "tiny"
