"""What is printed: no character that a terminal obeys, in messages and in what libraries write."""

from __future__ import annotations

import io
import json
import sys
import unicodedata

import pytest
from rich.console import Console

from speechtrain.commands._cli import console
from speechtrain.errors import FORMAT_CHARACTERS, escape_controls, escape_output, one_line
from speechtrain.files import json_text

EVIL = "a\x1b]0;title\x07\x1b[2J\u202e\u2028\x9b\udcff\u200b.wav"


@pytest.mark.parametrize("category", ["Cc", "Cf", "Cs", "Zl", "Zp"])
def test_escape_controls_escapes_a_whole_category(category: str) -> None:
    of_it = [chr(i) for i in range(0x110000) if unicodedata.category(chr(i)) == category]
    for shown in (escape_controls("".join(of_it)), one_line(".".join(of_it))):
        assert not [c for c in shown if unicodedata.category(c) == category]
    assert escape_controls(of_it[0]) == ascii(of_it[0])[1:-1]


def test_escape_controls_keeps_letters_of_every_script() -> None:
    persian, hindi, polish = "می\u200cخواهم", "क\u094d\u200dष", "jeść łąkę"
    assert all(
        escape_controls(text, FORMAT_CHARACTERS) == text
        for text in (persian, hindi, polish, "日本語", "שלום\u200f")
    )
    assert escape_controls(persian) == "می\\u200cخواهم"
    assert escape_controls("a\u202eb", FORMAT_CHARACTERS) == "a\\u202eb"


def test_json_text_has_no_raw_escapes_and_the_same_content() -> None:
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
