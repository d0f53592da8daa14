"""Long recordings in pieces, and what may be named to transcribe."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile

from speechtrain.data.pieces import Recording, piece_end, recordings
from speechtrain.data.sources import open_source
from speechtrain.errors import DataError
from tests.support.audio_files import read_file

RATE = 16_000
DAY = 86_400.0


def noise(seconds: float, seed: int = 0) -> np.ndarray:
    samples: np.ndarray = 0.3 * np.random.default_rng(seed).standard_normal(round(seconds * RATE))
    return samples.astype(np.float32)


def only(name: str | Path, most: float = DAY) -> Recording:
    (found,) = recordings(str(name), RATE, most)
    assert isinstance(found, Recording), found
    return found


@pytest.mark.parametrize("suffix", ["wav", "flac", "ogg", "mp3"])
def test_pieces_lie_end_to_end_and_end_in_the_pauses(tmp_path: Path, suffix: str) -> None:
    samples, pauses = noise(50.0), (7.0, 16.5, 23.0, 30.1, 39.9)
    for at in pauses:
        samples[round(at * RATE) : round((at + 0.4) * RATE)] *= 0.001
    soundfile.write(tmp_path / f"a.{suffix}", samples, RATE)
    found = list(only(tmp_path / f"a.{suffix}").pieces(10.0))
    starts = [start for start, _ in found]
    for start, pause in zip(starts[1:], pauses, strict=True):
        assert pause < start < pause + 0.4
    whole = read_file(str(tmp_path / f"a.{suffix}"), RATE)
    joined = np.concatenate([part for _, part in found])
    assert len(joined) == len(whole)
    np.testing.assert_allclose(joined, whole, atol=0 if suffix in ("wav", "flac") else 1e-3)
    assert all(len(part) <= 10 * RATE for _, part in found)


def test_of_equal_loudness_the_last_place_is_taken() -> None:
    assert piece_end(np.zeros(10 * RATE, np.float32), RATE) == 10 * RATE - RATE // 10
    loud = np.ones(10 * RATE, np.float32)
    loud[6 * RATE : 7 * RATE] = 0.0
    assert 6 * RATE < piece_end(loud, RATE) < 7 * RATE


def test_a_recording_at_another_rate_is_the_same_in_pieces(tmp_path: Path) -> None:
    time = np.arange(30 * 44_100) / 44_100
    soundfile.write(tmp_path / "a.wav", (0.5 * np.sin(600 * time)).astype(np.float32), 44_100, "FLOAT")
    whole = read_file(str(tmp_path / "a.wav"), RATE)
    for start, part in only(tmp_path / "a.wav").pieces(8.0):
        first = round(start * RATE)
        inner = slice(200, len(part) - 200)  # the filter's reach
        np.testing.assert_allclose(part[inner], whole[first : first + len(part)][inner], atol=0.02)


def test_a_manifest_names_parts_and_ids(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", noise(30.0), RATE)
    lines = [
        {"audio_filepath": "a.wav", "offset": 2.0, "duration": 25.0},
        {"audio_filepath": "none.wav", "duration": 1.0},
        {"audio_filepath": "a.wav"},
    ]
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, second, third = recordings(str(tmp_path / "m.jsonl"), RATE, DAY)
    assert isinstance(first, Recording)
    assert isinstance(third, Recording)
    assert (first.seconds, third.seconds) == (25.0, 30.0)
    whole = read_file(str(tmp_path / "a.wav"), RATE)
    joined = np.concatenate([part for _, part in first.pieces(10.0)])
    np.testing.assert_array_equal(joined, whole[2 * RATE : 27 * RATE])
    assert len({first.name, third.name}) == 2
    assert isinstance(second, Recording)
    with pytest.raises(DataError, match=r"none\.wav: the file does not exist"):
        list(second.pieces(10.0))


def test_a_mixture_is_read_whole_and_cut(tmp_path: Path) -> None:
    from lhotse import Recording as LhotseRecording

    soundfile.write(tmp_path / "a.wav", noise(12.0), RATE)
    cut = LhotseRecording.from_file(tmp_path / "a.wav").to_cut()
    mixed = cut.append(cut)
    (tmp_path / "m.jsonl").write_text(json.dumps(mixed.to_dict()) + "\n")
    found = list(only(tmp_path / "m.jsonl").pieces(10.0))
    assert len(found) > 2
    np.testing.assert_allclose(np.concatenate([part for _, part in found]), mixed.load_audio()[0], atol=1e-6)


def test_a_folder_has_its_recordings_in_order(tmp_path: Path) -> None:
    for name in ("b.flac", "a.wav", "sub/c.wav"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        soundfile.write(tmp_path / name, noise(1.0), RATE)
    (tmp_path / "empty.wav").touch()
    found = {one.name: one for one in recordings(str(tmp_path), RATE, DAY) if isinstance(one, Recording)}
    assert [Path(name).name for name in found] == ["a.wav", "b.flac", "empty.wav", "c.wav"]
    with pytest.raises(DataError, match=r"empty\.wav: the file is empty"):
        list(found[str(tmp_path / "empty.wav")].pieces(10.0))
    (none,) = recordings(str(tmp_path / "none"), RATE, DAY)
    assert isinstance(none, DataError)
    assert "does not exist" in str(none)


def test_a_file_that_ends_before_its_header_says_is_used_as_far_as_it_goes() -> None:
    samples = noise(23.0)

    def read(start: float, seconds: float) -> np.ndarray:
        return samples[round(start * RATE) :][: round(seconds * RATE)]

    found = [part for _, part in Recording("a.mp3", "a.mp3", 1e6, read, RATE).pieces(10.0)]
    np.testing.assert_array_equal(np.concatenate(found), samples)


def test_a_line_about_the_transcripts_is_no_error_of_a_recording(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", noise(0.5), RATE)
    (tmp_path / "t.csv").write_text("file,class\na.wav,yes\n")
    assert list(open_source(str(tmp_path / "t.csv")).warnings())
    assert only(tmp_path / "t.csv").name == "t:2:a"
