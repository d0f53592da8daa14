"""What a stranger's names, numbers and nesting do to lines on a terminal and to readers of small files."""

from __future__ import annotations

import ast
import json
import os
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from speechtrain.launchers.mpi import Mpi
from speechtrain.launchers.ssh import Ssh

from speechtrain.commands import prepare, report
from speechtrain.commands._cli import guarded, json_text
from speechtrain.errors import SPELLING, ConfigError, DataError, MachineError, one_line, printable
from speechtrain.files import json_lines, read_json
from speechtrain.launcher import Job, World
from speechtrain.report.chart import Chart, Line
from speechtrain.report.run import Curve

ROOT = Path(__file__).resolve().parents[2]
DEEP = "[" * 100_000 + "]" * 100_000
EVIL = "a\x1b]0;title\x07\x1b[2J\u202e\u2028\x9b\udcff\u200b.wav"


@pytest.mark.parametrize("category", ["Cc", "Cf", "Cs", "Zl", "Zp"])
def test_no_character_of_a_category_that_drives_a_terminal_is_printed(category: str) -> None:
    of_it = [chr(i) for i in range(0x110000) if unicodedata.category(chr(i)) == category]
    for shown in (printable("".join(of_it)), one_line(".".join(of_it))):
        assert not [c for c in shown if unicodedata.category(c) == category]
    assert printable(of_it[0]) == ascii(of_it[0])[1:-1]


def test_letters_of_every_script_stay_and_transcripts_keep_their_joiners() -> None:
    persian, hindi, polish = "می\u200cخواهم", "क\u094d\u200dष", "jeść łąkę"
    assert all(printable(text, SPELLING) == text for text in (persian, hindi, polish, "日本語", "שלום\u200f"))
    assert printable(persian) == "می\\u200cخواهم"
    assert printable("a\u202eb", SPELLING) == "a\\u202eb"


def test_json_for_a_terminal_has_no_raw_escapes_and_is_the_same_content() -> None:
    for content in ({"a": EVIL}, {"text": "می\u200cخواهم"}):
        assert json.loads(json_text(content)) == content
        assert printable(json_text(content), SPELLING) == json_text(content)
    assert json_text({"text": "jeść"}) == '{"text": "jeść"}'


def prints_of(path: Path) -> list[str]:
    """The calls of ``print`` with an f-string that nothing has made printable."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            shown = node.args[0] if node.args else None
            if isinstance(shown, ast.JoinedStr):
                found.append(f"{path.name}: {ast.unparse(shown)}")
    return found


NUMBERS_ONLY = {
    "prepare.py: f'{unspelt} transcripts have symbols outside the coverage; training skips them'",
    "prepare.py: f'held out: {len(np.unique(groups[by][held]))} of {len(np.unique(groups[by]))} {by}s'",
    "prepare.py: f'{totals.bad.total()} of {len(names)} recordings are bad and are in neither file'",
    "export.py: f\"checked against Hugging Face's model on the same audio: largest difference "
    '{max(known):.1e}"',
    "train.py: f'speechtrain {__version__}'",
    "doctor.py: f'{state}  {finding.what:<13} {printable(finding.found)}'",
    "_cli.py: f'speechtrain: warning: stdout: {cause}; {line}'",
    "_cli.py: f'speechtrain: {one_line(str(note))}'",
    "_cli.py: f'speechtrain: error: {one_line(str(error))}'",
    "_cli.py: f'speechtrain: error: stdout: {cause}'",
    "_cli.py: f'speechtrain: internal error: {told} (trace in {path})'",
    "transcribe.py: f'speechtrain: error: {one_line(str(one))}'",
    "_start_run.py: f'no report: {type(error).__name__}: {errors.one_line(str(error))}'",
    "_start_jobs.py: f'speechtrain: error: {line}'",
}
"""Lines without a name in them, and those whose names are printable already."""


def test_every_printed_line_with_a_name_in_it_is_made_printable() -> None:
    sources = [*(ROOT / "speechtrain").rglob("*.py"), *(ROOT / "launchers").rglob("*.py")]
    assert {line for path in sources for line in prints_of(path)} <= NUMBERS_ONLY


def test_an_error_line_with_a_name_in_it_is_printable(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise DataError(f"{EVIL} does not exist")

    assert guarded(fail) == 3
    line = capsys.readouterr().err
    assert printable(line.rstrip("\n")) == line.rstrip("\n")
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
    assert "<svg" in Chart("loss", [Line("a", curve)], maybe_log=True, last=1e308).svg


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
