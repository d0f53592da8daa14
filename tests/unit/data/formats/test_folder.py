"""A folder of recordings: where its transcripts may lie, and which files it does not read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from speechtrain.data.formats.folder import AudioFolder
from speechtrain.data.formats.manifests import text_of
from speechtrain.data.module import SpeechData
from speechtrain.data.pieces import recordings as named_recordings
from speechtrain.data.sources import open_source
from speechtrain.errors import DataError
from speechtrain.text.vocabulary import Characters
from tests.support.cuts import lhotse_cuts


def texts_of(folder: Path) -> list[str]:
    return [text_of(cut.to_dict()) for cut in lhotse_cuts(open_source(str(folder)))]


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


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(
            ("c/{}.eaf", ".eaf (ELAN)"),
            ("c/{}.TextGrid", ".textgrid (Praat)"),
            ("c/{}.vtt", ".vtt (captions)"),
        ),
        *(("c/ref/all{}.stm", ".stm (NIST)"), ("c/texts{}.csv", ".csv (table)")),
    ],
)
@pytest.mark.parametrize("skip_empty", [True, False])
def test_annotations_beside_recordings_are_named_before_their_length(
    name: str, kind: str, skip_empty: bool, tmp_path: Path, cache: Path, recordings: Any
) -> None:
    for number in (1, 2):
        recordings.tone(f"c/{number}.wav", 1.2, rate=1_000)
        path = tmp_path / name.format(number)
        path.parent.mkdir(exist_ok=True)
        path.write_text("file,start,end,text\n1.wav,0,0.5,one\n")
    fact = (
        f"2 {kind} beside 2 recordings without a transcript: give a table with the columns file, start, end"
    )
    folder = str(tmp_path / "c")
    assert next(iter(open_source(folder).warnings())).startswith(f"{folder}: left out: {fact}")
    data = SpeechData(folder, {}, Characters(), skip_empty=skip_empty, max_seconds=1.0)
    with pytest.raises(DataError) as caught:
        data.micro_batches_per_epoch  # noqa: B018
    assert str(caught.value).startswith(f"data.train: no recording has a transcript: {fact}")
    table = tmp_path / "t.csv"
    table.write_text("file,start,end,text\nc/1.wav,0,0.5,one\nc/2.wav,0.5,1,two\n")
    assert SpeechData(
        str(table), {}, Characters(), skip_empty=skip_empty, max_seconds=1.0
    ).micro_batches_per_epoch
    # Transcribed recordings and recordings alone need no annotation.
    assert not list(AudioFolder(tmp_path / "c").warnings())
    for number in (1, 2):
        (tmp_path / f"c/{number}.txt").write_text("one")
    assert not list(open_source(folder).warnings())


def test_annotations_beside_lists_of_transcripts_are_not_named(tmp_path: Path, recordings: Any) -> None:
    recordings.tone("c/1-2-0.flac", 0.2)
    (tmp_path / "c/1-2.trans.txt").write_text("1-2-0 ONE\n")
    (tmp_path / "c/1-2-0.TextGrid").write_text("x")
    assert not list(open_source(str(tmp_path / "c")).warnings())


@pytest.mark.parametrize("text", ["3 5 apples", "1\n2\n3", "<i>one</i> two", "<v Anna> one", "12:30 --> one"])
def test_a_text_that_resembles_another_format_is_read(text: str, tmp_path: Path, recordings: Any) -> None:
    recordings.tone("c/1.wav", 0.2)
    (tmp_path / "c/1.txt").write_text(text)
    assert texts_of(tmp_path / "c") == [" ".join(text.split())]


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


@pytest.mark.parametrize(("text", "fact"), [("", "is empty"), (" \n", "is empty"), ("... !", "has no words")])
def test_a_text_file_without_words_is_named(
    tmp_path: Path, cache: Path, recordings: Any, text: str, fact: str
) -> None:
    for number in range(4):
        recordings.tone(f"c/{number}.wav", 0.2)
        (tmp_path / f"c/{number}.txt").write_text("one" if number == 0 else text)
    hint = open_source(str(tmp_path / "c")).text_hint()
    assert hint == f"4 recordings, for example 1.wav; 1.txt {fact}"
    (tmp_path / "c/2.txt").unlink()
    (tmp_path / "c/1.txt").write_text("one")
    (tmp_path / "c/3.txt").write_text("one")
    assert open_source(str(tmp_path / "c")).text_hint().endswith("2.wav; no 2.txt")


KINDS = [
    ("WAV", "PCM_24", "a.wav"), ("WAV", "PCM_U8", "a.WAV"), ("WAV", "FLOAT", "a.wave"),
    ("WAV", "ULAW", "a.Wave"), ("WAV", "ALAW", "a.mp3"), ("WAV", "IMA_ADPCM", "a.m4a"),
    ("WAV", "GSM610", "a"), ("WAVEX", "PCM_16", "a.dat"), ("RF64", "PCM_16", "a.rf64"),
    ("W64", "PCM_16", "a.w64"), ("W64", "DOUBLE", "a.1"), ("AIFF", "PCM_16", "a.aiff"),
    ("AIFF", "PCM_S8", "a.aifc"), ("AU", "PCM_16", "a.au"), ("AU", "ULAW", "a.snd"),
    ("CAF", "PCM_16", "a.caf"), ("CAF", "ALAC_16", "a.CAF"), ("FLAC", "PCM_16", "a.flac"),
    ("OGG", "VORBIS", "a.oga"), ("OGG", "OPUS", "a.opus"), ("OGG", "OPUS", "a.ogg"),
    ("MP3", "MPEG_LAYER_III", "a.mp3"), ("NIST", "PCM_16", "a.sph"), ("VOC", "PCM_16", "a.voc"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "subtype", "name"), KINDS)
def test_what_the_decoder_reads_is_a_recording(
    tmp_path: Path, recordings: Any, form: str, subtype: str, name: str
) -> None:
    folder = tmp_path / "c"
    recordings.tone(f"c/{name}", 0.5, format=form, subtype=subtype)
    (folder / "a.txt").write_text("one two")
    source = open_source(str(folder))
    (cut,) = lhotse_cuts(source)
    assert (cut.id, text_of(cut.to_dict())) == ("c/a", "one two")
    assert cut.duration == pytest.approx(0.5, abs=0.1)
    assert not list(source.warnings())
    (recording,) = named_recordings(str(folder), 16_000, 100.0)
    assert recording.name == str(folder / name)


HEADERS = {
    "a.m4a": b"\0\0\0\x20ftypM4A \0\0\0\0",
    "a.webm": b"\x1a\x45\xdf\xa3\x01\0\0\0\0\0\0\x23",
    "a.amr": b"#!AMR\n\x3c\xde",
    "a.aac": b"\xff\xf1\x50\x80",
    "a.wma": b"\x30\x26\xb2\x75\x8e\x66\xcf\x11",
}


@pytest.mark.parametrize("name", HEADERS)
def test_what_the_decoder_cannot_read_is_counted_and_named(
    tmp_path: Path, recordings: Any, name: str
) -> None:
    recordings.tone("c/1.wav", 0.2)
    (tmp_path / "c" / name).write_bytes(HEADERS[name])
    (line,) = open_source(str(tmp_path / "c")).warnings()
    suffix = Path(name).suffix
    fix = f"cannot be decoded: convert to WAV or FLAC, as with ffmpeg -i {name} a.wav"
    assert line == f"{tmp_path}/c: left out: 1 {suffix} ({fix})"
    _, error = named_recordings(str(tmp_path / "c"), 16_000, 100.0)
    assert str(error) == line
    path = tmp_path / "c" / name
    (error,) = named_recordings(str(path), 16_000, 100.0)
    fix = f"Convert a recording to WAV or FLAC, as with ffmpeg -i {path} OUT.wav"
    assert str(error) == f"{path}: its format is not read. {fix}"


def test_what_is_left_out_is_counted_by_kind(tmp_path: Path, recordings: Any) -> None:
    for name in ("1.wav", "2.wav", "2.flac", "u.001", "u.002"):
        recordings.tone(f"c/{name}", 0.2, format="WAV")
    folder = tmp_path / "c"
    for name in (
        "1.txt",
        "9.txt",
        "README.txt",
        "Makefile",
        "1.phn",
        "notes.odt",
        "list.csv",
        ".hidden",
        "u.001.txt",
    ):
        (folder / name).write_text("text")
    for name in ("3.m4a", "my talk.M4A", "4.webm", "1.mp4"):
        (folder / name).write_bytes(HEADERS["a.m4a"])
    source = open_source(str(folder))
    assert [cut.id for cut in lhotse_cuts(source)] == ["c/1", "c/2", "c/u.001", "c/u.002"]
    (line,) = source.warnings()
    fix = "cannot be decoded: convert to WAV or FLAC, as with ffmpeg -i 3.m4a 3.wav"
    others = "2 .txt without a recording, 1 without a suffix, 1 .odt that are no recordings"
    copies = "1 .wav of the name of another recording"
    tables = "1 .csv (table) beside 2 recordings without a transcript: give a table with the columns"
    assert line.startswith(f"{folder}: left out: 2 .m4a, 1 .webm ({fix}), {copies}, {others}, {tables}")
    *_, error = named_recordings(str(folder), 16_000, 100.0)
    assert str(error) == line.partition(", 1 .wav")[0]


def test_transcribing_reads_no_text_of_a_folder(tmp_path: Path, recordings: Any) -> None:
    recordings.tone("c/1.wav", 0.2)
    (tmp_path / "c/1.txt").symlink_to("../private")
    (tmp_path / "c/2.txt").write_bytes(b"\xff\xfe\xff")
    (recording,) = named_recordings(str(tmp_path / "c"), 16_000, 100.0)
    assert recording.name == str(tmp_path / "c/1.wav")
    (cut,) = lhotse_cuts(open_source({"path": str(tmp_path / "c"), "text": ""}))
    assert text_of(cut.to_dict()) == ""


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n",
            "a Git LFS pointer. Run git lfs pull",
        ),
        (b"\n<!DOCTYPE html><html>, ; </html>", "a web page. Download the file again"),
        (b"<HTML>", "a web page. Download the file again"),
    ],
)
@pytest.mark.parametrize("name", ["a.wav", "a", "a.m4a", "a.csv", "a.jsonl"])
def test_a_stand_in_of_a_file_is_named(tmp_path: Path, content: bytes, fact: str, name: str) -> None:
    path = tmp_path / "c" / name
    path.parent.mkdir()
    path.write_bytes(content)
    (error,) = named_recordings(str(path), 16_000, 100.0)
    assert str(error) == f"{path}: is {fact}"
    with pytest.raises(DataError, match=rf"is {fact}$"):
        open_source(str(path))


def words_of(folder: Path) -> tuple[list[str], list[str]]:
    """The transcripts and the warnings of a folder."""
    source = open_source(str(folder))
    return [text_of(cut.to_dict()) for cut in lhotse_cuts(source)], list(source.warnings())


def test_folders_without_transcripts_have_the_name_of_their_word(tmp_path: Path, recordings: Any) -> None:
    folder = tmp_path / "c"
    for name in ("yes/a.wav", "yes/b.wav", "हाँ/a.wav", "turn on/a.wav"):
        recordings.tone(f"c/{name}", 0.3)
    recordings.tone("c/_background_noise_/a.wav", 5.0)
    (folder / "README.md").write_text("words")
    (folder / "validation_list.txt").write_text("yes/a.wav")
    texts, warnings = words_of(folder)
    assert texts == ["", "turn on", "yes", "yes", "हाँ"]
    fact = "no transcripts, so the names of 3 folders are used as words, such as 'turn on'"
    assert f"{folder}: {fact}. To read none: {{path: {folder}, text: ''}}" in warnings
    assert open_source(f"{{path: {folder}, text: ''}}").kind == AudioFolder.kind
    (folder / "yes/a.txt").write_text("one")
    texts, warnings = words_of(folder)
    assert texts == ["", "", "one", "", ""]
    assert "no transcripts" not in "".join(warnings)


@pytest.mark.parametrize(
    "names",
    [
        ["yes/a.wav"],
        ["spk01/a.wav", "spk02/a.wav"],
        ["01/a.wav", "02/a.wav"],
        ["train/a.wav", "test/a.wav"],
        ["yes/a.wav", "no/a.wav", "a.wav"],
        ["en/yes/a.wav", "en/no/a.wav"],
        ["anna/long.wav", "bob/a.wav"],
    ],
)
def test_folders_that_may_be_speakers_or_parts_are_no_words(
    tmp_path: Path, recordings: Any, names: list[str]
) -> None:
    for name in names:
        recordings.tone(f"c/{name}", 4.0 if "long" in name else 0.3)
    assert words_of(tmp_path / "c") == ([""] * len(names), [])
