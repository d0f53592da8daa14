from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from speechtrain.counter_rng import dither_offset
from speechtrain.data.audio import (
    _BETA,
    _ROLLOFF,
    _ZERO_CROSSINGS,
    Unusable,
    change_rate,
    read_cut,
)
from speechtrain.data.index import open_index
from speechtrain.data.loader import EvaluationLoader, TrainingLoader, audio_row, collate
from speechtrain.data.sampler import MicroBatch
from speechtrain.data.sources import open_source
from speechtrain.data.speed import change_speed
from speechtrain.data.static_shapes import Shape
from speechtrain.data.workers import Workers
from speechtrain.text.vocabulary import Characters
from tests.support.audio_files import read_file

RATE = 16_000


EPOCH, NUMBER = 3, 7  # of every micro-batch here


def micro_batch(*rows: int, percents: tuple[int, ...] = (), shape: Shape | None = None) -> MicroBatch:
    """Return a micro-batch of the ``rows`` of an index. Without ``percents``, the speeds are 100 %."""
    speeds = np.array(percents or [100] * len(rows), np.int16)
    return MicroBatch(np.array(rows, np.int32), speeds, shape, EPOCH, NUMBER)


def test_a_batch_holds_audio_labels_and_names(cache: Path, recordings: Any) -> None:
    index = open_index(open_source(recordings.corpus("m", 3, text="Cab")))
    batch = TrainingLoader(index, Characters(alphabet="abc"))(micro_batch(2, 0))
    # The corpus has recordings of 0.40, 0.41 and 0.42 s: 6400, 6560 and 6720 samples.
    assert batch.audio.shape == (2, 6720)
    assert batch.audio_lengths.tolist() == [6720, 6400]
    assert not batch.audio[1, 6400:].any()
    expected, _ = soundfile.read(recordings.folder / "m-audio/000.wav", dtype="float32")
    assert torch.equal(batch.audio[1, :6400], torch.from_numpy(expected))
    assert batch.labels.tolist() == [[2, 0, 1]] * 2
    assert batch.label_lengths.tolist() == [3, 3]
    assert batch.ids == ("m:3:002", "m:1:000")
    assert batch.texts == ("cab", "cab")
    assert batch.keys[1] == dither_offset(expected)
    assert batch.keys[0] != batch.keys[1]
    assert batch.weight.tolist() == [1.0, 1.0]
    assert (batch.epoch, batch.index, batch.skipped) == (EPOCH, NUMBER, ())
    assert batch.seconds == pytest.approx(0.82)
    assert batch.audio.dtype == batch.weight.dtype == torch.float32
    assert batch.labels.dtype == torch.int64


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100])
def test_change_rate_equals_the_convolution_of_lhotse(rate: int) -> None:
    from lhotse.augmentation.resample import Resample

    samples = np.random.default_rng(0).normal(size=12_345).astype(np.float32)
    convolution = Resample(rate, RATE, "sinc_interp_kaiser", _ZERO_CROSSINGS, _ROLLOFF, _BETA)
    expected = convolution(torch.from_numpy(samples))
    np.testing.assert_allclose(change_rate(samples, rate, RATE), expected.numpy(), atol=1e-5)


@pytest.mark.parametrize("percent", [50, 90, 97, 100, 103, 110, 200])
def test_the_speed_change_is_lhotses(percent: int) -> None:
    from lhotse.augmentation import Speed

    samples = np.random.default_rng(0).normal(size=12_345).astype(np.float32)
    changed = change_speed(samples, percent, RATE)
    np.testing.assert_allclose(changed, Speed(percent / 100)(samples[None], RATE)[0], atol=1e-5)
    assert len(changed) == -(-12_345 * 100 // percent)


def test_threads_do_not_change_a_batch(cache: Path, recordings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that loads its own batches computes as a data worker does, and then as before."""
    loader = TrainingLoader(open_index(open_source(recordings.corpus("m", 2, seconds=3.0))), Characters())
    initial_threads = torch.get_num_threads()
    batches, matmul_settings = [], []
    matmul = torch.matmul

    def watched_matmul(*arguments: Any, **options: Any) -> Any:
        matmul_settings.append((torch.get_num_threads(), torch.get_float32_matmul_precision()))
        return matmul(*arguments, **options)

    monkeypatch.setattr(torch, "matmul", watched_matmul)
    try:
        for threads, precision in ((1, "highest"), (2, "high"), (2, "medium")):
            torch.set_num_threads(threads)
            torch.set_float32_matmul_precision(precision)
            (batch,) = Workers().map(loader, iter([micro_batch(0, 1, percents=(93, 107))]))
            batches.append(batch.audio)
            assert torch.get_num_threads() == threads
            assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_num_threads(initial_threads)
    assert torch.equal(batches[0], batches[1])
    assert torch.equal(batches[0], batches[2])
    assert matmul_settings == [(1, "highest")] * 6


def test_a_fixed_shape_is_filled_with_rows_of_weight_zero(cache: Path, recordings: Any) -> None:
    index = open_index(open_source(recordings.corpus("m", 2)))
    shape = Shape(4, 8000, 16)
    batch = TrainingLoader(index, Characters())(micro_batch(0, 1, shape=shape))
    assert (batch.audio.shape, batch.labels.shape) == ((4, 8000), (4, 16))
    assert batch.weight.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert batch.audio_lengths.tolist() == [6400, 6560, 8000, 8000]
    assert batch.label_lengths.tolist() == [7, 7, 0, 0]
    assert batch.ids[2:] == ("", "")
    assert batch.utterances == 2
    alone = collate([], RATE, shape)
    assert (alone.audio.shape, alone.labels.shape, alone.utterances) == ((4, 8000), (4, 16), 0)
    assert not alone.weight.any()


def test_the_dither_of_evaluation_follows_from_the_samples_not_from_the_name(
    cache: Path, recordings: Any
) -> None:
    keys = {}
    for name in ("m", "renamed"):
        index = open_index(open_source(recordings.corpus(name, 2)))
        batch = EvaluationLoader(index, Characters())(micro_batch(0, 1, shape=Shape(3, 8000, 9)))
        assert batch.ids[0].startswith(f"{name}:")
        keys[name] = batch.keys.tolist()
    assert keys["m"] == keys["renamed"]
    assert keys["m"][2] == 0
    samples, _ = soundfile.read(recordings.folder / "m-audio/000.wav", dtype="float32")
    assert collate([audio_row("other", samples, RATE)], RATE).keys.tolist() == keys["m"][:1]


def test_a_padding_row_replaces_a_transcript_that_is_wider_than_its_shape(
    cache: Path, recordings: Any
) -> None:
    index = open_index(open_source(recordings.corpus("m", 1)))
    batch = TrainingLoader(index, Characters())(micro_batch(0, shape=Shape(1, 8000, 6)))
    assert [skip.reason for skip in batch.skipped] == ["long_transcript"]


def test_whole_files_as_a_batch(recordings: Any) -> None:
    files = [str(recordings.tone("a.wav", 1.0)), str(recordings.tone("b.flac", 0.5, rate=8000, channels=2))]
    files.append(str(recordings.tone("short.wav", 0.01)))
    batch = collate([audio_row(file, read_file(file, RATE), RATE) for file in files], RATE)
    assert batch.ids == tuple(files)
    assert batch.audio_lengths.tolist() == [16_000, 8_000, 1_600]  # a front end needs a frame
    assert batch.weight.tolist() == [1.0] * 3


def test_a_mixture_of_files_far_longer_than_said_is_not_read(recordings: Any) -> None:
    from lhotse import Recording

    path = recordings.tone("a.wav", 0.5)
    mixed = Recording.from_file(path).to_cut().pad(1.0).to_dict()
    recordings.tone("a.wav", 60.0)
    with pytest.raises(Unusable, match="wrong_length"):
        read_cut(mixed, RATE)
