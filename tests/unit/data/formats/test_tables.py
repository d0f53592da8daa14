"""Tables of recordings as corpora and other toolkits write them, byte for byte; the recordings are made."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path
from typing import Any

import pytest

from speechtrain.data.formats import tables
from speechtrain.data.formats.manifests import text_of
from speechtrain.data.formats.tables import Table
from speechtrain.data.sources import open_source
from speechtrain.errors import DataError

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
    return [*open_source(spec).cuts()]


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
    path.write_text("LJ001-0001|stop\nLJ001-0002|from\n")  # These words name columns, too.
    assert [row[1] for row in rows_of(str(path))] == ["stop", "from"]


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
        tmp_path / "t.csv", "audio,text,raw,von,bis,who\na.wav,one,ONE,0.5,1.25,s\na.wav,two,TWO,1,,s\n"
    )
    chosen = {"path": path, "text": "raw", "start": "von", "end": "bis", "speaker": "who"}
    assert rows_of(chosen) == [
        (f"{tmp_path}/a.wav", "ONE", 0.75, "s"),
        (f"{tmp_path}/a.wav", "TWO", 1.0, "s"),
    ]
    assert [cut["start"] for cut in cuts_of(chosen)] == [0.5, 1.0]
    assert "start: COLUMN, end: COLUMN" in refusal(path)
    typed = f"{{path: {path}, text: raw, start: von, end: bis, speaker: who}}"
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


@pytest.mark.parametrize(
    "names",
    [
        *("begin,end", "start,stop", "tmin,tmax", "Begin Time,End Time", "xmin,xmax", "from,to"),
        *("Onset,Offset", "START_TIME,end", "offset,duration", "onset,duration", "offset,end"),
    ],
)
def test_times_have_the_names_of_other_tools(tmp_path: Path, recordings: Any, names: str) -> None:
    recordings.tone("a.wav", 2.0)
    # A duration of 0.75 begins at 0.25, and an end of 0.75 at 0.
    starts = (0.25, 1.0) if "duration" in names else (0, 0.25)
    rows = [f"a.wav,{start},0.75,{word}\n" for start, word in zip(starts, ("one", "two"), strict=True)]
    path = write(tmp_path / "t.csv", f"file,{names},text\n{''.join(rows)}")
    lengths = (0.75, 0.75) if "duration" in names else (0.75, 0.5)
    assert [(cut["start"], cut["duration"]) for cut in cuts_of(path)] == [*zip(starts, lengths, strict=True)]


def test_nemos_keys_with_times_of_another_tool_are_a_table(tmp_path: Path, recordings: Any) -> None:
    recordings.tone("a.wav", 2.0)
    lines = [
        {"audio_filepath": "a.wav", "begin": begin, "end": begin + 0.5, "text": "one"} for begin in (0.25, 1)
    ]
    path = write(tmp_path / "t.jsonl", "\n".join(map(json.dumps, lines)))
    assert [(cut["start"], cut["duration"]) for cut in cuts_of(path)] == [(0.25, 0.5), (1, 0.5)]
    nemo = {"audio_filepath": "a.wav", "begin": 9, "offset": 0.5, "duration": 1.0}
    (cut,) = cuts_of(write(tmp_path / "n.jsonl", json.dumps(nemo)))
    assert (cut["start"], cut["duration"]) == (0.5, 1.0)


@pytest.mark.parametrize(
    "rows", ["a.wav,0,0.5,x\na.wav,0,0.5,y\n", "a.wav,0,,x\nb.wav,0,1,z\na.wav,0.5,,y\n"]
)
def test_rows_of_a_recording_need_distinct_times(tmp_path: Path, recordings: Any, rows: str) -> None:
    for name in ("a.wav", "b.wav"):
        recordings.tone(name, 2.0)
    message = refusal(write(tmp_path / "t.csv", f"file,begin,end,text\n{rows}"))
    assert f"t.csv:1: has rows of a.wav without distinct times (line {rows.count(chr(10)) + 1})" in message
    assert "'file', 'begin', 'end', 'text'. Choose with {path: t.csv, start: COLUMN, end: COLUMN}" in message


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
            "path,text,sentence\na.wav,one,two\n",
            "t.csv:1: has 2 columns that may be its text: 'path', 'text', 'sentence'. Choose with "
            "{path: t.csv, text: COLUMN}",
        ),
        ("path,duration\na.wav,-1\n", "t.csv:2: 'duration' is -1.0, below 0. Without it"),
        ("path,duration\na.wav,nan\n", "t.csv:2: 'duration' is nan, not a finite number"),
        (
            "path,from\na.wav,en\n",
            "t.csv:2: 'start' is 'en', not a number. If its column has no times, rename",
        ),
        ("path,start,end\na.wav,-3,2\n", "t.csv:2: starts at -3 s and ends at 2 s"),
        ('path,text\na.wav,"one\n', "t.csv:2: is not a row of a table"),
        ("path,text\na.wav,\udcff\n", "t.csv:2: not UTF-8"),
        ('{"path": 5}\n', "t.csv:1: 'audio' is 5, not a string"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(content.encode(errors="surrogateescape"))
    assert words in refusal(str(path))


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


HEAD = "path\tsentence\tlocale\n"
LONG = "字" * 2**19
TABLES: dict[str, tuple[bytes, list[str]]] = {
    "short rows": (f"{HEAD}b.wav\tone\na.wav\ttwo\ten\nc.wav\n".encode(), ["one", "two", ""]),
    "a tab in a cell": (f'{HEAD}a.wav\t"one\ttwo"\ten\n'.encode(), ["one two"]),
    "a bar in a cell": (b'path|text\na.wav|"one|two"\nb.wav|"three\n', ["one|two", '"three']),
    "a line end in a cell": (f'{HEAD}a.wav\t"one\n""two"""\ten\n'.encode(), ['one "two"']),
    "an open quotation mark": (f'{HEAD}a.wav\t"one\ten\nb.wav\ttwo"\ten\n'.encode(), ['"one', 'two"']),
    "no end of a quotation": (f'{HEAD}a.wav\t"one\nb.wav\ttwo\ten\n'.encode(), ['"one', "two"]),
    "a long cell": (f"{HEAD}a.wav\t{LONG}\ten\n".encode(), [LONG]),
    "a long cell of a CSV": (f'path,text\na.wav,"{LONG}"\n'.encode(), [LONG]),
    "UTF-16": (f"{HEAD}a.wav\té one\ten\n".replace("\n", "\r\n").encode("utf-16"), ["é one"]),
    "UTF-16, big end": (b"\xfe\xff" + "path,text\na.wav,é\n".encode("utf-16-be"), ["é"]),
    "CR": (b"path,text\ra.wav,one\rb.wav,\xc3\xa9\r", ["one", "é"]),
    "classes": (b"file,class\ndataset/yes/a.wav,yes\ndataset/no/b.wav,no\n", ["yes", "no"]),
    "a class beside a text": (b"file,text,label\na.wav,one,yes\n", ["one"]),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_other_tools_are_read(tmp_path: Path, name: str) -> None:
    content, texts = TABLES[name]
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    limit = csv.field_size_limit()
    source = open_source(str(path))
    assert [text_of(cut) for cut in cuts_of(str(path))] == texts
    assert csv.field_size_limit() == limit
    fact = f"{path}: the transcripts are column 'class'. Another one is {{path: t.csv, text: COLUMN}}"
    assert list(source.warnings()) == ([fact] if name == "classes" else [])


def test_a_table_of_open_quotation_marks_is_read_in_linear_time(tmp_path: Path) -> None:
    path = write(tmp_path / "t.tsv", HEAD + 'a.wav\t"one\n' * 20_001)
    started = time.monotonic()
    assert sum(1 for _ in Table(Path(path))._rows()) == 20_001
    assert time.monotonic() - started < 20
