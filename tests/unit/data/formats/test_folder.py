"""A folder of recordings: where its transcripts may lie, and which files it does not read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from speechtrain.data.formats.manifests import text_of
from speechtrain.data.module import SpeechData
from speechtrain.data.pieces import recordings as named_recordings
from speechtrain.data.sources import open_source
from speechtrain.errors import DataError
from speechtrain.text.vocabulary import Characters


def texts_of(folder: Path) -> list[str]:
    return [text_of(cut.to_dict()) for cut in open_source(str(folder)).cuts()]


def test_texts_are_read_from_a_folder_beside_that_of_the_recordings(tmp_path: Path, recordings: Any) -> None:
    recordings.tone("c/wav/1.wav", 0.2)
    recordings.tone("c/wav/2.wav", 0.2)
    recordings.tone("c/wav/deep/3.wav", 0.2)
    for name, text in (("txt/1.txt", "one"), ("txt/2.txt", "other"), ("wav/2.txt", "two")):
        (tmp_path / "c" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "c" / name).write_text(text)
    (tmp_path / "c/txt/deep").mkdir()
    (tmp_path / "c/txt/deep/3.txt").write_text("three")
    assert texts_of(tmp_path / "c") == ["one", "two", "three"]


def test_an_index_of_a_folder_changes_with_its_texts(tmp_path: Path, recordings: Any) -> None:
    recordings.tone("c/wav/1.wav", 0.2)
    before = open_source(str(tmp_path / "c")).fingerprint()
    (tmp_path / "c/txt").mkdir()
    (tmp_path / "c/txt/1.txt").write_text("one")
    assert open_source(str(tmp_path / "c")).fingerprint() != before


@pytest.mark.parametrize(("name", "end"), [("texts/1.words", ", but texts/1.words has its name"), ("x", "")])
def test_texts_in_another_place_are_named(
    name: str, end: str, tmp_path: Path, cache: Path, recordings: Any
) -> None:
    for number in (0, 1):
        recordings.tone(f"c/wav/{number}.wav", 0.2)
    (tmp_path / "c" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "c" / name).write_text("one")
    stem = "wav/1" if end else "wav/0"
    hint = f"no recording has a transcript: 2 recordings, for example {stem}.wav; no {stem}.txt{end}"
    with pytest.raises(DataError, match=f"{hint}$"):
        SpeechData(str(tmp_path / "c"), {}, Characters(), skip_empty=True).micro_batches_per_epoch  # noqa: B018
    with pytest.raises(DataError, match=hint.partition(": ")[2]):
        SpeechData(str(tmp_path / "c"), {}, Characters()).check()


def test_recordings_of_an_unknown_suffix_are_counted(tmp_path: Path, recordings: Any) -> None:
    for name in ("1.wav", "2.wav", "3.flac"):
        recordings.tone(f"c/{name}", 0.2)
    folder = tmp_path / "c"
    assert not list(open_source(str(folder)).warnings())
    (folder / "README.txt").write_text("no transcript")
    (folder / "2.m4a").write_bytes(b"also there as 2.wav")
    assert not list(open_source(str(folder)).warnings())
    (folder / "1.wav").rename(folder / "1.M4A")
    (folder / "3.flac").rename(folder / "3.mp4")
    (line,) = open_source([str(folder)]).warnings()
    assert line.startswith(f"{folder}: 2 files are not read, such as 1.M4A. Convert to .wav, ")
    *readable, error = named_recordings(str(folder), 16_000, 100.0)
    assert [recording.name for recording in readable] == [str(folder / "2.wav")]
    assert isinstance(error, DataError)
    assert str(error) == line
