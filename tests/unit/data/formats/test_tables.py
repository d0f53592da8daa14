"""Tables of recordings as corpora and other toolkits write them, byte for byte; the recordings are made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from speechtrain.data.formats import tables
from speechtrain.data.formats.manifests import text_of
from speechtrain.data.module import SpeechData
from speechtrain.data.sources import open_source, parts_of
from speechtrain.errors import DataError
from speechtrain.text.vocabulary import Characters

LJSPEECH = (
    "LJ001-0001|Printing, in the only sense with which|Printing, in the only sense\n"
    'LJ001-0002|"in being 1466|"in being fourteen sixty-six\n'
    "LJ001-0003|For although the Chinese|For although the Chinese\n"
)
COMMON_VOICE = (
    "client_id\tpath\tsentence_id\tsentence\tsentence_domain\tup_votes\tdown_votes\tage\tgender\taccents\t"
    "variant\tlocale\tsegment\n"
    'a1\tcommon_voice_en_1.wav\tf0\t"He said ""no"" twice."\t\t2\t0\ttwenties\tmale_masculine\t\t\ten\t\n'
    'b2\tcommon_voice_en_2.wav\tf1\t"Open, not closed.\t\t2\t1\t\t\t\t\ten\t\n'
)
SPEECHBRAIN = (
    "ID,duration,wav,spk_id,wrd\n"
    "1867-154075-0032,0.5,$data_root/train-clean-5/a.wav,1867-154075,AND SO IT WAS\n"
    '1867-154075-0001,0.25,{data_root}/train-clean-5/b.wav,1867-154075,"THEN, NO"\n'
)


def cuts_of(spec: Any) -> list[dict[str, Any]]:
    return [entry.cut for part in parts_of(open_source(spec)) for entry in part.entries()]  # type: ignore[attr-defined]


def rows_of(spec: Any) -> list[tuple[str, str, float, Any]]:
    """Recording, transcript, length and speaker of each cut."""
    found = []
    for cut in cuts_of(spec):
        path, said = cut["recording"]["sources"][0]["source"], cut["supervisions"][0]
        found.append((path, text_of(cut), round(cut["duration"], 3), said.get("speaker")))
    return found


def refusal(spec: Any) -> str:
    with pytest.raises(DataError) as caught:
        cuts_of(spec)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_ljspeech(tmp_path: Path, recordings: Any) -> None:
    path = Path(write(tmp_path / "LJSpeech-1.1/metadata.csv", LJSPEECH))
    for number in (1, 2):
        recordings.tone(f"LJSpeech-1.1/wavs/LJ001-000{number}.wav", 0.25 * number, rate=22_050)
    wavs = tmp_path / "LJSpeech-1.1/wavs"
    wanted = [
        (f"{wavs}/LJ001-0001.wav", "Printing, in the only sense", 0.25, None),
        (f"{wavs}/LJ001-0002.wav", '"in being fourteen sixty-six', 0.5, None),
        (f"{wavs}/LJ001-0003.wav", "For although the Chinese", 1.0, None),  # met as a missing recording
    ]
    assert rows_of(str(path.parent)) == rows_of(str(path)) == wanted
    assert cuts_of(str(path.parent))[0]["id"] == "LJSpeech-1.1:1:LJ001-0001"
    path.write_text("LJ001-0001|one\nwavs/LJ001-0002.wav|two\nLJ001-0001.flac|three\n")
    assert [(Path(row[0]).name, row[1]) for row in rows_of(str(path))] == [
        ("LJ001-0001.wav", "one"),
        ("LJ001-0002.wav", "two"),
        ("LJ001-0001.flac", "three"),
    ]


@pytest.mark.parametrize("column", ["text", "transcription", "sentence"])
def test_hugging_faces_audiofolder(tmp_path: Path, recordings: Any, column: str) -> None:
    for name in ("data/a.wav", "data/b.wav", "unlisted.wav"):
        recordings.tone(f"train/{name}", 0.5)
    lines = [{"file_name": "data/a.wav", column: "one"}, {"file_name": "data/b.wav", column: "two\n"}]
    write(tmp_path / "train/metadata.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    wanted = [
        (f"{tmp_path}/train/data/a.wav", "one", 0.5, None),
        (f"{tmp_path}/train/data/b.wav", "two", 0.5, None),
    ]
    assert rows_of(str(tmp_path / "train")) == wanted
    write(tmp_path / "train/metadata.csv", f'{column},file_name\none,data/a.wav\n"two\n",data/b.wav\n')
    assert rows_of(str(tmp_path / "train")) == wanted
    write(tmp_path / "test/metadata.csv", f"file_name,{column}\na.wav,one\n")
    assert f"Give {tmp_path}/test, {tmp_path}/train" in refusal(str(tmp_path))  # not test with train


def test_common_voice(tmp_path: Path, recordings: Any) -> None:
    recordings.tone("cv/en/clips/common_voice_en_1.wav", 0.5, rate=48_000)
    path = write(tmp_path / "cv/en/validated.tsv", COMMON_VOICE)
    assert rows_of(path) == [
        (f"{tmp_path}/cv/en/clips/common_voice_en_1.wav", 'He said "no" twice.', 0.5, "a1"),
        (f"{tmp_path}/cv/en/clips/common_voice_en_2.wav", '"Open, not closed.', 1.0, "b2"),
    ]
    assert cuts_of(path)[1]["id"] == "validated:3:common_voice_en_2"


def test_speechbrain(tmp_path: Path) -> None:
    path = write(tmp_path / "train.csv", SPEECHBRAIN)
    assert rows_of(path) == [
        (f"{tmp_path}/train-clean-5/a.wav", "AND SO IT WAS", 0.5, "1867-154075"),
        (f"{tmp_path}/train-clean-5/b.wav", "THEN, NO", 0.25, "1867-154075"),
    ]
    write(
        tmp_path / "old.csv",
        "ID, duration, wav, wav_format, wav_opts, spk_id, wrd\nx, 1.5, /a/x.wav, wav, , s, A B\n",
    )
    assert rows_of(str(tmp_path / "old.csv")) == [("/a/x.wav", "A B", 1.5, "s")]


@pytest.mark.parametrize("mark", ["\t", ",", ";", "|"])
@pytest.mark.parametrize("form", ["plain", "mark", "windows", "pandas"])
def test_any_table_with_a_header(tmp_path: Path, recordings: Any, mark: str, form: str) -> None:
    recordings.tone("x/a.wav", 0.5)
    lines = [("Path", "Sentence", "Speaker_ID"), ("x/a.wav", "é one", "7"), ("x/b.wav", "two", "")]
    if form == "pandas":
        lines = [("", *lines[0]), ("0", *lines[1]), ("1", *lines[2])]
    text = "".join(mark.join(line) + ("\r\n" if form == "windows" else "\n") for line in lines)
    path = write(tmp_path / "t.csv", ("\ufeff" if form == "mark" else "") + text)
    assert rows_of(path) == [
        (f"{tmp_path}/x/a.wav", "é one", 0.5, "7"),
        (f"{tmp_path}/x/b.wav", "two", 1.0, None),
    ]


def test_columns_are_chosen_by_key(tmp_path: Path, recordings: Any, cache: Path) -> None:
    recordings.tone("a.wav", 2.0)
    path = write(
        tmp_path / "t.csv", "audio,text,raw,from,to,who\na.wav,one,ONE,0.5,1.25,s\na.wav,two,TWO,1,,s\n"
    )
    chosen = {"path": path, "text": "raw", "start": "from", "end": "to", "speaker": "who"}
    assert rows_of(chosen) == [
        (f"{tmp_path}/a.wav", "ONE", 0.75, "s"),
        (f"{tmp_path}/a.wav", "TWO", 1.0, "s"),
    ]
    assert [cut["start"] for cut in cuts_of(chosen)] == [0.5, 1.0]
    assert rows_of(path)[0][1:] == ("one", 2.0, None)
    typed = f"{{path: {path}, text: raw, start: from, end: to, speaker: who}}"
    assert rows_of(typed) == rows_of(chosen)
    assert (
        open_source(path).fingerprint()
        != open_source(chosen).fingerprint()
        == open_source(typed).fingerprint()
    )
    lines = write(tmp_path / "t.jsonl", '{"clip": "a.wav", "said": "three", "length": 1.5}\n')
    assert rows_of({"path": lines, "audio": "clip", "text": "said", "duration": "length"})[0][1:3] == (
        "three",
        1.5,
    )
    other = write(tmp_path / "u.csv", "file\tother\na.wav\tx\n")
    assert [row[1] for row in rows_of([chosen, other])] == ["ONE", "TWO", ""]
    folder = tmp_path / "hf"
    write(folder / "metadata.csv", "file_name,text,raw\na.wav,one,ONE\n")
    assert rows_of({"path": str(folder), "text": "raw"})[0][1] == "ONE"


def test_recordings_without_transcripts_need_no_column(tmp_path: Path, recordings: Any) -> None:
    recordings.tone("a.wav", 0.5)
    for content in (
        "path\na.wav\n",
        "path\tspeaker\na.wav\t\n",
        "file,duration\na.wav,0.5\n",
        '{"file_name": "a.wav"}\n',
    ):
        assert rows_of(write(tmp_path / "t", content)) == [(f"{tmp_path}/a.wav", "", 0.5, None)]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            "clip,said\na.wav,one\n",
            "t.csv:1: has no column that is known as its recordings: 'clip', 'said'. Choose with "
            "{path: t.csv, audio: COLUMN}",
        ),
        (
            "path,text,sentence\na.wav,one,two\n",
            "t.csv:1: has 2 columns that may be its text: 'path', 'text', 'sentence'. Choose with "
            "{path: t.csv, text: COLUMN}",
        ),
        ("path,wav,text\na.wav,b.wav,one\n", "has 2 columns that may be its audio"),
        ("path,text,text\na.wav,one,two\n", "has 2 columns that may be its text"),
        ("path,text\na.wav,one, two\n", "t.csv:2: has 3 cells, the table has 2 columns. Put a cell with ','"),
        ("path,text\na.wav\n", "t.csv:2: has 1 cells"),
        ("path,text\n,one\n", "t.csv:2: has no recording in column 'path'"),
        ("path,duration\na.wav,long\n", "t.csv:2: 'duration' is 'long', not a number"),
        ("path,duration\na.wav,-1\n", "t.csv:2: 'duration' is -1.0, below 0. Without it"),
        ("path,duration\na.wav,nan\n", "t.csv:2: 'duration' is nan, not a finite number"),
        ("path,start,end\na.wav,3,2\n", "t.csv:2: starts at 3 s and ends at 2 s"),
        ("path,start,end\na.wav,-3,2\n", "t.csv:2: starts at -3 s and ends at 2 s"),
        ('path,text\na.wav,"one\n', "t.csv:2: is not a row of a table"),
        ('path,text\na.wav,"one"two\n', "t.csv:2: is not a row of a table"),
        ("path,text\n", "t.csv has a header only"),
        ("path,text\na.wav,\udcff\n", "t.csv:2: not UTF-8"),
        ('{"path": 5}\n', "t.csv:1: 'audio' is 5, not a string"),
        ("just words\n", "t.csv:1: not a manifest"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(content.encode(errors="surrogateescape"))
    assert words in refusal(str(path))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"path": "t.csv", "text": "said"}, "t.csv:1: has no column 'said': 'path', 'text'. Choose with"),
        ({"path": "t.csv", "txt": "text"}, "'txt' is not a key of a source; did you mean 'text'?"),
        ({"audio": "path"}, "a source needs its path, as in {path: FILE"),
        ({"path": "gone.csv"}, "gone.csv does not exist"),
        ({"path": ".", "text": "said"}, "has no table, so it has no column 'said'"),
        ("{path: t.csv, text", "is not a mapping. Write it as {path: FILE"),
        ("{a: &a [b], c: [*a, *a]}", "c: ['b'] is a list in a list"),
        ("{a: gone.csv}", "gone.csv does not exist"),
    ],
)
def test_a_source_that_is_no_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: Any, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "t.csv", "path,text\na.wav,one\n")
    assert words in refusal(spec)


def test_a_table_whose_cells_are_numbers_is_not_fairseqs(tmp_path: Path) -> None:
    assert rows_of(write(tmp_path / "t.tsv", "path\tduration\na.wav\t2\n"))[0][1:3] == ("", 2.0)
    (tmp_path / "audio").mkdir()
    assert rows_of(write(tmp_path / "f.tsv", "audio\na.wav\t32000\n"))[0][1:3] == ("", 2.0)


def test_a_row_without_end_is_refused_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    for row in (b'"\n",', b"ab,", b'"' + b"a\n"):
        path.write_bytes(b"path,text\n" + row * 2**20)
        assert "t.csv:" in refusal(str(path))
    assert tables._LONGEST_ROW < 2**24


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        ({"train": {"path": "t.csv", "txt": "a"}, "valid": {}}, r"train: 'txt' is not a key .* 'text'\?"),
        ({"train": ["t.csv", {"text": "a"}], "valid": {}}, "train: a source needs its path"),
        ({"train": "t", "valid": {"dev": {"path": "t", "x": "a"}}}, "valid: dev: 'x' is not a key"),
        ({"train": "t", "valid": {"path": "t.csv", "txt": "a"}}, "valid: valid: 'txt' is not a key"),
    ],
)
def test_a_data_module_names_the_key_before_anything_starts(sets: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SpeechData(**sets, tokenizer=Characters())


def test_a_table_is_trained_on(tmp_path: Path, recordings: Any, cache: Path) -> None:
    for name in "ab":
        recordings.tone(f"{name}.wav", 0.5)
    path = write(tmp_path / "t.csv", "path,text,said\na.wav,x,one\nb.wav,y,two\n")
    data = SpeechData({"path": path, "text": "said"}, {"dev": path}, Characters(), workers=0)
    data.check()
    assert sorted(next(data.train()).texts) == ["one", "two"]
