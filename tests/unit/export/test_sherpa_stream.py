"""Exports of causal runs, which sherpa-onnx recognises with while speech arrives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import soundfile
import torch

from speechtrain.commands import export
from speechtrain.errors import ConfigError
from speechtrain.export import held_out
from speechtrain.export.recognise_sherpa import decode, open_recogniser
from tests.support.tiny_run import TINY, small_encoder, untrained

pytest.importorskip("sherpa_onnx", reason="sherpa-onnx is not installed: pip install -e '.[export]'")

KEYS = [key for key in TINY if not key.startswith(("encoder.", "decoder."))] + small_encoder(
    "fastconformer_tiny"
)
# The text of a model without training has many labels, and sherpa-onnx emits at most ten of them in a frame.
KEYS += ["encoder.causal=true", "encoder.context=[10,3,0]", "decoder.max_symbols_per_step=10"]
FEATURES = [
    *("encoder.features.form=kaldi_online", "encoder.features.log_floor=1.1920928955078125e-07"),
    *("encoder.features.padding=reflect", "encoder.features.dither=0", "encoder.features.normalise=fixed"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sherpa")
    run = untrained(path / "run", *KEYS, *FEATURES)
    assert export.run([str(run), "--to", "sherpa", "--out", str(path / "out")]) == 0
    return path / "out"


@pytest.mark.slow
def test_the_streamed_texts_are_those_of_one_pass(folder: Path) -> None:
    result = json.loads((folder / "error_rates.json").read_text())
    assert (result["recordings"], result["differences"]) == (4, [])
    assert result["error_rates"]["fp32"] == result["error_rates"]["pytorch"]


@pytest.mark.slow
def test_the_features_of_a_stream_are_those_of_the_run(folder: Path) -> None:
    log_mel = export.load_for_onnx(folder.with_name("run"), "best").opened.task.encoder.features
    _, recogniser = open_recogniser(folder, "fp32")  # type: ignore[no-untyped-call]
    noise = np.random.default_rng(0).standard_normal(32_000).astype(np.float32)
    samples = noise * np.repeat([0.1, 0, 1e-3, 1e-5], 8000).astype(np.float32)
    features, counts = log_mel(torch.from_numpy(samples)[None], torch.tensor([32_000]))
    stream = recogniser.create_stream()
    stream.accept_waveform(16000, samples)
    stream.input_finished()
    columns = torch.tensor(stream.get_frames(0, int(counts[0]))).view(features.shape)
    torch.testing.assert_close(log_mel.normalised_columns(columns), features, rtol=0, atol=1e-3)


@pytest.mark.slow
def test_the_metadata_name_the_sizes_of_the_caches(folder: Path) -> None:
    encoder = onnx.load(folder / "encoder.fp32.onnx")
    metadata = {entry.key: entry.value for entry in encoder.metadata_props}
    inputs = [entry.name for entry in encoder.graph.input]
    caches = ["cache_last_channel", "cache_last_time", "cache_last_channel_len"]
    assert inputs == ["audio_signal", "length", *caches]
    assert metadata["window_size"] == metadata["chunk_shift"] == "12"
    assert metadata["chunk_size_ms"] == "120"
    assert [metadata[f"cache_last_channel_dim{axis}"] for axis in (1, 2, 3)] == ["1", "10", "32"]
    decoder, joiner = (onnx.load(folder / f"{name}.fp32.onnx").graph for name in ("decoder", "joiner"))
    assert [len(decoder.input), len(decoder.output)] == [4, 4]
    assert [len(joiner.input), len(joiner.output)] == [2, 1]
    assert (folder / "tokens.txt").read_text().splitlines()[-1] == f"<blk> {metadata['vocab_size']}"


@pytest.mark.slow
def test_streams_that_are_decoded_together_have_their_own_texts(folder: Path) -> None:
    model, recogniser = open_recogniser(folder, "fp32")  # type: ignore[no-untyped-call]
    noise = 0.1 * np.random.default_rng(0).standard_normal((3, 32_000)).astype(np.float32)
    streams = [recogniser.create_stream() for _ in noise]
    silence = np.zeros(model["stream"]["silence_samples"], np.float32)
    for stream, samples in zip(streams, noise, strict=True):
        stream.accept_waveform(16000, np.append(samples, silence))
        stream.input_finished()
    while recogniser.is_ready(streams[0]):
        recogniser.decode_streams(streams)
    texts = [recogniser.get_result(stream) for stream in streams]
    assert texts == [decode(model, recogniser, samples) for samples in noise]  # type: ignore[no-untyped-call]
    assert len(set(texts)) > 1


@pytest.mark.slow
def test_the_program_prints_the_text_of_a_recording(folder: Path, tmp_path: Path) -> None:
    loaded = export.load_for_onnx(folder.with_name("run"), "best")
    utterance = next(held_out.utterances(loaded))
    soundfile.write(tmp_path / "a.wav", utterance.samples, 16000, subtype="FLOAT")
    command = [sys.executable, str(folder / "recognise.py"), "--int8", str(tmp_path / "a.wav")]
    process = subprocess.run(command, capture_output=True, text=True)
    path, _, text = process.stdout.partition("\t")
    assert path == str(tmp_path / "a.wav")
    assert text.strip()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["encoder.features.normalise=none", "encoder.features.hop_seconds=0.02"],
            r"trained with encoder\.features\.form=kaldi_online encoder\.features\.padding=reflect "
            r"encoder\.features\.hop_seconds=0\.01 encoder\.features\.log_floor=1\.19\S+ "
            r"encoder\.features\.dither=0\.0$",
        ),
        ([*FEATURES, "model.joint.durations=[0,1]", "model.ctc_weight=0"], r"model\.joint\.durations=\[\]"),
    ],
)
def test_write_refuses_what_sherpa_cannot_stream(tmp_path: Path, overrides: list[str], message: str) -> None:
    run = untrained(tmp_path / "run", *KEYS, *overrides)
    with pytest.raises(ConfigError, match=message):
        export.run([str(run), "--to", "sherpa", "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
