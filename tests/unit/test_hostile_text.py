"""What a stranger's names, numbers and nesting do to lines on a terminal and to readers of small files."""

from __future__ import annotations

import io
import json
import os
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from speechtrain.launchers.mpi import Mpi
from speechtrain.launchers.ssh import Ssh

from speechtrain.commands import prepare, report
from speechtrain.commands._cli import console, exit_code_of
from speechtrain.errors import (
    FORMAT_CHARACTERS,
    ConfigError,
    DataError,
    MachineError,
    escape_controls,
    escape_output,
    one_line,
)
from speechtrain.files import json_lines, json_text, read_json
from speechtrain.launcher import Job, World
from speechtrain.report.chart import Chart, Line
from speechtrain.report.run import Curve
from speechtrain.text.normalise import normaliser

ROOT = Path(__file__).resolve().parents[2]
DEEP = "[" * 100_000 + "]" * 100_000
EVIL = "a\x1b]0;title\x07\x1b[2J\u202e\u2028\x9b\udcff\u200b.wav"


@pytest.mark.parametrize("category", ["Cc", "Cf", "Cs", "Zl", "Zp"])
def test_no_character_of_a_category_that_drives_a_terminal_is_printed(category: str) -> None:
    of_it = [chr(i) for i in range(0x110000) if unicodedata.category(chr(i)) == category]
    for shown in (escape_controls("".join(of_it)), one_line(".".join(of_it))):
        assert not [c for c in shown if unicodedata.category(c) == category]
    assert escape_controls(of_it[0]) == ascii(of_it[0])[1:-1]


def test_letters_of_every_script_stay_and_transcripts_keep_their_joiners() -> None:
    persian, hindi, polish = "می\u200cخواهم", "क\u094d\u200dष", "jeść łąkę"
    assert all(
        escape_controls(text, FORMAT_CHARACTERS) == text
        for text in (persian, hindi, polish, "日本語", "שלום\u200f")
    )
    assert escape_controls(persian) == "می\\u200cخواهم"
    assert escape_controls("a\u202eb", FORMAT_CHARACTERS) == "a\\u202eb"


def test_json_for_a_terminal_has_no_raw_escapes_and_is_the_same_content() -> None:
    for content in ({"a": EVIL}, {"text": "می\u200cخواهم"}):
        assert json.loads(json_text(content)) == content
        assert escape_controls(json_text(content), FORMAT_CHARACTERS) == json_text(content)
    assert json_text({"text": "jeść"}) == '{"text": "jeść"}'


def printed(*texts: str) -> str:
    """Return the output of a command that prints these texts."""
    stream = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)

        def run(_: list[str]) -> int:
            for text in texts:
                sys.stdout.write(text)
            print(EVIL, file=sys.stderr)
            return 0

        with pytest.raises(SystemExit):
            console(run)()
    return stream.getvalue()


def test_a_command_escapes_what_any_library_prints() -> None:
    assert printed(f"a: {EVIL}\n\tb\n") == f"a: {escape_controls(EVIL)}\n\tb\n{escape_controls(EVIL)}\n"


def test_joiners_and_the_moves_of_a_progress_bar_are_written() -> None:
    texts = ["می\u200cخواهم\n", "\r 10 %", "\x1b[A"]
    assert printed(*texts).startswith("".join(texts))
    assert printed("a\rb\x1b[A").startswith(r"a\rb\x1b[A")


def test_rich_writes_its_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    escape_output()
    escape_output()
    Console(force_terminal=True).print("[red]a")
    assert "\x1b[31ma" in stream.getvalue()


@pytest.mark.parametrize(
    ("name", "mark"), [("unicode", "\u0301"), ("english", "\u0301"), ("switchboard+unicode", ".\u0301")]
)
def test_a_transcript_of_more_than_30_combining_marks_is_refused(name: str, mark: str) -> None:
    normalise = normaliser(name)
    marks = "\u0301\u0316" * 15
    assert normalise(f"one a{marks} b{marks}")
    with pytest.raises(DataError, match=r"'one a.*more than 30 combining marks"):
        normalise(f"one a{marks}{mark}")


def test_an_error_line_with_a_name_in_it_is_printable(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise DataError(f"{EVIL} does not exist")

    assert exit_code_of(fail) == 3
    line = capsys.readouterr().err
    assert escape_controls(line.rstrip("\n")) == line.rstrip("\n")
    assert r"\x1b]0;title" in line


def test_report_prints_its_path_printable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "esc\x1b]0;x\x07"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"event": "start", "step": 0}\n')
    assert report.run([str(run)]) == 0
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize("text", [DEEP, "9" * 5_000, '{"a": ' + "9" * 5_000 + "}", "\udcff", "{", '"a"'])
def test_a_foreign_json_file_that_cannot_be_read_is_empty(tmp_path: Path, text: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(text, errors="surrogateescape")
    assert read_json(path) == {}
    assert list(json_lines([text, '{"a": 1}'])) == [{"a": 1}]


@pytest.mark.parametrize("rank", ["²", "٣", "9" * 5_000, "-1", "1 ", ""])
def test_a_rank_that_is_no_number_is_one_line(rank: str) -> None:
    with pytest.raises(MachineError, match="RANK"):
        World.from_environment({"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"})


@pytest.mark.parametrize("content", [b"a\0b\n", b"\xff\xfe\n", b"a" * 10**6, b"a\x1b[2J\n"])
def test_a_hostfile_of_anything_is_one_line(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "hosts"
    file.write_bytes(content)
    job = Job(tmp_path / "config.yaml", tmp_path, world_size=1)
    with pytest.raises(ConfigError) as caught:
        Ssh(str(file)).render(job)
    assert len(one_line(str(caught.value))) < 1_000
    if b"\xff" in content:
        with pytest.raises(ConfigError, match="utf-8"):
            Mpi(hostfile=str(file))._hosts()


@pytest.mark.parametrize("values", [[1e308, -1e308], [5e-324, 1e308], [5e-324, 5e-324], [-1e308, 5e-324]])
def test_a_chart_of_any_numbers_is_drawn(values: list[float]) -> None:
    curve = Curve([1.0, 1e308], list(values))
    assert "<svg" in Chart("loss", [Line("a", curve)], maybe_log=True, last_step=1e308).svg


# --- names that are no UTF-8 ----------------------------------------------------------------------


def test_a_folder_with_one_name_that_is_no_utf_8_is_prepared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import numpy as np
    import soundfile

    corpus = tmp_path / "corpus"
    corpus.mkdir()
    soundfile.write(corpus / "a.wav", np.zeros(16_000, np.float32), 16_000)
    os.link(corpus / "a.wav", os.fsencode(corpus) + b"/\xff\xfe\x1b[31m.wav")
    out = tmp_path / "out.jsonl"
    assert prepare.run(["manifest", str(corpus), "--check", "--jobs", "1", "--out", str(out)]) == 0
    cuts: list[dict[str, Any]] = [json.loads(line) for line in out.read_text().splitlines()]
    assert [cut["id"] for cut in cuts] == ["corpus/a", "corpus/\udcff\udcfe\x1b[31m"]
    assert "\x1b" not in capsys.readouterr().out


def test_a_bad_recording_is_listed_printable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "b\x1b[31m\u202e.wav").write_text("rubbish")
    assert prepare.run(["manifest", str(corpus), "--check", "--out", str(tmp_path / "o.jsonl")]) == 3
    out = capsys.readouterr().out
    assert r"bad: corpus/b\x1b[31m\u202e" in out
    assert not {"\x1b", "\u202e"} & set(out)
