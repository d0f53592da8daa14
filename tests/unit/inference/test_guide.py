"""Each example of docs/python.md runs as it is written, on a small run."""

from __future__ import annotations

import json
import re
import shutil
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile

import speechtrain
from tests.support.digits import write_digits, write_sample

PAGE = Path(__file__).resolve().parents[3] / "docs" / "python.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def block(line: str) -> str:
    """Return the example with this line."""
    (code,) = [code for code in BLOCKS if line in code]
    return code


@pytest.fixture
def folder(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the run and the recordings that the page names."""
    write_digits(tmp_path, train=1, valid=2)
    shutil.copy(tmp_path / "valid.jsonl", tmp_path / "dev.jsonl")
    (tmp_path / "RUN").symlink_to(run_dir)
    (tmp_path / "talks").mkdir()
    write_sample(tmp_path / "a.wav")
    soundfile.write(tmp_path / "b.flac", *soundfile.read(tmp_path / "a.wav"))
    shutil.copy(tmp_path / "a.wav", tmp_path / "talks")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def names(folder: Path) -> dict[str, Any]:
    """The names of an example that continues the first one."""
    return {"run": speechtrain.load("RUN", "device.threads=1"), "speechtrain": speechtrain}


def test_a_run(folder: Path) -> None:
    names: dict[str, Any] = {}
    exec(block("run.features("), names)
    assert names["frames"].ndim == 2
    assert names["outcome"].metrics["wer"] > 0


def test_a_batch_of_files(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    exec(block('["a.wav", "b.flac"]'), names)
    first, second = capsys.readouterr().out.splitlines()
    assert first.partition(" ")[2] == second.partition(" ")[2] != ""


def test_a_folder(folder: Path, names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "talks" / "bad.wav").write_bytes(b"RIFF")
    exec(block('run.recordings("talks/")'), names)
    assert "talks/bad.wav" in capsys.readouterr().out
    assert (folder / "talks" / "a.srt").read_text().startswith("1\n00:00:")
    assert not (folder / "talks" / "bad.srt").exists()


def test_an_array_of_a_microphone(names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """No machine of the tests has a microphone, so a recording stands for the library's array (S, 1)."""

    def rec(frames: int, samplerate: int, channels: int, dtype: str, blocking: bool) -> np.ndarray:
        samples, rate = soundfile.read("a.wav", dtype=dtype, always_2d=True)
        assert (samplerate, channels, blocking) == (rate, 1, True)
        return samples[:frames]

    monkeypatch.setitem(sys.modules, "sounddevice", SimpleNamespace(rec=rec))
    exec(block("import sounddevice"), names)
    (transcript,) = names["run"].transcribe("a.wav")
    assert names["transcript"].text == transcript.text


@pytest.fixture
def server(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The address of the page's web server and the names of its program."""
    program, last_line = block("BaseHTTPRequestHandler").rstrip().rsplit("\n", 1)
    assert last_line == 'ThreadingHTTPServer(("127.0.0.1", 8000), Handler).serve_forever()'
    handler = program.partition("class Handler")[2].strip()
    assert handler.count("\n") < 15
    names: dict[str, Any] = {}
    exec(program, names)
    with ThreadingHTTPServer(("127.0.0.1", 0), names["Handler"]) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", names
        server.shutdown()
        thread.join()
    names["model_thread"].shutdown()


def test_a_web_handler(server: tuple[str, dict[str, Any]], folder: Path) -> None:
    address, names = server
    (transcript,) = names["run"].transcribe("a.wav")
    for name in ("a.wav", "b.flac"):
        with urllib.request.urlopen(address, (folder / name).read_bytes(), timeout=100) as response:
            assert json.load(response)["text"] == transcript.text
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(address, b"no audio", timeout=100)
    for _ in range(8):  # A handler releases its place after its response.
        assert names["places"].acquire(timeout=60)
    with pytest.raises(urllib.error.HTTPError, match="503"):
        urllib.request.urlopen(address, (folder / "a.wav").read_bytes(), timeout=100)
