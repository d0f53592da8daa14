"""A run for use from Python."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from speechtrain.errors import ConfigError, DataError, RunError, SpeechtrainError
from speechtrain.inference.loaded_run import LoadedRun, TranscriptionError, load
from speechtrain.inference.transcript import Transcript
from tests.support.digits import write_sample
from tests.support.tiny_run import untrained

ONE = "device.threads=1"
EXAMPLES = int(os.environ.get("SPEECHTRAIN_EXAMPLES", "50"))


def torch_tensor(array: np.ndarray) -> Any:
    """Return the array as a tensor, if torch has its type."""
    try:
        return torch.from_numpy(array.copy())
    except (TypeError, ValueError):
        return array


@pytest.fixture(scope="module")
def loaded(run_dir: Path) -> LoadedRun:
    return load(run_dir, ONE)


@pytest.fixture(scope="module")
def wav(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("audio") / "a.wav"
    write_sample(path)
    return path


def test_files_arrays_and_tensors_have_one_text(
    loaded: LoadedRun, wav: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    samples, rate = soundfile.read(wav, dtype="float32")
    (found,) = loaded.transcribe(wav)
    assert found.text
    assert found.audio == str(wav)
    assert rate == loaded.sample_rate
    given = [(samples, rate), torch.from_numpy(samples), samples, shutil.copy(wav, tmp_path / "other.wav")]
    assert {(one.text, one.score) for one in loaded.transcribe(given, batch=1)} == {(found.text, found.score)}
    assert len(loaded.transcribe([wav, str(wav), wav.parent])) == 3
    assert loaded.transcribe([]) == []
    assert capsys.readouterr() == ("", "")


def test_silence_has_no_text_and_does_not_change_the_text_of_speech(loaded: LoadedRun, wav: Path) -> None:
    samples, rate = soundfile.read(wav, dtype="float32")
    hiss = 0.01 * np.random.default_rng(0).standard_normal(30 * rate).astype(np.float32)
    silence = np.zeros(30 * rate, np.float32)
    for transcript in loaded.transcribe([hiss, silence, samples[:1], np.tile(silence, 10)]):
        assert (transcript.text, transcript.words, transcript.segments) == ("", (), ())
    alone, padded = loaded.transcribe([samples, np.concatenate([silence, samples, silence])])
    (span,) = padded.segments
    assert 29.6 <= span.start <= 30.0
    assert span.end <= 30.0 + len(samples) / rate + 0.7
    assert padded.text
    assert alone.segments[0].start == 0.0


def test_an_evaluation_writes_no_text_for_silence(loaded: LoadedRun, wav: Path, tmp_path: Path) -> None:
    samples, rate = soundfile.read(wav, dtype="float32")
    hiss = 0.01 * np.random.default_rng(0).standard_normal(3 * rate).astype(np.float32)
    for name, audio in {"hiss": hiss, "speech": samples, "padded": np.concatenate([hiss, samples])}.items():
        soundfile.write(tmp_path / f"{name}.wav", audio, rate)
        (tmp_path / f"{name}.txt").write_text("one two")
    outcome = loaded.evaluate({"dev": str(tmp_path)})["dev"]
    texts = sorted(example.hypothesis.strip() for example in outcome.examples)
    assert texts == sorted(transcript.text for transcript in loaded.transcribe(tmp_path))
    assert [bool(text) for text in texts] == [False, True, True]
    assert outcome.totals["wer"][1] == 6
    assert outcome.totals["loss"][1] == 2  # Nobody speaks in the third one.


def test_a_decoder_is_chosen_for_one_call(loaded: LoadedRun, wav: Path) -> None:
    (greedy,), (beam,) = loaded.transcribe(wav), loaded.transcribe(wav, decoder="beam", width=3, nbest=2)
    assert len(beam.segments[0].hypothesis.alternatives) == 1
    assert loaded.transcribe(wav)[0].segments[0].hypothesis == greedy.segments[0].hypothesis
    limits = {"max_symbols": 1, "max_symbols_per_step": 1}  # A frame begins with one label, not with two.
    assert len(loaded.transcribe(wav, **limits)[0].segments[0].hypothesis.labels) == 2
    with pytest.raises(ConfigError, match=r"decoder\.wdith"):
        loaded.transcribe(wav, decoder="beam", wdith=3)
    with pytest.raises(ConfigError, match="decoder"):
        loaded.transcribe(wav, decoder="best")


def test_timestamps_need_a_decoder_with_times(
    loaded: LoadedRun, wav: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (transcript,) = loaded.transcribe(wav, timestamps=True)
    assert transcript.words
    hypothesis = replace(transcript.segments[0].hypothesis, ends=())
    monkeypatch.setattr(type(loaded.opened.task), "transcribe", lambda task, batch, decoder: [hypothesis])
    (silent,) = loaded.transcribe(wav)
    assert silent.text == transcript.text
    assert silent.words == ()
    with pytest.raises(ConfigError, match=r"timestamps: Greedy gives no times of words\. Choose"):
        loaded.transcribe(wav, timestamps=True)


def test_features_are_the_encoders_frames(loaded: LoadedRun, wav: Path) -> None:
    (frames,) = loaded.features(wav)
    seconds = soundfile.info(wav).duration
    assert frames.dtype == np.float32
    assert len(frames) == pytest.approx(seconds / loaded.frame_seconds, abs=2)
    (again,) = loaded.features([wav])
    np.testing.assert_array_equal(frames, again)


def test_a_pretrained_model_has_features_and_no_text(cache: Path, wav: Path, tmp_path: Path) -> None:
    small = ("encoder.layers=1", "encoder.width=16", "encoder.heads=2")
    run = load(
        untrained(tmp_path / "run", "model=wav2vec2_small", "data=manifest", "data.train=x", *small), ONE
    )
    (frames,) = run.features(wav)
    assert frames.shape[1] == 16
    assert run.frame_seconds == pytest.approx(0.02, rel=0.02)
    with pytest.raises(ConfigError, match="Wav2Vec2 does not transcribe speech"):
        run.transcribe(wav)


def test_errors_name_what_is_wrong(loaded: LoadedRun, wav: Path, tmp_path: Path) -> None:
    for samples in (np.zeros((2, 100)), np.zeros(0)):
        with pytest.raises(DataError, match="recording 1: samples of shape"):
            loaded.transcribe([samples])
    faults: dict[str, Any] = {
        "its peak is nan": np.array([np.nan]),
        "its peak is 1e\\+06": np.array([0.0, 1e6, 0.0]),
        "samples of type dict": {"array": samples, "sampling_rate": 16_000},
        "samples of type bytes": wav.read_bytes(),
        "samples of type BytesIO": io.BytesIO(),
        "samples of type str": (str(wav), 16_000),
        "too many values to unpack": (str(wav),) * 3,
        "samples of type NoneType": None,
        "a rate of 999 Hz. Give 1000 to 768000 Hz": (np.zeros(9), 999),
        "a rate of -1 Hz": (np.zeros(9), -1),
        "cannot convert float NaN": (np.zeros(9), np.nan),
    }
    for fault, samples in faults.items():
        with pytest.raises(DataError, match=f"recording 1: {fault}"):
            loaded.transcribe(samples)
    settings_of_call: dict[str, Any] = {"batch": 0, "piece_seconds": np.nan}
    for key, value in settings_of_call.items():
        with pytest.raises(ConfigError, match=f"{key} is {value}: it must be at least 1"):
            loaded.transcribe(wav, **{key: value})
    with pytest.raises(RunError):
        load(tmp_path)


def test_the_limit_of_a_recordings_length_can_be_set(run_dir: Path, wav: Path) -> None:
    with pytest.raises(DataError, match=r"data\.max_decoded_seconds=1"):
        load(run_dir, ONE, "data.max_decoded_seconds=1").transcribe(wav)


def test_integers_have_the_full_scale_of_their_type(loaded: LoadedRun, wav: Path) -> None:
    samples, rate = soundfile.read(wav, dtype="int16")
    (transcript,) = loaded.transcribe(wav)
    wide = samples.astype(np.int32)
    arrays = [samples, torch.from_numpy(samples), wide * 2**16, (wide + 2**15).astype(np.uint16)]
    for same in loaded.transcribe([(array, rate) for array in arrays], batch=1):
        assert (same.text, same.score) == (transcript.text, transcript.score)
    bytes_of_wav = (samples // 256 + 128).astype(np.uint8)
    unsigned, signed = loaded.transcribe([bytes_of_wav, (samples // 256).astype(np.int8)], batch=1)
    assert (unsigned.text, unsigned.score) == (signed.text, signed.score)


@pytest.mark.parametrize("kind", ["int64", "bool", "complex128"])
def test_samples_whose_full_scale_is_unknown_are_refused(loaded: LoadedRun, kind: str) -> None:
    with pytest.raises(DataError, match=f"recording 1: samples of type {kind}. Give"):
        loaded.transcribe([(np.ones(8000, kind), 16_000)])


def test_a_bad_file_loses_no_text_of_a_list(loaded: LoadedRun, wav: Path, tmp_path: Path) -> None:
    with pytest.raises(TranscriptionError, match=r"none\.wav: the file does not exist \(1 of 3") as raised:
        loaded.transcribe([wav, tmp_path / "none.wav", wav])
    before, error, after = raised.value.results
    assert before.text == after.text == loaded.transcribe(wav)[0].text
    assert isinstance(error, DataError)
    with pytest.raises(DataError, match=r"none\.wav: the file does not exist$"):
        loaded.transcribe(tmp_path / "none.wav")


def test_tensors_of_a_model_and_read_only_arrays_have_the_text_of_an_array(
    loaded: LoadedRun, wav: Path, recwarn: pytest.WarningsRecorder
) -> None:
    samples, _ = soundfile.read(wav, dtype="float32")
    tensor = torch.from_numpy(samples).bfloat16()
    rounded = tensor.float().numpy()
    read_only = np.frombuffer(rounded.tobytes(), np.float32)
    same = [rounded, read_only, tensor, tensor.float().requires_grad_(), rounded.astype(">f4")]
    texts = {transcript.text for transcript in loaded.transcribe([*same, rounded[::-1].copy()[::-1]])}
    assert len(texts) == 1
    assert not recwarn.list


DTYPES = st.one_of(
    *(npst.floating_dtypes(), npst.integer_dtypes(), npst.unsigned_integer_dtypes(), npst.boolean_dtypes()),
    *(npst.complex_number_dtypes(), npst.datetime64_dtypes(), npst.byte_string_dtypes(max_len=3)),
)
ARRAYS = npst.arrays(DTYPES, npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=60))
RATES = st.one_of(st.integers(), st.floats(), st.none(), st.text(), st.integers(1_000, 768_000))
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.binary())
SAMPLES = st.one_of(ARRAYS, SCALARS, st.lists(st.floats(width=32), max_size=9), ARRAYS.map(torch_tensor))
RECORDINGS = st.one_of(SAMPLES, st.tuples(SAMPLES, RATES), st.tuples(SAMPLES), st.text(max_size=9))


@settings(max_examples=EXAMPLES, deadline=None)
@given(source=RECORDINGS)
def test_any_array_rate_and_type_is_a_result_or_an_error_of_its_own(loaded: LoadedRun, source: Any) -> None:
    samples = np.zeros(1600, np.float32)
    results = list(loaded.transcripts(loaded.recordings([samples, source, samples])))
    assert len(results) >= 3
    for result in (results[0], results[-1]):
        assert isinstance(result, Transcript)
    with contextlib.suppress(SpeechtrainError):
        loaded.transcribe(source)


def test_a_notebook_shows_one_line(loaded: LoadedRun, wav: Path) -> None:
    assert re.fullmatch(r"<LoadedRun .*tiny step-00000002: RNNT, 16000 Hz, cpu>", repr(loaded))
    (transcript,) = loaded.transcribe(wav)
    assert repr(transcript) == f"<Transcript {wav}, {transcript.seconds:.1f} s: {transcript.text}>"
