"""A loaded run is a guest in the program of another: threads, forks and settings of the process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from speechtrain.inference.loaded_run import LoadedRun, load
from tests.support.digits import write_sample

CALLS = 32
DECODERS: tuple[dict[str, Any], ...] = (
    {"decoder": "greedy", "max_symbols": 3},
    {"decoder": "beam", "width": 2},
    {"decoder": "none"},
)


@pytest.fixture(scope="module")
def loaded(run_dir: Path) -> LoadedRun:
    return load(run_dir)


@pytest.fixture(scope="module")
def wav(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("audio") / "a.wav"
    write_sample(path)
    return path


def result(run: LoadedRun, wav: Path, decoder: dict[str, Any]) -> tuple[str, float]:
    (transcript,) = run.transcribe(wav, **decoder)
    return transcript.text, transcript.score


def test_threads_with_several_decoders_get_their_own_results(loaded: LoadedRun, wav: Path) -> None:
    expected = [result(loaded, wav, decoder) for decoder in DECODERS]
    assert len(set(expected)) == len(DECODERS)
    calls = [number % len(DECODERS) for number in range(CALLS)]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda call: result(loaded, wav, DECODERS[call]), calls))
    assert results == [expected[call] for call in calls]
