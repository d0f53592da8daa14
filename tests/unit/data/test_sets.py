"""Sets with facts of their own: normaliser, weight, language."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speechtrain.data.corpora.digits import Digits
from speechtrain.data.index import open_index
from speechtrain.data.module import SpeechData
from speechtrain.data.sampler import BatchLimits, EpochBatches, Sampler
from speechtrain.data.sources import check_source, open_source
from speechtrain.errors import DataError
from speechtrain.text.vocabulary import Characters
from tests.support.cuts import lhotse_cuts
from tests.support.samplers import new_sampler


def sampler(sizes: list[int], weights: list[float], **options: Any) -> Sampler:
    sets = np.repeat(np.arange(len(sizes)), sizes)
    rng = np.random.default_rng(1)
    seconds, keys = rng.uniform(1, 9, len(sets)).astype(np.float32), rng.integers(0, 2**62, len(sets))
    options = {"limits": BatchLimits(count=4), "seed": 3, **options}
    return new_sampler(seconds=seconds, keys=keys, sets=sets, weights=weights, **options)


def rows_of(plan: EpochBatches) -> list[int]:
    return [row for number in range(len(plan)) for row in plan[number].rows.tolist()]


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 300), min_size=2, max_size=4),
    weights=st.lists(st.floats(0.01, 100), min_size=4, max_size=4),
    epochs=st.integers(1, 7),
)
def test_every_recording_of_a_set_is_used_as_often_as_the_others(
    sizes: list[int], weights: list[float], epochs: int
) -> None:
    planned = sampler(sizes, weights[: len(sizes)])
    used = np.zeros(sum(sizes), int)
    for epoch in range(epochs):
        plan = planned.epoch_batches(epoch)
        assert len(plan) == planned.length(epoch)
        for number in range(len(plan)):
            batch = plan[number]
            rows, set_epochs = (
                batch.rows.tolist(),
                np.broadcast_to(batch.set_epochs, len(batch.rows)).tolist(),
            )
            np.add.at(used, rows, 1)
            assert len(set(zip(rows, set_epochs, strict=True))) == len(rows)
    for members in np.split(used, np.cumsum(sizes)[:-1]):
        assert members.max() - members.min() <= 1
        assert members.max() >= 1


@pytest.mark.parametrize("sizes", [[1000, 1000], [300, 4000], [4000, 77]])
@pytest.mark.parametrize("limits", [BatchLimits(count=4), BatchLimits(count=None, seconds=40.0)])
def test_the_share_of_a_set_is_its_weight_in_every_part_of_an_epoch(
    sizes: list[int], limits: BatchLimits
) -> None:
    planned = sampler(sizes, [3.0, 1.0], limits=limits, speed=(0.9, 1.1))
    for epoch in (0, 5):
        rows = np.array(rows_of(planned.epoch_batches(epoch)))
        assert len(rows) == sum(sizes)
        assert (rows < sizes[0]).mean() == pytest.approx(0.75, abs=0.01)
        for part in np.array_split(rows, 4):
            assert (part < sizes[0]).mean() == pytest.approx(0.75, abs=0.08)


def test_a_recording_that_is_repeated_has_other_draws() -> None:
    plan = sampler([5, 500], [1.0, 1.0], speed=(0.8, 1.2)).epoch_batches(0)
    speeds = plan.percents[plan.rows == 0]
    assert len(speeds) > 40
    assert len(set(speeds.tolist())) > 20


def test_without_weights_the_order_is_that_of_a_union(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPEECHTRAIN_CACHE", str(tmp_path / "cache"))
    paths = digits(tmp_path)
    union, named = (data_of(spec) for spec in (paths, {"a": paths[0], "b": {"path": paths[1]}}))
    assert [b.ids for b in islice(union.train(), 9)] == [b.ids for b in islice(named.train(), 9)]
    assert set(named.report()) == {"set a", "set b"}
    weighted = data_of({"a": {"path": paths[0], "weight": 3}, "b": paths[1]})
    assert weighted.report()["set a"] == "20 recordings, 0.01 h, 75.0% of an epoch"


def test_each_set_has_its_normaliser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEECHTRAIN_CACHE", str(tmp_path / "cache"))
    first, second = digits(tmp_path, said="ONE “two”")
    spec = {"a": {"path": first, "normaliser": "english"}, "b": {"path": second, "normaliser": "none"}}
    tokenizer = Characters()
    index = open_index(open_source(spec))
    again = pickle.loads(pickle.dumps(index))  # as a worker gets it
    for one in (index, again):
        said = {one.text(row, tokenizer.normalise) for row in range(len(one))}
        assert said == {"one two", "ONE “two”"}
    assert sorted(set(index.labels(tokenizer).tolist())) == [-1, 7]
    plain = open_index(open_source([first, second]))
    assert plain.folder != index.folder or set(plain.labels(tokenizer).tolist()) != {-1, 7}
    with pytest.raises(DataError, match=r"12 of 32 .*12 unknown_symbol.*tokenizer=auto"):
        data_of({**spec, "b": {"path": second, "normaliser": "none"}}).check()
    data = data_of({"a": spec["a"]}, valid={"dev": {"path": second, "normaliser": "english"}})
    data.check()
    assert {text for batch in islice(data.train(), 4) for text in batch.texts} == {"one two"}
    assert {text for batch in data.valid()["dev"] for text in batch.texts if text} == {"one two"}
    assert {text for _, text in data.recordings(str.upper)} == {"one two"}


def test_each_set_has_the_lower_case_of_its_language(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEECHTRAIN_CACHE", str(tmp_path / "cache"))
    first, second = digits(tmp_path, said="IŞIK")
    spec = {"tr": {"path": first, "language": "tr"}, "en": second}
    tokenizer = Characters(" ışik", "unicode")
    index = open_index(open_source(spec))
    for one in (index, pickle.loads(pickle.dumps(index))):
        assert {one.text(row, tokenizer.normalise) for row in range(len(one))} == {"ışık", "işik"}
    english = Characters(" işk", "unicode")
    assert sorted(set(index.labels(english).tolist())) == [-1, 4]
    assert sorted(set(open_index(open_source([first, second])).labels(english).tolist())) == [4]
    # The language of a manifest counts if the set has none.
    spoken = tmp_path / "spoken.jsonl"
    lines = [json.loads(line) | {"lang": "az"} for line in Path(first).read_text().splitlines()]
    spoken.write_text("\n".join(map(json.dumps, lines)))
    index = open_index(open_source(str(spoken)))
    assert {index.text(row, tokenizer.normalise) for row in range(len(index))} == {"ışık"}
    data = data_of({"path": first, "language": "tr"}, valid={"dev": {"path": second, "language": "tr"}})
    assert {text for batch in data.valid()["dev"] for text in batch.texts if text} == {"ışık"}


def test_a_set_without_a_recording_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEECHTRAIN_CACHE", str(tmp_path / "cache"))
    first, second = digits(tmp_path)
    line = json.dumps({"audio_filepath": "x.wav", "duration": 99.0, "text": "one"})
    (tmp_path / "long.jsonl").write_text(line + "\n")
    data = data_of({"a": first, "long": {"path": str(tmp_path / "long.jsonl"), "weight": 2}, "b": second})
    with pytest.raises(DataError, match=r"data\.train\.long: no recording is left"):
        next(data.train())


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"a": {"path": "x", "weight": 0}}, "a: weight is '0'. It must be a number above 0"),
        ({"a": {"path": "x", "weight": True}}, "a: weight is 'True'"),
        ([{"path": "x", "weight": 3}], "only training sets with names have the key weight"),
        ({"a": {"path": "x", "language": 3}}, "a: language is '3', not a string"),
        ({"a": {"path": "x", "hold_out": 0.1}}, "a: hold_out is '0.1'. It must be true or false"),
        ({"path": "x", "hold_out": False}, "only training sets with names have the key hold_out"),
        ({"a": {"b": {"path": "x"}}}, "a: 'b' is not a key of a source"),
        ({"a": 3}, "a: '3' is not a source"),
        ({"a": {}}, "a: a source needs its path"),
        ({}, "a source needs its path"),
        ([["x"]], "is a list in a list"),
    ],
)
def test_facts_that_are_wrong(spec: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        check_source("train", spec)
    with pytest.raises(ValueError, match="train: "):
        data_of(spec)


def test_a_validation_set_has_no_weight() -> None:
    with pytest.raises(ValueError, match="valid: dev: only training sets with names have the key weight"):
        data_of("x", valid={"dev": {"path": "x", "weight": 1}})


def digits(folder: Path, said: str | None = None) -> list[str]:
    """NeMo manifests of 20 and 12 recordings, as a and b."""
    source, paths = list(lhotse_cuts(Digits("train", utterances=32))), []
    for name, cuts in (("a", source[:20]), ("b", source[20:])):
        lines = [
            {
                "audio_filepath": cut.recording.sources[0].source,
                "duration": cut.duration,
                "offset": cut.start,
                "text": said or cut.supervisions[0].text,
            }
            for cut in cuts
        ]
        paths.append(folder / f"{name}.jsonl")
        paths[-1].write_text("\n".join(map(json.dumps, lines)))
    return list(map(str, paths))


def data_of(train: Any, **options: Any) -> SpeechData:
    options = {"valid": {}, "batch": BatchLimits(count=3), "speed": [0.9, 1.1], "workers": 0, **options}
    return SpeechData(train, tokenizer=Characters(), **options)


@pytest.mark.parametrize("form", [str, lambda path: [path], lambda path: {"path": path}])
def test_validation_data_without_a_name_is_the_set_valid(
    form: Callable[[str], Any], tmp_path: Path, cache: Path, recordings: Any
) -> None:
    data = SpeechData(recordings.corpus("train", 2), form(recordings.corpus("dev", 3)), Characters())
    sets = data.valid()
    assert list(sets) == ["valid"]
    assert sum(batch.utterances for batch in sets["valid"]) == 3
