"""Exports of causal runs, which recognise speech while it arrives."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from speechtrain.commands import export
from speechtrain.errors import ConfigError
from speechtrain.export import held_out, recognise_stream
from speechtrain.export.greedy_search import open_sessions
from tests.support.tiny_run import TINY, end_of_program, small_encoder, untrained

CAUSAL = (
    *("encoder.causal=true", "encoder.causal_convolution=chunk", "encoder.context=[10,3,0]"),
    *("encoder.features.normalise=none", "decoder.endpoint_seconds=null"),
)
KEYS = [key for key in TINY if not key.startswith("encoder.")] + small_encoder("fastconformer_tiny")


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return untrained(tmp_path_factory.mktemp("run") / "stream", *KEYS, *CAUSAL)


@pytest.fixture(scope="module")
def folder(run_directory: Path) -> Path:
    out = run_directory.with_name("onnx")
    assert export.run([str(run_directory), "--to", "onnx", "--out", str(out)]) == 0
    return out


def write_wav(path: Path, samples: np.ndarray, rate: int = 16000) -> bytes:
    """Write samples (S,) as 16-bit PCM. Return the PCM."""
    pcm = (32767 * samples).astype("<i2").tobytes()
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes(pcm)
    return pcm


def words(run_directory: Path) -> np.ndarray:
    """The samples of the first held-out recording."""
    loaded = export.load_for_onnx(run_directory, "best")
    return next(held_out.utterances(loaded)).samples


@pytest.mark.slow
def test_the_streamed_texts_are_those_of_one_pass(folder: Path) -> None:
    result = json.loads((folder / "error_rates.json").read_text())
    assert (result["recordings"], result["differences"]) == (4, [])
    assert result["error_rates"]["fp32"] == result["error_rates"]["pytorch"]
    assert json.loads((folder / "model.json").read_text())["stream"]["context"] == [10, 3, 0]


@pytest.mark.slow
@pytest.mark.parametrize("samples", [1601, 1920, 4440, 4799, 16_001, 40_000])
def test_the_frames_of_the_program_are_those_of_the_stream(
    run_directory: Path, folder: Path, samples: int
) -> None:
    encoder = export.load_for_onnx(run_directory, "best").opened.task.encoder
    audio = 0.1 * torch.randn(1, samples)
    stream = encoder.stream([10, 3, 0])
    expected = torch.cat([stream.step(audio), stream.finish()], dim=1)
    model, sessions = open_sessions(folder, "fp32")  # type: ignore[no-untyped-call]
    for size in (37, 1000, samples):
        pieces = torch.split(audio[0], size)
        chunks: Any = recognise_stream.frames_of(model, sessions, map(torch.Tensor.numpy, pieces))  # type: ignore[no-untyped-call]
        frames = torch.from_numpy(np.concatenate(list(chunks)))
        torch.testing.assert_close(frames, expected[0], rtol=0, atol=1e-4)


@pytest.mark.slow
def test_the_program_reads_a_microphone_and_a_file(run_directory: Path, folder: Path, tmp_path: Path) -> None:
    samples = words(run_directory)
    pcm = write_wav(tmp_path / "a.wav", samples)
    command = [sys.executable, "-O", str(folder / "recognise.py")]
    of_file = subprocess.run([*command, str(tmp_path / "a.wav")], capture_output=True)
    of_microphone = subprocess.run(command, input=pcm, capture_output=True)
    model, sessions = open_sessions(folder, "fp32")  # type: ignore[no-untyped-call]
    read = np.frombuffer(pcm, "<i2").astype(np.float32) / 32768
    *_, (text, is_final) = recognise_stream.texts_of(model, sessions, [read])  # type: ignore[no-untyped-call]
    assert is_final
    assert text
    assert of_microphone.stdout.decode() == of_file.stdout.decode() == f"{text}\n"
    assert of_microphone.stderr == of_file.stderr == b""


def test_a_pause_ends_an_utterance(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame is its label, and 0 is a blank. A chunk has two frames of 40 ms."""
    chunks = [[1, 2], [0, 0], [0, 3], [0, 0], [0, 0], [0, 0], [4, 0]]
    monkeypatch.setattr(recognise_stream, "frames_of", lambda *arguments: chunks)
    monkeypatch.setattr(
        recognise_stream, "labels_of", lambda *arguments: [arguments[3]] if arguments[3] else []
    )
    model = {"max_symbols": None, "frame_seconds": 0.04, "labels": ["", "a", "b", "c", "d"]}
    model["stream"] = {"endpoint_seconds": 0.2}
    events = list(recognise_stream.texts_of(model, None, []))  # type: ignore[no-untyped-call]
    texts = ["ab", "ab", "abc", "abc", "abc", "abc", "d", "d"]
    assert [text for text, _ in events] == texts
    assert [is_final for _, is_final in events] == [False] * 5 + [True, False, True]


@pytest.mark.slow
def test_the_program_names_what_it_cannot_read(folder: Path, tmp_path: Path) -> None:
    write_wav(tmp_path / "a.wav", np.zeros(800), rate=8000)
    error = end_of_program(folder / "recognise.py", str(tmp_path / "a.wav"))
    assert error == f"recognise.py: ValueError: {tmp_path}/a.wav must have one channel, 16 bits and 16000 Hz"
    error = end_of_program(folder / "recognise.py", str(tmp_path / "missing.wav"))
    assert str(error).startswith("recognise.py: FileNotFoundError: ")
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "joint.fp32.onnx").write_bytes(b"foreign")
    error = end_of_program(tmp_path / "copy/recognise.py", str(tmp_path / "a.wav"))
    assert error == "recognise.py: ValueError: joint.fp32.onnx is not the exported file"


def test_the_program_has_at_most_100_lines() -> None:
    assert len(Path(recognise_stream.__file__).read_text().splitlines()) <= 100


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("prediction=stateless", "model.joint.durations=[0,1,2]", "model.ctc_weight=0"),
        ("model=ctc", "encoder.features.form=dali", "encoder.features.padding=reflect"),
        ("encoder.features.form=kaldi_hann", "encoder.features.splice=2", "encoder.subsampling=2"),
    ],
    ids=["tdt", "ctc", "spliced"],
)
def test_write_of_other_models(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    groups = [override for override in overrides if override.startswith(("model=", "prediction="))]
    values = [override for override in overrides if override not in groups]
    keys = [key for key in KEYS if "model=ctc" not in groups or not key.startswith("model.")]
    run = untrained(tmp_path / "run", *groups, *keys, *CAUSAL, *values)
    out = tmp_path / "onnx"
    assert export.run([str(run), "--to", "onnx", "--out", str(out), "--context", "5,2,0"]) == 0
    result = json.loads((out / "error_rates.json").read_text())
    assert result["differences"] == []
    assert json.loads((out / "model.json").read_text())["stream"]["context"] == [5, 2, 0]


@pytest.mark.parametrize(
    ("context", "message"),
    [
        ("8,4", "--context 8,4: give three numbers of frames, such as 120,9,0"),
        ("8,4,2", "--context 8,4,2: a graph reads no frame after the chunk. Export --context 8,4,0"),
    ],
)
def test_write_refuses_a_wrong_context(
    run_directory: Path, tmp_path: Path, context: str, message: str
) -> None:
    command = [str(run_directory), "--to", "onnx", "--out", str(tmp_path / "out"), "--context", context]
    with pytest.raises(ConfigError) as caught:
        export.run(command)
    assert str(caught.value) == message
    assert not (tmp_path / "out").exists()


def test_write_refuses_features_of_whole_recordings(tmp_path: Path) -> None:
    run = untrained(tmp_path / "run", *KEYS, *CAUSAL[:3], "encoder.features.normalise=all")
    with pytest.raises(ConfigError, match=r"A stream needs encoder\.features\.normalise=fixed, or none$"):
        export.run([str(run), "--to", "onnx", "--out", str(tmp_path / "out")])
