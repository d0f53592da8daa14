"""Each message about a source that cannot be read names a cure, and the cure works.

A row has the files of a source, a part of the message, and the cure that the message names: other content of
files (None deletes one), or another argument in place of the first one. A group of the message is a command.
"""

from __future__ import annotations

import gzip
import json
import re
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from speechtrain.commands import prepare, transcribe
from speechtrain.commands._cli import exit_code_of
from tests.support.shar import write_shar
from tests.support.tiny_run import TINY, untrained

NEMO = {"audio_filepath": "a.wav", "text": "one"}
SOURCE = {"type": "file", "channels": [0], "source": "a.wav"}
RECORDING = {"id": "a", "sources": [SOURCE], "sampling_rate": 16000, "num_samples": 16000, "duration": 1.0}
CUT = {"id": "c", "type": "MonoCut", "start": 0, "duration": 1.0, "channel": 0, "recording": RECORDING}
SUPERVISION = {"id": "s", "recording_id": "a", "start": 0, "duration": 1.0, "text": "one"}


def nemo(**keys: Any) -> str:
    return json.dumps(NEMO | keys)


def cut(**keys: Any) -> str:
    return json.dumps(CUT | keys)


def recording(**keys: Any) -> str:
    return cut(recording=RECORDING | keys)


NAMED = '{"audio_filepath": "a.wav", "text_filepath": "%s"}'
Files = Mapping[str, Any]
GOOD = {"m.json": nemo()}
GOOD_CUT = {"m.json": cut()}
KALDI = {"in/wav.scp": "a a.wav\n", "in/text": "a one\n"}
FAIRSEQ = {"m.tsv": ".\na.wav\t16000\n", "m.ltr": "o n e |\n"}
WEIGHTED = "{a: {path: m.json, weight: 3}, b: t.jsonl}"
TABLE = "path,sentence\n"

JSON_ROWS: list[tuple[Any, str, Any]] = [
    (nemo(text=5), "'text' is 5, not a string", GOOD),
    (nemo(duration="x"), "'duration' is 'x', not a number", GOOD),
    (nemo(duration=1e9), r"'duration' is 1000000000\.0, not a finite number below 1e6", GOOD),
    (nemo(duration=-1), "'duration' is -1, below 0. Without it the audio is measured", GOOD),
    (nemo(audio_filepath=["a.wav", "b.wav"]), "write its channels into one", GOOD),
    (
        NAMED % "t.md",
        r"does not end in \.txt",
        {"m.json": NAMED % "t.txt"},
    ),
    (NAMED % "no.txt", r"no\.txt cannot be read", {"no.txt": "one"}),
    ("{", "bad JSON .* Write one JSON object a line", GOOD),
    ("[", "bad JSON .* or an array", {"m.json": f"[{nemo()}]"}),
    ("[]", "the array is empty. Add an object", {"m.json": f"[{nemo()}]"}),
    ("[1]", "is a JSON int, not an object", {"m.json": f"[{nemo()}]"}),
    ("", "is empty. A manifest has at least one cut", GOOD),
    ("""{"audio_filepath": "é.wav"}""".encode("latin-1"), "Save a manifest as UTF-8", GOOD),
    ("\0words", "not a manifest. Use lhotse cuts, NeMo JSON lines", GOOD),
    ('{"x": "a.wav"}', "{path: FILE, audio: KEY} names it", "{path: m.json, audio: x}"),
    ("- id: c", r"YAML is not read. Convert it: lhotse copy m\.json", GOOD_CUT),
    (json.dumps(SUPERVISION), "Give both in this order", "r.json,m.json"),
    (json.dumps(CUT | {"id": None}), "has no 'id'", GOOD_CUT),
    (cut(type="Cut"), "A lhotse cut has one of MonoCut", GOOD_CUT),
    (cut(supervisions=5), "'supervisions' is not a list of objects", GOOD_CUT),
    (cut(supervisions=[{"text": 5}]), "'text' is 5, not a string", GOOD_CUT),
    (cut(recording=None), "has no 'recording'", GOOD_CUT),
    (recording(sampling_rate=10), "'sampling_rate' is 10, not a number from 1000", GOOD_CUT),
    (recording(sources=[]), "'sources' is not a list of 1 to", GOOD_CUT),
    (recording(sources=[5]), "'sources' is not a list of objects", GOOD_CUT),
    (recording(sources=[SOURCE | {"type": "url"}]), "Save it as files", GOOD_CUT),
    (recording(sources=[SOURCE | {"source": 5}]), "has no 'source' that is a path", GOOD_CUT),
    (json.dumps({"transcript": "one", "files": []}), "'files' is empty", GOOD),
]
TABLE_ROWS: list[tuple[str, str, Any]] = [
    (TABLE, "has a header only. Add a row for each recording", TABLE + "a.wav,one\n"),
    (
        "file,sentence\na.wav,one,two\n",
        r"Put a cell with ',' in quotation marks",
        'file,sentence\na.wav,"one,two"\n',
    ),
    ("path,path\na.wav,b.wav\n", r"Choose with {path: m\.csv, audio: COLUMN}", "path,second\na.wav,b.wav\n"),
    ("x,y\na.wav,one\n", r"Choose with {path: m\.csv, audio: COLUMN}", "{path: m.csv, audio: x, text: y}"),
    (TABLE + ",one\n", "has no recording in column 'path'", TABLE + "a.wav,one\n"),
    (TABLE + "a.wav,one\n" + TABLE, "is the header again. Delete this line", TABLE + "a.wav,one\n"),
    ("path|text|lang\na.wav|one|two|en\n", "has 4 cells", 'path|text|lang\na.wav|"one|two"|en\n'),
    ("path;text;end\na.wav;one;0,5\n", r"not a number\. Write 0\.5", "path;text;end\na.wav;one;0.5\n"),
    ("file,label,word\na.wav,1,one\n", "2 columns that may be its text", "file,id,word\na.wav,1,one\n"),
    (TABLE + 'a.wav,"one"two\n', "write those within a cell twice", TABLE + 'a.wav,"one""two"\n'),
    (TABLE + 'a.wav,"one\n', "Close its quotation marks", TABLE + "a.wav,one\n"),
    (
        "path,start,end\na.wav,0.5,0.1\n",
        r"starts at 0\.5 s and ends at 0\.1 s",
        "path,start,end\na.wav,0.1,0.5\n",
    ),
    (
        "file,von,bis,text\na.wav,0,0.5,one\na.wav,0.5,1,two\n",
        r"rows of a\.wav without distinct times \(line 3\)\. .*tmin.*: 'file', 'von', 'bis', 'text'\.",
        "{path: m.csv, start: von, end: bis}",
    ),
    (
        "file,text\na.wav,one\na.wav,two\n",
        "Names of times: start, .* begin",
        "file,Begin Time,end,text\na.wav,0,0.5,one\na.wav,0.5,1,two\n",
    ),
    (
        "file,from,until,text\na.wav,0,one,one\na.wav,0.5,two,two\n",
        r"Choose with {path: m\.csv, start: COLUMN, end: COLUMN}",
        "file,from,to,text\na.wav,0,0.5,one\na.wav,0.5,1,two\n",
    ),
]
OTHER_FORMATS = [
    ("0.5\t1.25\tone\n", "an Audacity label track"),
    ("0,5\t1,25\t\n1,5\t2,25\tone\n", "an Audacity label track"),
    ("1\n00:00:00,500 --> 00:00:01,250\none\n", "captions"),
    ("\ufeffWEBVTT\n\n00:00.500 --> 00:01.250\none\n", "captions"),
    ('<?xml version="1.0"?>\n<ANNOTATION_DOCUMENT AUTHOR="">\n', "XML"),
    ('\n<ANNOTATION_DOCUMENT AUTHOR="">\n', "XML"),
    ('File type = "ooTextFile"\nObject class = "TextGrid"\n', "a Praat TextGrid"),
]
FOLDER_ROWS: list[tuple[Files, str, Any]] = [
    ({"in/readme": "x"}, "contains no recordings", {"in/a.wav": ...}),
    ({"in/a.wav": ..., "in/a.txt": b"\xff"}, "cannot be read as UTF-8", {"in/a.txt": "one"}),
    *(
        (
            {"in/a.wav": ..., "in/a.txt": text},
            rf"in/a\.txt is {name}, no .* Write the words only",
            {"in/a.txt": "one"},
        )
        for text, name in OTHER_FORMATS
    ),
    *(
        (
            {"in": text, "t.csv": "file,start,end,text\na.wav,0,0.5,one\n"},
            rf"in: annotations \({name}\) are not read: give a table with the columns file, start, end",
            "t.csv",
        )
        for text, name in OTHER_FORMATS
    ),
    (
        {**KALDI, "in/wav.scp": "a cat a.wav |\n"},
        "name a file, such as the one that the command reads",
        KALDI,
    ),
    ({**KALDI, "in/text": gzip.compress(b"a one\n")}, "which Kaldi does not read: unpack it", KALDI),
    ({**KALDI, "in/wav.scp": ""}, "is empty. It needs a line for each utterance", KALDI),
    (
        {**KALDI, "in/segments": "a-1 b 0 1\n"},
        "UTTERANCE RECORDING START END",
        {"in/segments": "a-1 a 0 1\n"},
    ),
    ({**FAIRSEQ, "m.tsv": "a.wav\t16000\n"}, "The first line must be the root folder", FAIRSEQ),
    ({**FAIRSEQ, "m.tsv": "no\na.wav\t16000\n"}, "no does not exist. Correct it", FAIRSEQ),
    ({"m.tsv": ".\n"}, "lists no recordings. Add a line 'path<TAB>frames'", FAIRSEQ),
    ({**FAIRSEQ, "m.tsv": ".\na.wav\tx\n"}, "'x' is not a number of frames", FAIRSEQ),
    ({**FAIRSEQ, "m.ltr": "o |\nn |\n"}, "or remove the file to use no transcripts", {"m.ltr": None}),
    ({}, "in does not exist. Give a manifest or a folder of recordings", {"in/a.wav": ...}),
]
SPEC_ROWS: list[tuple[str, Files, str, Any]] = [
    ("{path: in, audio: x}", {"in/a.wav": ...}, "in has no table, so it has no column 'x'", "in"),
    ("{path: m.json", GOOD, "is not a mapping. Write it as {path: FILE, text: COLUMN}", "{path: m.json}"),
    ("{path: m.json, txt: x}", GOOD, "'txt' is not a key of a source; did you mean 'text'", "{path: m.json}"),
    (
        "{path: m.json, text: 5}",
        {"m.json": '{"x": "one", "audio": "a.wav"}'},
        "text is '5', not a string",
        "{path: m.json, text: x}",
    ),
    ("{text: x}", GOOD, "a source needs its path, as in {path: FILE, text: COLUMN}", "{path: m.json}"),
    ("{path: m.json, weight: 3}", GOOD, "data.train={a: {path: FILE, weight: 3}, b: FILE}", WEIGHTED),
    ("{a: {path: m.json, weight: x}, b: in}", GOOD, "It must be a number above 0", WEIGHTED),
    ("{path: m.json, normaliser: lowr}", GOOD, "did you mean 'lower'", "{path: m.json, normaliser: lower}"),
    (
        "{path: m.csv, text: said}",
        {"m.csv": TABLE + "a.wav,one\n"},
        "has no column 'said': 'path', 'sentence'",
        "{path: m.csv, text: sentence}",
    ),
    ("m.json,m.json", GOOD, "is given twice. Remove one", "m.json"),
    (",", GOOD, "no manifest is given. Set a file, a folder", "m.json"),
    *(
        (
            f"a{suffix}",
            {f"a{suffix}": "a 1 s 0.0 0.5 <o,f0> one\n", "t.csv": "file,start,end,text\na.wav,0,0.5,one\n"},
            rf"annotations \({name}\) are not read: give a table with the columns file, start, end and text",
            "t.csv",
        )
        for suffix, name in {".stm": "NIST", ".ctm": "NIST", ".eaf": "ELAN", ".TextGrid": "Praat"}.items()
    ),
    (
        "in",
        {"out/a.txt": "one", "in/a.wav": ..., "in/a.txt": Path("../out/a.txt")},
        "run (cp -rL .* COPY)",
        "COPY",
    ),
    (
        "in",
        {"in/x/metadata.csv": TABLE + "../../a.wav,one\n", "in/y/metadata.csv": TABLE + "../../b.wav,two\n"},
        "in several folders. Give",
        "in/x,in/y",
    ),
]
ROWS = [
    *(("m.json", {"m.json": content}, message, cure) for content, message, cure in JSON_ROWS),
    *(
        ("m.csv", {"m.csv": content}, message, {"m.csv": cure} if "\n" in cure else cure)
        for content, message, cure in TABLE_ROWS
    ),
    *(("m.tsv" if "m.tsv" in files else "in", files, message, cure) for files, message, cure in FOLDER_ROWS),
    *SPEC_ROWS,
]


def write(files: Files) -> None:
    for name, content in files.items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.unlink()
        elif isinstance(content, Path):
            path.symlink_to(content)
        elif content is ...:
            noise = 0.1 * np.random.default_rng(len(name)).standard_normal(16000)
            soundfile.write(path, noise, 16000)
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.mark.parametrize(("argument", "files", "message", "cure"), ROWS, ids=[row[2][:40] for row in ROWS])
def test_the_cure_of_a_message_works(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argument: str,
    files: Files,
    message: str,
    cure: Files | str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write(
        {
            "a.wav": ...,
            "b.wav": ...,
            "t.txt": "one",
            "t.jsonl": nemo(),
            "r.json": json.dumps(RECORDING),
            **files,
        }
    )
    assert exit_code_of(lambda: prepare.run(["stats", argument])) in (2, 3)
    *_, line = capsys.readouterr().err.splitlines()  # Warnings may be before it.
    found = re.search(message, line)
    assert found, line
    if found.groups():  # a command
        subprocess.run(shlex.split(found[1]), check=True)
    if isinstance(cure, str):
        argument = cure
    else:
        write(cure)
    assert exit_code_of(lambda: prepare.run(["stats", argument])) == 0, capsys.readouterr().err


def test_the_cures_of_messages_of_a_shar_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shar = write_shar(tmp_path, 2)
    monkeypatch.chdir(tmp_path)
    subprocess.run(["gzip", shar / "recording.000000.tar"], check=True)
    assert exit_code_of(lambda: prepare.run(["stats", "shar"])) == 3
    command = capsys.readouterr().err.rpartition(". Run ")[2]
    subprocess.run(shlex.split(command), check=True)
    assert exit_code_of(lambda: prepare.run(["stats", "shar"])) == 0
    Path("tars").mkdir()
    (shar / "recording.000000.tar").rename("tars/recording.000000.tar")
    assert exit_code_of(lambda: prepare.run(["stats", "shar"])) == 3
    assert "{path: …, audio: FOLDER} names their folder" in capsys.readouterr().err
    assert exit_code_of(lambda: prepare.run(["stats", "{path: shar, audio: ../tars}"])) == 0


TRANSCRIBE_ROWS: list[tuple[list[str], str, list[str]]] = [
    (["decoder=greedy"], "name one or more recordings", ["a.wav", "decoder=greedy"]),
    (["no.wav"], "no.wav: the file does not exist", ["a.wav"]),
    (["empty"], r"empty contains no recordings", ["in"]),
    (["a.wav", "--batch", "0"], "--batch 0: it must be at least 1", ["a.wav", "--batch", "1"]),
    (
        ["a.wav", "b.wav", "--format", "srt"],
        "there are 2 recordings. Name a folder for them by --out DIR",
        ["a.wav", "b.wav", "--format", "srt", "--out", "DIR"],
    ),
    (
        ["a.wav", "decoder=beam", "decoder.hotwords=[one,Q9]"],
        "'Q9' .* Remove them",
        ["a.wav", "decoder=beam", "decoder.hotwords=[one]"],
    ),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return untrained(tmp_path_factory.mktemp("runs") / "run", *TINY)


@pytest.mark.parametrize(("arguments", "message", "cured"), TRANSCRIBE_ROWS)
def test_the_cure_of_a_message_of_transcribe_works(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
    cured: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write({"a.wav": ..., "b.wav": ..., "a.srt": "", "in/a.wav": ..., "empty/x": "", **GOOD})
    assert exit_code_of(lambda: transcribe.run([str(run), *arguments])) in (2, 3)
    *_, line = capsys.readouterr().err.splitlines()  # Warnings may be before it.
    assert re.search(message, line), line
    assert exit_code_of(lambda: transcribe.run([str(run), *cured])) == 0, capsys.readouterr().err
