"""speechtrain-transcribe: text of any audio file, whatever lies beside it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile

from speechtrain.commands import prepare, transcribe
from speechtrain.errors import ConfigError, RunError

ONE = "device.threads=1"


@pytest.fixture(scope="module")
def folder(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same utterance at two rates, in one and two channels, and an empty file."""
    made = tmp_path_factory.mktemp("audio")
    prepare.run(["sample", str(made / "a.wav")])
    samples, rate = soundfile.read(made / "a.wav")
    soundfile.write(made / "stereo.flac", np.stack([samples, samples], axis=1), rate)
    soundfile.write(made / "b=c.wav", samples[::2], rate // 2)
    (made / "empty.wav").touch()
    (made / "not.wav").write_text("no audio at all")
    return made


def test_files_are_transcribed_in_order(
    run_dir: Path, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.delenv("DATASET_DIR", raising=False)
    assert transcribe.run([str(run_dir), "stereo.flac", "b=c.wav", ONE, "a.wav", "--batch", "2"]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [name for name, _ in lines] == ["stereo.flac", "b=c.wav", "a.wav"]
    assert transcribe.run([str(run_dir), "a.wav", ONE, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"audio": "a.wav", "text": lines[2][1]}


def test_a_file_that_cannot_be_used_stops_no_other(
    run_dir: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(folder / name) for name in ("empty.wav", "a.wav", "none.wav", "not.wav")]
    assert transcribe.run([str(run_dir), *files, ONE]) == 3
    told = capsys.readouterr()
    assert told.out.count("\n") == 1
    assert told.out.startswith(f"{files[1]}\t")
    assert "empty.wav: the file is empty" in told.err
    assert "none.wav: the file does not exist" in told.err
    assert "not.wav: Format not recognised" in told.err.replace("': ", ": ").replace("'", "")
    assert told.err.count("\n") == 3
    assert "Backend" not in told.err


def test_a_limit_that_is_set_holds(run_dir: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert transcribe.run([str(run_dir), str(folder / "a.wav"), ONE, "decoder.max_symbols=1"]) == 0
    assert len(capsys.readouterr().out.partition("\t")[2].split()) <= 1


def test_usage(run_dir: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match="name one or more audio files"):
        transcribe.run([str(run_dir), ONE])
    with pytest.raises(ConfigError, match="--batch 0"):
        transcribe.run([str(run_dir), "a.wav", "--batch", "0"])
    with pytest.raises(RunError):
        transcribe.run([str(folder), str(folder / "a.wav")])
