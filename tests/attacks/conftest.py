"""Commands on a stranger's files, forked, and a run to evaluate and transcribe with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_run import untrained

from .forks import Forks

FORKS = Forks()
SMALL = (
    *("recipe=demo", "device.threads=1", "device.autotune=false", "data.workers=0", "tracking=jsonl"),
    *("data.valid.unheard.utterances=4", "decoder.max_symbols=40", "encoder.hidden=16"),
    *("model.prediction.hidden=16", "model.prediction.embedding=8", "model.joint.hidden=16"),
)


@pytest.fixture(scope="session")
def forks() -> Forks:
    """Runs commands; one process to fork from serves all tests of a pytest process."""
    return FORKS


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with initial weights, to evaluate and transcribe with; a test that changes it copies it."""
    return untrained(tmp_path_factory.mktemp("good") / "run", *SMALL)
