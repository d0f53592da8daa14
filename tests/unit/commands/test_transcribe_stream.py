"""speechtrain transcribe --stream: the text of a recording or of standard input while it arrives."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile

from speechtrain.commands import _stream
from speechtrain.commands.transcribe import run
from speechtrain.errors import ConfigError, DataError
from tests.support.tiny_run import STREAMING, untrained

RATE = 16_000
Feed = Callable[[bytes], None]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(untrained(tmp_path_factory.mktemp("run"), *STREAMING))


@pytest.fixture
def samples() -> np.ndarray:
    noise = np.random.default_rng(0).standard_normal(RATE)
    return (3000 * noise).astype("<i2")


@pytest.fixture
def standard_input(monkeypatch: pytest.MonkeyPatch) -> Feed:
    """Returns a function that gives bytes to standard input, in parts of odd sizes, and then ends it."""

    def feed(content: bytes) -> None:
        reader, writer = os.pipe()
        monkeypatch.setattr("sys.stdin", os.fdopen(reader))

        def write() -> None:
            with os.fdopen(writer, "wb", buffering=0) as pipe:
                for start in range(0, len(content), 999):
                    pipe.write(content[start : start + 999])

        threading.Thread(target=write, daemon=True).start()

    return feed


def events(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


def test_a_recording_and_standard_input_have_the_same_text(
    run_dir: str,
    samples: np.ndarray,
    standard_input: Feed,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    soundfile.write(tmp_path / "a.wav", samples, RATE, "PCM_16")
    assert run([run_dir, str(tmp_path / "a.wav"), "--stream"]) == 0
    output = capsys.readouterr()
    (final,) = [event for event in events(output.out) if event["final"]]
    assert "1.0 s of audio, real-time factor" in output.err
    standard_input(samples.tobytes() + b"\0")  # half a sample more
    assert run([run_dir, "--stream", "--context", "16,4,0"]) == 0
    output = capsys.readouterr()
    (piped,) = [event for event in events(output.out) if event["final"]]
    assert piped["text"] == final["text"]
    assert [word["end"] for word in piped["words"]] == [word["end"] for word in final["words"]]
    assert "standard input: 16-bit PCM, one channel, 16000 Hz" in output.err
    # Partial texts come before the end, and grow into the final text.
    partial = [event["text"] for event in events(output.out) if not event["final"]]
    assert len(partial) > 3
    assert all(final["text"].startswith(text) for text in partial)


def test_realtime_prints_the_delays_of_words(
    run_dir: str, samples: np.ndarray, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    soundfile.write(tmp_path / "a.wav", samples, RATE, "PCM_16")
    assert run([run_dir, str(tmp_path / "a.wav"), "--stream", "--realtime", "device.threads=1"]) == 0
    assert "delay" in capsys.readouterr().err


def test_a_terminal_shows_one_line_that_is_rewritten(
    run_dir: str,
    samples: np.ndarray,
    standard_input: Feed,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    standard_input(samples.tobytes())
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert run([run_dir, "--stream"]) == 0
    lines = capsys.readouterr().out.split("\n")
    assert len(lines) == 2  # one utterance, and nothing after its line end
    assert lines[0].count("\r\x1b[K") > 3


def test_a_file_with_a_header_on_standard_input_is_refused(
    run_dir: str, samples: np.ndarray, standard_input: Feed, tmp_path: Path
) -> None:
    soundfile.write(tmp_path / "a.wav", samples, RATE, "PCM_16")
    standard_input((tmp_path / "a.wav").read_bytes())
    with pytest.raises(DataError, match="ffmpeg -i FILE -f s16le -ac 1 -ar 16000"):
        run([run_dir, "--stream"])


def test_standard_input_without_samples_has_no_text(
    run_dir: str, standard_input: Feed, capsys: pytest.CaptureFixture[str]
) -> None:
    standard_input(b"")
    assert run([run_dir, "--stream"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["a.wav", "b.wav"], "one recording"),
        (["a.wav", "--format", "srt"], "text or JSON"),
        (["--realtime"], "needs a recording"),
        (["--channel", "0"], "a channel of a recording"),
        (["--context", "16,4"], "three numbers"),
        (["--context", "16,0,0", "a.wav"], "chunk at least 1"),
    ],
)
def test_wrong_arguments_are_named(run_dir: str, arguments: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        run([run_dir, "--stream", *arguments])


def test_a_channel_is_read_and_a_folder_of_several_recordings_is_refused(
    run_dir: str, samples: np.ndarray, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = np.random.default_rng(1).permutation(samples)
    soundfile.write(tmp_path / "a.wav", samples, RATE, "PCM_16")
    soundfile.write(tmp_path / "two.wav", np.stack([other, samples], axis=1), RATE, "PCM_16")
    assert run([run_dir, str(tmp_path / "a.wav"), "--stream"]) == 0
    alone = capsys.readouterr().out
    assert run([run_dir, str(tmp_path / "two.wav"), "--stream", "--channel", "1"]) == 0
    assert capsys.readouterr().out == alone
    with pytest.raises(ConfigError, match="several recordings"):
        run([run_dir, str(tmp_path), "--stream"])
    (tmp_path / "empty").mkdir()
    with pytest.raises((ConfigError, DataError)):
        run([run_dir, str(tmp_path / "empty"), "--stream"])


def test_speech_begins_when_the_recording_has_been_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waits = [100.0], list[float]()

    def sleep(seconds: float) -> None:
        waits.append(round(seconds, 6))
        now[0] += seconds

    monkeypatch.setattr(_stream, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))

    def pieces() -> Iterator[np.ndarray]:
        now[0] += 0.4  # The recording is opened.
        yield np.zeros(4000, np.float32)

    parts = list(_stream._at_speed_of_speech(pieces(), 16_000))
    assert sum(map(len, parts)) == 4000
    assert waits == [0.04] * 6 + [0.01]
