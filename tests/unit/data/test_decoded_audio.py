"""data.decoded_gib: decoded recordings in memory, on which no result depends."""

from __future__ import annotations

import pickle
from itertools import islice
from typing import Any

import pytest
import torch

from speechtrain.data import decoded_audio, loader
from speechtrain.data.decoded_audio import bytes_of_process
from speechtrain.data.module import SpeechData
from speechtrain.data.sampler import BatchLimits
from speechtrain.text.vocabulary import Characters

EPOCH = 5  # batches of 4 in 20 recordings


def make_data(train: str, decoded_gib: float | str, **options: Any) -> SpeechData:
    options = {"batch": BatchLimits(count=4), "speed": [0.9, 1.1], "workers": 0, **options}
    return SpeechData(train, {"dev": train}, Characters(), decoded_gib=decoded_gib, **options)


@pytest.fixture
def decoded_paths(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The recordings that this process has decoded."""
    paths: list[str] = []
    read_cut = loader.read_cut

    def recorded(cut: Any, *arguments: Any) -> Any:
        paths.append(cut["id"])
        return read_cut(cut, *arguments)

    monkeypatch.setattr(loader, "read_cut", recorded)
    return paths


@pytest.mark.usefixtures("cache")
def test_each_recording_is_decoded_once_and_no_batch_changes(
    recordings: Any, decoded_paths: list[str]
) -> None:
    train = recordings.corpus("a", 20)
    expected = list(islice(make_data(train, 0).train(), 3 * EPOCH))
    assert len(decoded_paths) == 60
    decoded_paths.clear()
    batches = list(islice(make_data(train, "auto").train(), 3 * EPOCH))
    assert len(decoded_paths) == 20
    for batch, expected_batch in zip(batches, expected, strict=True):
        assert batch.ids == expected_batch.ids
        assert torch.equal(batch.audio, expected_batch.audio)


@pytest.mark.usefixtures("cache")
def test_no_more_than_the_limit_is_kept(recordings: Any, decoded_paths: list[str]) -> None:
    data = make_data(recordings.corpus("a", 20), 0.1)
    bytes_of_set = sum(batch.audio_lengths.sum() * 4 for batch in data.valid()["dev"])
    data.stream.loader.decoded.max_bytes = int(bytes_of_set) // 2
    decoded_paths.clear()
    list(islice(data.train(), 2 * EPOCH))
    assert 25 < len(decoded_paths) < 35
    assert data.stream.loader.decoded.bytes <= bytes_of_set / 2


@pytest.mark.usefixtures("cache")
def test_workers_receive_no_samples(recordings: Any) -> None:
    data = make_data(recordings.corpus("a", 8), "auto")
    next(data.train())
    decoded = data.stream.loader.decoded
    copy = pickle.loads(pickle.dumps(decoded))
    assert decoded.bytes > 0
    assert (copy.bytes, copy.max_bytes) == (0, decoded.max_bytes)


def test_a_set_that_needs_too_much_memory_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoded_audio.host, "free_memory", lambda: 4000)
    assert bytes_of_process("auto", 1000, workers=0) == 1000
    assert bytes_of_process("auto", 1001, workers=0) == 0
    assert bytes_of_process("auto", 1000, workers=2) == 0
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert bytes_of_process("auto", 1000, workers=1) == 0
    assert bytes_of_process(2.0, 1000, workers=4) == 2**29


@pytest.mark.parametrize("decoded_gib", ["all", -1.0, float("inf")])
def test_an_invalid_size_is_refused(decoded_gib: float | str) -> None:
    with pytest.raises(ValueError, match="decoded_gib=.*it must be auto, or 0 or more"):
        make_data("x", decoded_gib)
