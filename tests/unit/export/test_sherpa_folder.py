"""Exports of tiny runs, which sherpa-onnx recognises with."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

from speechtrain.commands import export
from speechtrain.errors import ConfigError
from speechtrain.export import held_out, sherpa_folder
from speechtrain.export.recognise_sherpa import open_recogniser
from tests.support.tiny_run import TINY, end_of_program, small_encoder, untrained

pytest.importorskip("sherpa_onnx", reason="sherpa-onnx is not installed: pip install -e '.[export]'")

pytestmark = pytest.mark.slow

# The runs have sherpa-onnx's limits of labels, because the text of a model without training has many labels.
KEYS = [key for key in TINY if not key.startswith(("encoder.", "model.", "decoder."))]
KEYS += ["decoder.max_symbols=1000000", "encoder.features.padding=reflect", "encoder.features.dither=0"]
KEYS += ["encoder.features.normalise=all"]
TRANSDUCER = ("decoder.max_symbols_per_step=10", "encoder.features.form=kaldi", "encoder.features.f_max=7600")
TDT = (*TRANSDUCER[1:], "decoder.max_symbols_per_step=5", "model.joint.durations=[0,1,2]")


def run_of(folder: Path, *overrides: str) -> Path:
    groups = [override for override in overrides if override.startswith(("encoder=", "model="))]
    values = [override for override in overrides if override not in groups]
    return untrained(folder / "run", *groups, *KEYS, *values)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of a QuartzNet with CTC."""
    path = tmp_path_factory.mktemp("sherpa")
    run = run_of(path, "model=ctc", *small_encoder("quartznet_tiny"), "encoder.features.form=kaldi_hann")
    assert export.run([str(run), "--to", "sherpa", "--out", str(path / "out")]) == 0
    return path / "out"


def test_write_of_ctc_has_the_texts_of_pytorch(folder: Path) -> None:
    result = json.loads((folder / "error_rates.json").read_text())
    assert (result["recordings"], result["differences"]) == (4, [])
    assert result["error_rates"]["fp32"] == result["error_rates"]["pytorch"]
    loaded = export.load_for_onnx(folder.with_name("run"), "best")
    utterances = list(held_out.utterances(loaded))
    for number, utterance in enumerate(utterances):
        soundfile.write(folder.with_name(f"{number}.wav"), utterance.samples, 16000, subtype="FLOAT")
    paths = [str(folder.with_name(f"{number}.wav")) for number in range(4)]
    command = [sys.executable, str(folder / "recognise.py"), *paths]
    process = subprocess.run(command, capture_output=True, text=True)
    texts = [line.partition("\t")[2] for line in process.stdout.splitlines()]
    assert texts == [held_out.text_of(loaded, utterance.samples).strip() for utterance in utterances]
    assert all(texts)


def test_write_of_ctc_recognises_several_recordings_at_once(folder: Path) -> None:
    _, recogniser = open_recogniser(folder, "fp32")  # type: ignore[no-untyped-call]
    noise = np.random.default_rng(0).standard_normal(32000).astype(np.float32)
    streams = [recogniser.create_stream() for _ in range(3)]
    for stream, samples in zip(streams, (32000, 32000, 23000), strict=True):
        stream.accept_waveform(16000, 0.1 * noise[:samples])
    recogniser.decode_stream(streams[0])
    recogniser.decode_streams(streams[1:])
    texts = [stream.result.text for stream in streams]
    assert texts[0] == texts[1]
    assert all(texts)


@pytest.mark.parametrize(
    "overrides",
    [
        (*small_encoder("fastconformer_tiny"), *TRANSDUCER),
        (*small_encoder("contextnet_tiny"), "prediction=stateless", "model.ctc_weight=0", *TDT),
    ],
    ids=["rnnt", "tdt"],
)
def test_write_of_transducers_has_the_texts_of_pytorch(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    run = run_of(tmp_path, *overrides)
    assert export.run([str(run), "--to", "sherpa", "--out", str(tmp_path / "out")]) == 0
    rates = json.loads((tmp_path / "out" / "error_rates.json").read_text())["error_rates"]
    assert rates["fp32"] == rates["pytorch"]


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (
            ("encoder=quartznet_tiny", "model=ctc", "encoder.features.dither=1e-5"),
            r"encoder\.features\.form=kaldi_hann encoder\.features\.dither=0\.0",
        ),
        (
            ("encoder=fastconformer_tiny", "model.joint.durations=[1,2]", "model.ctc_weight=0"),
            r"encoder\.features\.form=kaldi encoder\.features\.f_max=7600\.0 model\.joint\.durations=\[0,1\]",
        ),
    ],
    ids=["features", "durations"],
)
def test_write_refuses_other_features_by_their_keys(
    tmp_path: Path, overrides: tuple[str, ...], keys: str
) -> None:
    run = run_of(tmp_path, *overrides)
    with pytest.raises(ConfigError, match=f"^--to sherpa needs a run that was trained with {keys}$"):
        export.run([str(run), "--to", "sherpa", "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_write_refuses_an_encoder_of_waveforms(tmp_path: Path) -> None:
    run = untrained(tmp_path / "run", *KEYS[:5], "model=ctc", "encoder=wav2vec2_small")
    with pytest.raises(ConfigError, match="--to sherpa needs log-mel features, and encoder is Wav2Vec2"):
        export.run([str(run), "--to", "sherpa", "--out", str(tmp_path / "out")])


def test_tokens_have_one_symbol_without_spaces_for_each_label() -> None:
    assert sherpa_folder.tokens([" the", " ", "a", ""]) == "▁the 0\n▁ 1\na 2\n<3> 3\n<blk> 4\n"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.json", None),
        ("model.json", b"[]"),
        ("model.json", b"[" * 100_000),
        ("model.json", b'{"sha256": {"fp32": {"../../secret": ""}}}'),
        ("model.json", b'{"sha256": {"fp32": {"model": 3}}, "sample_rate": "x", "mels": []}'),
        ("model.fp32.onnx", b"foreign"),
        ("model.fp32.onnx", None),
        ("tokens.txt", None),
        ("tokens.txt", b"\xff\n\n"),
    ],
)
def test_recognise_refuses_a_damaged_folder_with_one_line(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, content: bytes | None
) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / name).unlink()
    if content is not None:
        (tmp_path / "copy" / name).write_bytes(content)
    soundfile.write(tmp_path / "a.wav", np.zeros(16000), 16000)
    error = end_of_program(tmp_path / "copy/recognise.py", str(tmp_path / "a.wav"))
    assert isinstance(error, str)
    assert error.startswith(f"recognise.py: the export in {tmp_path / 'copy'} is damaged: ")
    assert "\n" not in error
    assert capfd.readouterr() == ("", "")
