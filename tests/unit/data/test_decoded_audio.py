"""data.decoded_gib: decoded recordings in memory, on which no result depends."""

from __future__ import annotations

import pickle
from itertools import islice
from typing import Any

import pytest
import torch

from speechtrain.data import loader
from speechtrain.data.module import SpeechData
from speechtrain.data.sampler import BatchLimits
from speechtrain.rank import batch_memory
from speechtrain.start.compose import compose
from speechtrain.start.run_config import run_config
from speechtrain.text.vocabulary import Characters

EPOCH = 5  # batches of 4 in 20 recordings


def make_data(train: str, decoded_gib: float | str, **options: Any) -> SpeechData:
    options = {"batch": BatchLimits(count=4), "speed": [0.9, 1.1], "workers": 0, **options}
    return SpeechData(train, {"dev": train}, Characters(), decoded_gib=decoded_gib, **options)


@pytest.fixture
def decoded_paths(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The recordings that this process has decoded."""
    paths: list[str] = []
    read_with_faults = loader.read_with_faults

    def recorded(cut: Any, *arguments: Any) -> Any:
        paths.append(cut["id"])
        return read_with_faults(cut, *arguments)

    monkeypatch.setattr(loader, "read_with_faults", recorded)
    return paths


@pytest.mark.usefixtures("cache")
def test_each_recording_is_decoded_once_and_no_batch_changes(
    recordings: Any, decoded_paths: list[str]
) -> None:
    train = recordings.corpus("a", 20)
    expected = list(islice(make_data(train, 0).train(), 3 * EPOCH))
    assert len(decoded_paths) == 60
    decoded_paths.clear()
    batches = list(islice(make_data(train, 1.0).train(), 3 * EPOCH))
    assert len(decoded_paths) == 20
    for batch, expected_batch in zip(batches, expected, strict=True):
        assert batch.ids == expected_batch.ids
        assert torch.equal(batch.audio, expected_batch.audio)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("decoded_gib", [0.0001, "auto"])
def test_a_set_that_needs_more_is_not_kept(
    recordings: Any, decoded_paths: list[str], decoded_gib: float | str
) -> None:
    list(islice(make_data(recordings.corpus("a", 20), decoded_gib).train(), 2 * EPOCH))
    assert len(decoded_paths) == 40


@pytest.mark.usefixtures("cache")
def test_workers_receive_no_samples(recordings: Any) -> None:
    data = make_data(recordings.corpus("a", 8), 1.0)
    next(data.train())
    copy = pickle.loads(pickle.dumps(data.loader))
    assert len(data.loader.decoded) == 4
    assert (copy.keeps_decoded, copy.decoded) == (True, {})


def test_each_rank_may_use_its_share_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_memory.host, "free_memory", lambda: 16 * 2**30)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    run = run_config(compose(["data.decoded_gib=auto"]))
    assert batch_memory.with_decoded_memory(run).data.node["decoded_gib"] == 2.0
