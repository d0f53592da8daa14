"""Recognition of a stream: the text of one pass, in any pieces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import speechtrain
from speechtrain.errors import ConfigError
from speechtrain.inference.loaded_run import LoadedRun
from speechtrain.inference.stream import RecognitionStream, StreamEvent
from tests.support.tiny_run import STREAMING, TINY, untrained


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedRun:
    return speechtrain.load(untrained(tmp_path_factory.mktemp("run"), *STREAMING))


def speech(loaded: LoadedRun, seconds: float, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return (0.1 * generator.standard_normal(round(seconds * loaded.sample_rate))).astype("f4")


def pieces(samples: np.ndarray, seed: int) -> Iterator[np.ndarray]:
    generator = np.random.default_rng(seed)
    longest = (1, 500, 9000, 10**6)[seed % 4]
    start = 0
    while start < len(samples):
        size = int(generator.integers(1, longest + 1))
        yield samples[start : start + size]
        start += size


def texts(found: list[StreamEvent]) -> list[tuple[str, list[tuple[str, float, float]]]]:
    """The final texts and the times of their words. Confidences differ by rounding."""
    final = [event for event in found if event.is_final]
    return [(event.text, [(word.text, word.start, word.end) for word in event.words]) for event in final]


def events(stream: RecognitionStream, samples: np.ndarray, seed: int) -> list[StreamEvent]:
    found = []
    with stream:
        for piece in pieces(samples, seed):
            found += list(stream.feed(piece))
        found += list(stream.finish())
    return found


@pytest.mark.parametrize("context", [None, [16, 1, 0], [8, 2, 1]])
def test_the_final_text_does_not_depend_on_the_pieces(loaded: LoadedRun, context: list[int] | None) -> None:
    samples = speech(loaded, 2.0)
    whole = texts(events(loaded.stream(context, max_symbols_per_step=2), samples, 3))
    assert whole
    for seed in (1, 2):
        assert texts(events(loaded.stream(context, max_symbols_per_step=2), samples, seed)) == whole


def test_single_samples_give_the_same_text(loaded: LoadedRun) -> None:
    samples = speech(loaded, 0.3)
    whole, single = (texts(events(loaded.stream([16, 1, 0]), samples, seed)) for seed in (3, 0))
    assert whole == single


def test_the_text_is_that_of_one_pass_with_the_same_context(loaded: LoadedRun) -> None:
    samples = speech(loaded, 1.5)
    task = loaded.opened.task
    batch = loaded._batch([samples])
    batch.keys.zero_()
    task.encoder.context = [16, 4, 0]
    try:
        with torch.no_grad():
            encoded, lengths = task.encoder(batch)
            (expected,) = task.hypotheses(
                encoded, lengths, loaded.opened.used.decoder("greedy", {"max_symbols": 10**6})
            )
    finally:
        task.encoder.context = None
    final = events(loaded.stream([16, 4, 0], endpoint_seconds=None), samples, 2)[-1]
    assert final.is_final
    assert final.text == expected.text
    assert [word.end for word in final.words] == [word.end for word in expected.words]


def test_settled_words_do_not_change(loaded: LoadedRun) -> None:
    settled: list[str] = []
    for event in events(loaded.stream([16, 1, 0]), speech(loaded, 3.0), 1):
        words = [word.text for word in event.words]
        # The last settled word may become longer.
        assert words[: max(0, len(settled) - 1)] == settled[:-1]
        settled = [] if event.is_final else words[: event.settled]


def test_silence_and_odd_samples_end_well(loaded: LoadedRun) -> None:
    stream = loaded.stream()
    for samples in (np.zeros(0, "f4"), np.zeros(8000, "i2"), [0.0, 1.0, -1.0], torch.ones(100)):
        list(stream.feed(samples))
    list(stream.feed(np.array([np.nan, np.inf, -np.inf] * 100)))
    list(stream.finish())
    assert list(stream.finish()) == []
    with pytest.raises(ConfigError, match="has ended"):
        list(stream.feed(np.zeros(10)))


@pytest.mark.parametrize(
    ("samples", "problem"),
    [(np.zeros((2, 10)), "shape"), (["a"], "Feed floats"), (np.zeros(3, "i8"), "Feed floats")],
)
def test_samples_that_cannot_be_read_are_refused(loaded: LoadedRun, samples: object, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        list(loaded.stream().feed(samples))


def test_a_run_that_cannot_stream_names_the_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"encoder\.features\.normalise"):
        speechtrain.load(untrained(tmp_path / "lstm", *TINY)).stream()
    with pytest.raises(ConfigError, match="context"):
        speechtrain.load(untrained(tmp_path / "run", *STREAMING)).stream([1, 2])


def test_an_utterance_without_an_endpoint_ends(loaded: LoadedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search would store all frames. The end is at the same frame for all pieces."""
    monkeypatch.setattr("speechtrain.inference.stream._LONGEST_UTTERANCE", 0.6)
    samples = speech(loaded, 2.0)
    options = {"max_symbols_per_step": 1, "endpoint_seconds": None}
    whole, pieced = (texts(events(loaded.stream([16, 1, 0], **options), samples, seed)) for seed in (3, 1))
    assert len(whole) > 2
    assert whole == pieced
