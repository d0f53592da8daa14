from __future__ import annotations

import ast
import copy
import inspect
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from speechtrain.batch import Batch
from speechtrain.data.corpora.digits import Digits
from speechtrain.data.module import SpeechData
from speechtrain.data.sampler import BatchLimits
from speechtrain.data.workers import automatic_workers
from speechtrain.errors import DataError
from speechtrain.text.vocabulary import Characters, NoText
from tests.support.data_module import make_data


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache that holds the embedded digits, shared by this module."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPEECHTRAIN_CACHE", str(folder))
        yield folder


def ids_of(batches: Any) -> list[tuple[str, ...]]:
    return [batch.ids for batch in batches]


def assert_same(ours: Batch, theirs: Batch) -> None:
    assert (ours.ids, ours.epoch, ours.index) == (theirs.ids, theirs.epoch, theirs.index)
    assert torch.equal(ours.audio, theirs.audio)
    assert torch.equal(ours.labels, theirs.labels)


# --- resume -------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.integers(0, 30),
    accumulate=st.integers(1, 4),
    into=st.integers(0, 3),
    limits=st.sampled_from(
        [BatchLimits(count=3), BatchLimits(count=None, seconds=9.0), BatchLimits(count=4, window=1)]
    ),
)
def test_a_resumed_run_goes_on_as_if_nothing_had_happened(
    corpus: Path, steps: int, accumulate: int, into: int, limits: BatchLimits
) -> None:
    """Also from the midst of a global batch, which begins again, and over the ends of epochs."""
    first = make_data(corpus, batch=limits)
    stream = first.train(accumulate=accumulate)
    for _ in range(steps * accumulate + into % accumulate):
        next(stream)
    state = copy.deepcopy(first.state_dict())
    whole = make_data(corpus, batch=limits).train(accumulate=accumulate)
    expected = list(islice(whole, steps * accumulate, (steps + 2) * accumulate))
    resumed = make_data(corpus, batch=limits)
    resumed.load_state_dict(state)
    for ours, theirs in zip(expected, resumed.train(accumulate=accumulate), strict=False):
        assert_same(ours, theirs)


@pytest.mark.slow
def test_resume_with_workers_is_that_without(corpus: Path) -> None:
    expected = list(islice(make_data(corpus).train(accumulate=2), 30))
    first = make_data(corpus, workers=2)
    second = make_data(corpus, workers=1)
    try:
        stream = first.train(accumulate=2)
        found = [next(stream)]
        first.workers.wait_until_ready()
        found += [next(stream) for _ in range(13)]
        assert (first.state_dict()["epoch"], first.state_dict()["position"]) == (1, 3)  # 11 to an epoch
        second.load_state_dict(first.state_dict())  # batches loaded ahead are not handed over
        again = second.train(accumulate=2)
        found += [next(again)]
        second.workers.wait_until_ready()
        found += [next(again) for _ in range(15)]
    finally:
        first.close()
        second.close()
    for ours, theirs in zip(expected, found, strict=True):
        assert_same(ours, theirs)


def test_the_state_is_an_address(corpus: Path) -> None:
    data = make_data(corpus)
    stream = data.train(accumulate=4)
    for number, expected in enumerate([0, 0, 0, 4, 4, 4, 4, 8], 1):
        next(stream)
        assert (data.state_dict()["epoch"], data.state_dict()["position"]) == (0, expected), number
    fields = {"epoch", "position", "sets", "held_out", "skipped", "acoustics"}
    assert set(data.state_dict()) == fields


def test_a_resume_on_other_cuts_is_refused(corpus: Path) -> None:
    state = make_data(corpus).state_dict()
    other = make_data(corpus, train=Digits("train", utterances=32))
    with pytest.raises(DataError, match=r"1 of 32 recordings differ \(1 new\), e\.g\. "):
        other.load_state_dict(state)


def test_a_resume_on_other_transcripts_is_refused(tmp_path: Path, cache: Path, recordings: Any) -> None:
    path = Path(recordings.corpus("said", 2))
    before = make_data(cache, train=str(path))
    state = before.state_dict()
    lines = path.read_text().splitlines(keepends=True)
    assert '"text": "' in lines[1]
    path.write_text(lines[0] + lines[1].replace('"text": "', '"text": "nine '))
    after = make_data(cache, train=str(path))
    assert after.training_set.index.content == before.training_set.index.content  # the same recordings
    with pytest.raises(DataError, match=r"1 of 2 recordings differ \(1 changed\), e\.g\. "):
        after.load_state_dict(state)


def test_a_set_without_transcripts_is_refused_before_training(cache: Path, recordings: Any) -> None:
    said, unsaid = recordings.corpus("said", 3), recordings.corpus("unsaid", 3, text=" ")
    with pytest.raises(DataError, match=r"train: 3 of 3 .* \(3 empty_transcript; .*a\.txt"):
        make_data(cache, train=unsaid, valid={}).check()
    with pytest.raises(DataError, match=r"none of 3 recordings of data\.valid\.dev has a transcript"):
        make_data(cache, train=said, valid={"dev": unsaid}).check()
    make_data(cache, train=said, valid={"dev": said}).check()
    make_data(cache, train=unsaid, valid={}, allow_empty=True).check()
    SpeechData(unsaid, {"dev": unsaid}, NoText(), workers=0, cache=str(cache)).check()


# --- ranks --------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    split=st.sampled_from([(1, 4), (2, 2), (4, 1), (1, 6), (2, 3), (3, 2), (6, 1)]),
    steps=st.integers(1, 5),
    count=st.integers(1, 8),
)
def test_ranks_and_accumulation_share_one_global_order(
    corpus: Path, split: tuple[int, int], steps: int, count: int
) -> None:
    world, accumulate = split
    size = world * accumulate
    options = {"batch": BatchLimits(count=count)}
    expected = ids_of(islice(make_data(corpus, **options).train(accumulate=size), steps * size))
    modules = [make_data(corpus, **options) for _ in range(world)]
    streams = [module.train(rank, world, accumulate) for rank, module in enumerate(modules)]
    found = []
    for _ in range(steps):
        taken = [[next(stream).ids for _ in range(accumulate)] for stream in streams]
        found += [taken[rank][a] for a in range(accumulate) for rank in range(world)]
    assert found == expected
    states = [module.state_dict() for module in modules]
    sets = [state.pop("sets") for state in states]
    assert all(state == states[0] for state in states)
    assert all(torch.equal(tensor, sets[0][name]) for named in sets for name, tensor in named.items())
    # and a run that goes on with another number of ranks goes on with the same order
    data = make_data(corpus, **options)
    data.load_state_dict(states[0] | {"sets": sets[0]})
    longer = ids_of(islice(make_data(corpus, **options).train(accumulate=size), (steps + 1) * size))
    assert ids_of(islice(data.train(accumulate=size), size)) == longer[steps * size :]


# --- evaluation ---------------------------------------------------------------------------------


def test_a_part_of_an_evaluation_set_has_its_seconds(corpus: Path) -> None:
    """A plan by time divides the audio that it has evaluated by them."""
    data = make_data(corpus)
    total = sum(batch.seconds for batch in data.valid()["unheard"])
    for rank in range(2):
        assert data.valid(rank, 2)["unheard"].seconds == pytest.approx(total / 2, rel=0.01)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("limits", [BatchLimits(count=4), BatchLimits(count=None, seconds=8.0)])
def test_evaluation_has_every_utterance_once_over_ranks_of_equal_counts(
    corpus: Path, world: int, limits: BatchLimits
) -> None:
    data = make_data(corpus, valid_batch=limits, max_seconds=0.5, min_seconds=0.2)
    shares = [data.valid(rank, world)["unheard"] for rank in range(world)]
    batches = [list(share) for share in shares]
    assert len({len(share) for share in batches}) == 1
    assert len(shares[0]) == len(batches[0])  # type: ignore[arg-type]
    met = [name for share in batches for batch in share for name in batch.ids if name]
    assert sorted(met) == [f"digits-valid-0-{i:06d}" for i in range(21)]
    assert sum(float(batch.weight.sum()) for share in batches for batch in share) == 21
    assert ids_of(shares[0]) == ids_of(batches[0])  # may be iterated again
    assert all(batch.audio_lengths.min() > 0 for share in batches for batch in share)
    padded = sum(batch.audio.numel() for batch in batches[0] if batch.utterances)
    assert padded < 1.3 * sum(batch.seconds for batch in batches[0]) * 16_000


def test_large_evaluation_sets_go_through_the_workers(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ids_of(make_data(corpus).valid()["unheard"])
    monkeypatch.setattr("speechtrain.data.evaluation_sets._SMALL_SECONDS", 0)
    data = make_data(corpus, workers=1)
    try:
        chosen = data.valid()["unheard"]
        next(iter(chosen))
        data.workers.wait_until_ready()
        assert ids_of(chosen) == expected
    finally:
        data.close()


# --- static shapes ------------------------------------------------------------------------------


def test_fixed_shapes_are_the_only_ones(corpus: Path) -> None:
    data = make_data(corpus, shapes=3, valid_batch=BatchLimits(count=5))
    assert 1 <= len(data.shapes()) <= 3
    batches = list(islice(data.train(), 3 * data.micro_batches_per_epoch))
    met = {(*batch.audio.shape, batch.labels.shape[1]) for batch in batches}
    assert met <= set(data.shapes())
    names = [name for batch in batches if batch.epoch == 0 for name in batch.ids if name]
    assert sorted(names) == [f"digits-train-0-{i:06d}" for i in range(31)]
    for batch in batches:
        full = batch.audio_lengths.clamp(max=batch.audio.shape[1])
        assert torch.equal(full, batch.audio_lengths)
    shares = [list(data.valid(rank, 2)["unheard"]) for rank in range(2)]
    assert len(shares[0]) == len(shares[1])
    met = {(*batch.audio.shape, batch.labels.shape[1]) for share in shares for batch in share}
    assert met <= set(data.evaluation_shapes())
    assert sum(batch.utterances for share in shares for batch in share) == 21
    assert make_data(corpus).shapes() == make_data(corpus).evaluation_shapes() == []


# --- the rest -----------------------------------------------------------------------------------


def test_the_automatic_number_of_workers_is_a_ranks_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert automatic_workers() == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert automatic_workers() == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert automatic_workers() == 0


# --- warnings before training -------------------------------------------------------------------


def lengths(recordings: Any, name: str, *seconds: float, text: str = "one") -> str:
    """A NeMo manifest of recordings of those lengths at 8 kHz."""
    lines = []
    for number, length in enumerate(seconds):
        path = recordings.tone(f"{name}/{number}.wav", length, rate=8_000)
        lines.append({"audio_filepath": str(path), "duration": length, "text": text})
    return str(recordings.nemo(f"{name}.jsonl", lines))


def test_dropped_recordings_are_one_warning_with_hours_and_key(cache: Path, recordings: Any) -> None:
    train = lengths(recordings, "train", 0.5, 0.6, 36.0, 72.0, 0.05)
    data = SpeechData(train, lengths(recordings, "dev", 0.4, 36.0), Characters(), max_seconds=20.0)
    long, short, validation, narrow = data.warnings()
    assert long.startswith(
        "data.train: 2 of 5 recordings (0.03 of 0.03 h) are longer than data.max_seconds=20, so"
    )
    assert short.startswith(
        "data.train: 1 of 5 recordings (0.00 of 0.03 h) are shorter than data.min_seconds"
    )
    assert "all of 2 recordings that were read have at most 8000 Hz, and data.sample_rate=16000" in narrow
    assert validation.startswith(
        "data.valid.valid: 1 of 2 recordings (0.01 of 0.01 h) are longer than data.max_seconds=20, as no"
    )
    assert data.report() == {"too_long": 2, "too_short": 1}


def texts(recordings: Any, *said: str) -> str:
    """A NeMo manifest of recordings with these transcripts at 8 kHz."""
    lines = []
    for number, text in enumerate(said):
        path = recordings.tone(f"said/{number}.wav", 0.5, rate=8_000)
        lines.append({"audio_filepath": str(path), "duration": 0.5, "text": text})
    return str(recordings.nemo("said.jsonl", lines))


def test_transcripts_that_training_changes_are_counted_once(cache: Path, recordings: Any) -> None:
    train = texts(recordings, "\u200fone\u200b\u200b", "o\ufffdne", "two", "no\u200f", "eno")
    data = SpeechData(train, {}, Characters(" eno\ufffd", "unicode"), sample_rate=8_000)
    left_out, invisible, damaged = data.warnings()
    assert left_out.startswith("data.train: 1 of 5 recordings")
    assert "(1 unknown_symbol; 5 were checked)" in left_out
    start = (
        "data.train: 4 remarks, tags and invisible characters were dropped from 2 of 5 transcripts, such as "
    )
    assert invisible.startswith(rf"{start}'\u200f' in '")
    assert damaged.startswith(
        "data.train: 1 of 5 transcripts have U+FFFD, which stands for damaged text, such as '"
    )
    kept = SpeechData(train, {}, Characters(" enotw\ufffd\u200b\u200f", "none"), sample_rate=8_000)
    assert [line.partition(" have")[0] for line in kept.warnings()] == ["data.train: 1 of 5 transcripts"]


def test_remarks_that_are_dropped_are_counted_with_an_example(cache: Path, recordings: Any) -> None:
    train = texts(recordings, "[laughter] one", "<i>eno</i> xxx", "one", "one", "one")
    (line,) = SpeechData(train, {}, Characters(" eno", "unicode"), sample_rate=8_000).warnings()
    assert line.startswith(
        "data.train: 4 remarks, tags and invisible characters were dropped from 2 of 5 transcripts, such as "
        "'[laughter]' in 'said:1:0'"
    )
    kept = SpeechData(train, {}, Characters(" enoalughtrix<>[]/", "lower"), sample_rate=8_000)
    assert not list(kept.warnings())
    remarks = texts(recordings, *["[noise]"] * 15, "one")
    with pytest.raises(DataError, match=r"15 of 16 .*the manifest has '\[noise\]'.* data.allow_empty=true"):
        SpeechData(remarks, {}, Characters(" eno", "unicode"), sample_rate=8_000).check()
    SpeechData(remarks, {}, Characters(" eno", "unicode"), sample_rate=8_000, allow_empty=True).check()


def test_a_text_that_the_tokenizer_changes_is_shown(cache: Path, recordings: Any) -> None:
    class Lossy(Characters):
        def decode(self, ids: Sequence[int]) -> str:
            return super().decode(ids).replace("n", "m")

    data = SpeechData(texts(recordings, "one", "two"), {}, Lossy(), sample_rate=8_000)
    (line,) = data.warnings()
    assert line.endswith(
        "1 of 2 transcripts would not come back from their labels, such as 'said:1:0' ('one' becomes 'ome')"
    )


# --- structure ----------------------------------------------------------------------------------


def test_the_constructor_only_builds_parts() -> None:
    """At most 40 statements and no branch: a reader finds each part in the file that has its name."""
    (constructor,) = ast.parse(dedent(inspect.getsource(SpeechData.__init__))).body
    statements = [node for node in ast.walk(constructor) if isinstance(node, ast.stmt)]
    assert len(statements) - 1 <= 40
    branches = (ast.If, ast.For, ast.While, ast.Raise)
    assert not any(isinstance(node, branches) for node in statements)
