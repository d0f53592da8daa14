"""Spans of speech: silence and noise have none, and speech keeps its words."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

from speechtrain.data.corpora.digits import Digits
from speechtrain.data.index import open_index
from speechtrain.data.loader import EvaluationLoader, TrainingLoader
from speechtrain.data.prepare.stats_table import check_audio_of
from speechtrain.data.sampler import MicroBatch
from speechtrain.data.sources import open_source
from speechtrain.data.voice_activity import pause_middles, shorten_pauses, speech_spans
from speechtrain.text.vocabulary import Characters

RATE = 16_000
PAUSE = 0.6
REAL = Path(__file__).resolve().parents[4] / "shared/data/fsdd"
Samples = NDArray[np.float32]


def seconds_of(spans: list[tuple[int, int]], rate: int = RATE) -> list[tuple[float, float]]:
    return [(start / rate, end / rate) for start, end in spans]


def white(decibels: float, seconds: float, rate: int = RATE) -> Samples:
    noise = np.random.default_rng(0).standard_normal(round(seconds * rate))
    return (10 ** (decibels / 20) * noise).astype(np.float32)


def pink(seconds: float) -> Samples:
    spectrum = np.fft.rfft(white(0, seconds))
    noise = np.fft.irfft(spectrum / np.sqrt(np.arange(len(spectrum)) + 1.0))
    return (0.05 * noise / noise.std()).astype(np.float32)


def hum(seconds: float) -> Samples:
    time = np.arange(round(seconds * RATE)) / RATE
    return (0.1 * np.sin(2 * math.pi * 50 * time) + 0.05 * np.sin(2 * math.pi * 150 * time)).astype(
        np.float32
    )


def click(seconds: float) -> Samples:
    samples = np.zeros(round(seconds * RATE), np.float32)
    samples[len(samples) // 2 : len(samples) // 2 + 20] = 0.9
    return samples


@pytest.fixture(scope="module")
def utterances() -> list[Samples]:
    source = Digits("valid", 12)
    return [
        (utterance.audio(source.clips) / 32768.0).astype(np.float32) for utterance in source.all_utterances()
    ]


@pytest.mark.parametrize(
    "samples",
    [
        np.zeros(0, np.float32),
        np.ones(1, np.float32),
        white(-20, 0.01),
        np.zeros(30 * RATE, np.float32),
        np.full(30 * RATE, 0.1, np.float32),
        *[white(level, 30) for level in (-70, -50, -20)],
        pink(30),
        hum(30),
        hum(30) + white(-50, 30),
        click(10),
        np.concatenate([np.zeros(5 * RATE, np.float32), white(-40, 5), np.zeros(5 * RATE, np.float32)]),
    ],
    ids=[
        *("nothing", "one sample", "10 ms", "zeros", "offset", "noise -70", "noise -50", "noise -20", "pink"),
        *("hum", "hum and noise", "click", "noise between zeros"),
    ],
)
def test_there_is_no_speech_in_silence_and_noise(samples: Samples) -> None:
    assert speech_spans(samples, RATE, PAUSE) == []
    assert len(shorten_pauses(samples, RATE, PAUSE)) == 0


def bursts(peak: float) -> Samples:
    """Binary noise, which is on and off for 0.2 s in turn and so changes as speech does."""
    signs = np.sign(np.random.default_rng(0).normal(size=3 * RATE))
    is_on = np.arange(3 * RATE) // (RATE // 5) % 2 == 0
    return (peak * signs * is_on).astype(np.float32)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("longest_pause", [None, PAUSE])
@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (np.zeros(3 * RATE, np.float32), True),
        (bursts(0.9e-3), True),
        (bursts(0.9e-3) + np.float32(0.1), True),
        (bursts(1e-3), False),
        (bursts(0.1), False),
    ],
    ids=["zeros", "below", "offset", "at the limit", "speech"],
)
def test_a_run_its_evaluation_a_transcription_and_the_statistics_agree_on_silence(
    tmp_path: Path, samples: Samples, expected: bool, longest_pause: float | None
) -> None:
    soundfile.write(tmp_path / "a.wav", samples, RATE, subtype="FLOAT")
    manifest = tmp_path / "m.jsonl"
    manifest.write_text(json.dumps({"audio_filepath": "a.wav", "duration": 3.0, "text": "one"}) + "\n")
    index = open_index(open_source(str(manifest)))
    micro_batch = MicroBatch(np.array([0]), np.array([100], np.int16))
    training = TrainingLoader(index, Characters(), longest_pause=longest_pause)(micro_batch)
    assert [skip.reason for skip in training.skipped] == ["silent"] * expected
    evaluation = EvaluationLoader(index, Characters(), longest_pause=longest_pause)(micro_batch)
    assert evaluation.unspoken == (expected,)
    assert evaluation.weight.tolist() == [float(not expected)]
    assert check_audio_of(index.cut(0)).fault == "silent" * expected
    # Transcription and exports decode these spans.
    assert (speech_spans(samples, RATE, PAUSE) == []) is expected


@pytest.mark.parametrize("level", [-200, -60, -40])
def test_a_span_has_the_utterance_and_half_a_pause_around_it(utterances: list[Samples], level: float) -> None:
    silence = white(level, 3)
    for samples in utterances:
        recording = np.concatenate([silence, samples, silence])
        ((start, end),) = seconds_of(speech_spans(recording, RATE, PAUSE))
        end_of_utterance = 3 + len(samples) / RATE
        assert 2.3 <= start <= 3.0
        assert end_of_utterance <= end + 0.05  # The end of a word in this corpus is silent.
        assert end <= end_of_utterance + 0.7


@pytest.mark.parametrize("pause", [1.5, 6.0, 15.0])
def test_utterances_have_a_span_each(utterances: list[Samples], pause: float) -> None:
    silence = white(-50, pause)
    recording = np.concatenate([part for samples in utterances for part in (samples, silence)])
    spans = seconds_of(speech_spans(recording, RATE, PAUSE))
    assert len(spans) == len(utterances)
    start = 0.0
    for (span_start, span_end), samples in zip(spans, utterances, strict=True):
        assert span_start <= start + 0.05
        assert span_end >= start + len(samples) / RATE - 0.05
        start += len(samples) / RATE + pause


def test_an_utterance_without_silence_does_not_change(utterances: list[Samples]) -> None:
    for samples in utterances:
        assert shorten_pauses(samples, RATE, PAUSE) is samples
        assert shorten_pauses(samples[: round(0.2 * RATE)], RATE, PAUSE) is not None


@pytest.mark.parametrize("level", [-200, -60])
def test_a_short_pause_stays_and_has_a_middle(utterances: list[Samples], level: float) -> None:
    pause = white(level, 0.4)
    recording = np.concatenate([utterances[0], pause, utterances[1]])
    assert len(speech_spans(recording, RATE, PAUSE)) == 1
    (middle,) = pause_middles(recording, RATE)
    assert abs(middle - (len(utterances[0]) + len(pause) / 2) / RATE) < 0.1
    assert not pause_middles(utterances[0], RATE)
    assert not pause_middles(recording[:100], RATE)


def test_a_voice_of_20_db_less_is_speech_and_the_room_of_a_recording_is_not(
    utterances: list[Samples],
) -> None:
    loud, quiet = utterances[0], 0.1 * utterances[1]
    room = np.resize(np.concatenate([0.01 * utterances[2][::-1], 0.01 * utterances[2]]), 3 * RATE)
    recording = np.concatenate([loud, room, quiet])
    (start, end), (other_start, other_end) = speech_spans(recording, RATE, PAUSE)
    assert start == 0
    assert end <= len(loud) + 0.4 * RATE
    assert other_start >= len(loud) + len(room) - 0.4 * RATE
    assert other_end >= len(recording) - 0.05 * RATE


def test_a_long_pause_becomes_short(utterances: list[Samples]) -> None:
    pause = np.zeros(round(0.5 * RATE), np.float32)
    shortened = shorten_pauses(np.concatenate([utterances[0], *4 * [pause], utterances[1]]), RATE, PAUSE)
    speech = (len(utterances[0]) + len(utterances[1])) / RATE
    assert speech + 0.4 <= len(shortened) / RATE <= speech + 1.0


@pytest.mark.parametrize("rate", [8_000, 11_025, 44_100, 48_000])
def test_the_rate_does_not_matter(utterances: list[Samples], rate: int) -> None:
    from speechtrain.data.audio import change_rate

    recording = np.concatenate([white(-50, 2), utterances[0], white(-50, 2)])
    ((start, end),) = seconds_of(speech_spans(recording, RATE, PAUSE))
    ((other_start, other_end),) = seconds_of(
        speech_spans(change_rate(recording, RATE, rate), rate, PAUSE), rate
    )
    assert abs(start - other_start) <= 0.1
    assert abs(end - other_end) <= 0.1


def test_an_isolated_word_of_another_speaker_is_speech(utterances: list[Samples]) -> None:
    source = Digits("train", 1)
    for clip in range(0, len(source.clips.lengths), 7):
        word = (source.clips.read(clip) / 32768.0).astype(np.float32)
        assert speech_spans(word, RATE, PAUSE) != []
        quiet = 10 ** (-30 / 20) * word
        assert len(speech_spans(np.pad(quiet, 5 * RATE), RATE, PAUSE)) == 1


@pytest.mark.skipif(not REAL.is_dir(), reason=f"{REAL} is missing")
def test_every_recording_of_five_speakers_has_speech() -> None:
    paths = sorted((REAL / "recordings").glob("*.wav"))[::10]
    assert len(paths) >= 100
    for path in paths:
        samples, rate = soundfile.read(path, dtype="float32")
        spans = speech_spans(samples, rate, PAUSE)
        assert spans, path
        # A part that is cut is far below the recording's loudest tenth of a second.
        window = np.ones(rate // 10) / (rate // 10)
        power = np.convolve(np.square(samples, dtype=np.float64), window, "same")
        is_cut = np.ones(len(samples), bool)
        for start, end in spans:
            is_cut[start:end] = False
        assert power[is_cut].max(initial=0.0) < 1e-2 * power.max(), path
