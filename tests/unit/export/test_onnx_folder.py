"""Exports of tiny runs, checked by ``speechtrain export`` itself and by the program in the folder."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import soundfile

from speechtrain.commands import export
from speechtrain.data.audio import change_rate
from speechtrain.errors import ConfigError, DataError
from speechtrain.export import held_out, onnx_folder, recognise, recording
from speechtrain.nn.prediction import Prediction
from tests.support.faulty_recordings import FaultyRecordings
from tests.support.tiny_run import TINY, end_of_program, small_encoder, untrained

pytestmark = pytest.mark.slow  # torch needs seconds to write a model
KEYS = [key for key in TINY if not key.startswith("encoder.")] + small_encoder("fastconformer_tiny")


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return untrained(tmp_path_factory.mktemp("run") / "rnnt", *KEYS)


@pytest.fixture(scope="module")
def outside(run_directory: Path) -> Path:
    """The export whose features have a graph of their own."""
    out = run_directory.with_name("outside")
    options = ["--to", "onnx", "--features", "outside", "--out", str(out)]
    assert export.run([str(run_directory), *options]) == 0
    return out


@contextmanager
def copied_graphs(outside: Path) -> Iterator[None]:
    """An export of the same run copies its graphs, because torch needs ten seconds to write them."""

    def copy_graphs(graphs: object, folder: Path) -> None:
        for path in outside.glob("*.onnx"):
            shutil.copy(path, folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnx_folder, "write_graphs", copy_graphs)
        yield


@pytest.fixture(scope="module")
def folder(run_directory: Path, outside: Path) -> Path:
    out = run_directory.with_name("onnx")
    with copied_graphs(outside):
        assert export.run([str(run_directory), "--to", "onnx", "--out", str(out)]) == 0
    return out


def recording_of(run_directory: Path, folder: Path) -> Path:
    """Write the first held-out recording as a file, and return its path."""
    loaded = export.load_for_onnx(run_directory, "best")
    utterance = next(held_out.utterances(loaded))
    soundfile.write(folder / "a.wav", utterance.samples, loaded.sample_rate, subtype="FLOAT")
    return folder / "a.wav"


def test_write_checks_every_precision(folder: Path) -> None:
    result = json.loads((folder / "error_rates.json").read_text())
    assert result["recordings"] == 4
    assert result["differences"] == []
    assert result["error_rates"]["fp32"] == result["error_rates"]["pytorch"]
    assert set(result["error_rates"]) == {"pytorch", "fp32", "int8"}
    assert json.loads((folder / "model.json").read_text())["run"] == "rnnt"


def test_recognise_prints_the_text_of_pytorch(run_directory: Path, folder: Path, tmp_path: Path) -> None:
    audio = recording_of(run_directory, tmp_path)
    loaded = export.load_for_onnx(run_directory, "best")
    utterance = next(held_out.utterances(loaded))
    command = [sys.executable, "-O", str(folder / "recognise.py"), str(audio)]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.stderr == ""
    assert process.stdout == f"{audio}\t{held_out.text_of(loaded, utterance.samples)}\n"
    assert process.returncode == 0


def test_recognise_averages_channels_and_converts_the_rate(
    run_directory: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples, rate = soundfile.read(recording_of(run_directory, tmp_path), dtype="float32")
    fast = change_rate(samples, rate, 44100)
    stereo = np.stack([1.5 * fast, 0.5 * fast], 1)
    soundfile.write(tmp_path / "b.wav", stereo, 44100, subtype="FLOAT")
    assert end_of_program(folder / "recognise.py", "--int8", str(tmp_path / "b.wav")) == 0
    model, sessions = recognise.open_export(folder, "int8")  # type: ignore[no-untyped-call]
    mono = recording.read_recording(tmp_path / "b.wav", rate)  # type: ignore[no-untyped-call]
    text = recognise.transcribe(model, sessions, mono)  # type: ignore[no-untyped-call]
    assert capsys.readouterr().out == f"{tmp_path / 'b.wav'}\t{text}\n"


@pytest.mark.parametrize("rate", [8000, 11025, 16001, 44100, 48000])
def test_recognise_converts_rates_as_training_does(rate: int) -> None:
    noise = np.random.default_rng(0).standard_normal(3 * rate + 7).astype(np.float32)
    samples = recording.change_rate(noise, rate, 16000)  # type: ignore[no-untyped-call]
    assert samples.dtype == np.float32
    np.testing.assert_allclose(samples, change_rate(noise, rate, 16000), atol=1e-3)


def test_recognise_writes_no_word_for_silence(
    run_directory: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples, rate = soundfile.read(recording_of(run_directory, tmp_path), dtype="float32")
    hiss = 0.01 * np.random.default_rng(0).standard_normal(5 * rate).astype(np.float32)
    soundfile.write(tmp_path / "hiss.wav", hiss, rate, subtype="FLOAT")
    soundfile.write(tmp_path / "padded.wav", np.r_[hiss, samples, 0 * hiss], rate, subtype="FLOAT")
    paths = [str(tmp_path / name) for name in ("hiss.wav", "padded.wav")]
    assert end_of_program(folder / "recognise.py", *paths) == 0
    texts = [line.partition("\t")[2] for line in capsys.readouterr().out.splitlines()]
    transcripts = export.load_for_onnx(run_directory, "best").transcribe(paths)
    assert texts == [transcript.text for transcript in transcripts]
    assert texts[0] == ""
    assert texts[1]


def test_recognise_names_each_faulty_recording(
    folder: Path, faulty_recordings: FaultyRecordings, capfd: pytest.CaptureFixture[str]
) -> None:
    assert end_of_program(folder / "recognise.py", *faulty_recordings.paths()) == 1
    faulty_recordings.check(capfd.readouterr())


def test_recognise_without_a_recording_prints_its_usage(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert end_of_program(folder / "recognise.py") == 2
    assert capsys.readouterr().err.startswith("usage: recognise.py [-h] [--int8] RECORDING")


def test_recognise_names_a_missing_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.delitem(sys.modules, "greedy_search", raising=False)  # Another test has imported it.
    error = str(end_of_program(folder / "recognise.py", "a.wav"))
    assert error.startswith("recognise.py: ")
    assert error.endswith("Install it: pip install numpy onnxruntime soundfile")


@pytest.mark.parametrize(
    "name",
    ["recognise.py", "recognise_sherpa.py", "recognise_stream.py", "greedy_search.py", "recording.py"],
)
def test_recognise_has_no_assertions_which_python_removes(name: str) -> None:
    program = ast.parse(Path(recognise.__file__).with_name(name).read_text())
    assert not [node.lineno for node in ast.walk(program) if isinstance(node, ast.Assert)]


def test_recognise_needs_three_packages(folder: Path) -> None:
    text = "\n".join([path.read_text() for path in folder.glob("*.py")])
    imports = [line.split()[1] for line in text.splitlines() if line.strip().startswith(("import ", "from "))]
    packages = {name.partition(".")[0] for name in imports} - set(sys.stdlib_module_names)
    modules = {"greedy_search", "recording", "voice_activity", "speechtrain"}  # The export has three of them.
    assert packages - modules == {"numpy", "onnxruntime", "soundfile"}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.json", b""),
        ("model.json", b"[]"),
        ("model.json", b"{}"),
        ("model.json", b'{"sha256": {"fp32": {"../../secret": ""}}}'),
        ("model.json", b"[" * 100_000),
        ("encoder.fp32.onnx", b"foreign"),
        ("joint.fp32.onnx", None),
    ],
)
def test_recognise_refuses_a_damaged_folder_with_one_line(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, content: bytes | None
) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / name).unlink()
    if content is not None:
        (tmp_path / "copy" / name).write_bytes(content)
    error = end_of_program(tmp_path / "copy/recognise.py", "a.wav")
    assert isinstance(error, str)
    assert error.startswith(f"recognise.py: the export in {tmp_path / 'copy'} is damaged: ")
    assert "\n" not in error
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("encoder", "overrides"),
    [
        ("contextnet_tiny", ["prediction=stateless", "model.joint.durations=[0,1,2]", "model.ctc_weight=0"]),
        ("quartznet_tiny", ["model=ctc"]),
        ("wav2vec2_small", ["model=ctc"]),
    ],
)
def test_write_of_other_models(tmp_path: Path, encoder: str, overrides: list[str]) -> None:
    keys = [key for key in TINY if not key.startswith(("encoder.", "model."))]
    run_directory = untrained(tmp_path / "run", *keys, *overrides, *small_encoder(encoder))
    out = tmp_path / "onnx"
    assert export.run([str(run_directory), "--to", "onnx", "--out", str(out)]) == 0
    rates = json.loads((out / "error_rates.json").read_text())["error_rates"]
    assert rates["fp32"] == rates["pytorch"]


def test_write_with_features_outside(run_directory: Path, outside: Path, tmp_path: Path) -> None:
    assert (outside / "features.fp32.onnx").is_file()
    arguments = export.parser().parse_with_run([str(run_directory), "--to", "onnx", "--out", str(tmp_path)])
    with copied_graphs(outside):
        export._export_runtime(arguments)
    # The model card has the error rates of this checkpoint.
    assert (run_directory / "checkpoints" / arguments.checkpoint).is_dir()


def test_write_refuses_another_text(
    run_directory: Path, outside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_out, "text_of", lambda loaded, samples: "another text")
    with copied_graphs(outside), pytest.raises(DataError, match="so nothing is written"):
        export.run([str(run_directory), "--to", "onnx", "--out", str(tmp_path / "onnx")])
    assert not (tmp_path / "onnx").exists()


def test_write_refuses_a_model_without_text(tmp_path: Path) -> None:
    run_directory = untrained(
        tmp_path / "run", "model=wav2vec2_small", "encoder=wav2vec2_small", "data=digits"
    )
    with pytest.raises(ConfigError, match=r"^--to onnx writes model=ctc and model=rnnt, .* is Wav2Vec2$"):
        export.run([str(run_directory), "--to", "onnx", "--out", str(tmp_path / "onnx")])


def test_write_refuses_a_run_without_recordings_at_first(tmp_path: Path) -> None:
    keys = [key for key in KEYS if not key.startswith("data.valid")]
    loaded = export.load_for_onnx(untrained(tmp_path / "run", *keys, "~data.valid.unheard"), "best")
    with pytest.raises(
        ConfigError, match=r"^--to onnx needs recordings .* Set data\.valid or data\.hold_out"
    ):
        onnx_folder.write(loaded, tmp_path / "missing", has_features=True)


def test_write_names_the_key_of_another_prediction_network(tmp_path: Path) -> None:
    class Other(Prediction):
        connect = forward = start = step = select = None  # type: ignore[assignment]

    run_directory = untrained(tmp_path / "run", *KEYS)
    loaded = export.load_for_onnx(run_directory, "best")
    loaded.opened.task.prediction = Other()
    with pytest.raises(ConfigError, match=r"Other\. Choose prediction=lstm or prediction=stateless"):
        onnx_folder.write(loaded, tmp_path / "missing", has_features=True)
