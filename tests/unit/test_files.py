"""Files that are written whole or not at all."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from speechtrain.files import atomic, small_yaml, write_json


def test_a_reader_sees_the_old_file_until_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.txt"
    with atomic(path) as temporary:
        temporary.write_text("old")
        assert temporary.parent == path.parent
        assert temporary.name.startswith(".")
        assert not path.exists()
    with atomic(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert [entry.name for entry in path.parent.iterdir()] == ["file.txt"]


@pytest.mark.parametrize("error", [OSError("the disk is full"), ValueError("ours"), KeyboardInterrupt()])
def test_an_error_leaves_the_old_file_and_no_temporary(error: BaseException, tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")

    def write() -> None:
        with atomic(path) as temporary:
            temporary.write_text("ne")
            raise error

    with pytest.raises(type(error)):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_name_that_cannot_be_taken_leaves_no_temporary(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_json(tmp_path / "folder", {})
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]


def test_two_writers_of_one_file_have_a_temporary_each(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    with atomic(path) as first, atomic(path) as second:
        first.write_text("first")
        second.write_text("second")
    assert path.read_text() == "first"  # its block ends last


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_the_mode_is_that_of_an_ordinary_open(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write_json(tmp_path / "file.json", {"a": 1})
    finally:
        os.umask(before)
    assert (tmp_path / "file.json").stat().st_mode & 0o777 == mode
    assert json.loads((tmp_path / "file.json").read_text()) == {"a": 1}


def test_json_is_valid_where_a_figure_is_not_finite(tmp_path: Path) -> None:
    write_json(tmp_path / "file.json", {"dev": {"wer": float("inf"), "loss": float("nan"), "cer": 0.5}})
    found = json.loads((tmp_path / "file.json").read_text(), parse_constant=pytest.fail)
    assert found == {"dev": {"wer": None, "loss": None, "cer": 0.5}}


@pytest.mark.parametrize("durable", [True, False])
def test_bytes_reach_the_disk_before_the_name(
    durable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda handle: flushed.append((tmp_path / "file.json").exists()))
    write_json(tmp_path / "file.json", {}, durable)
    assert flushed == ([False] if durable else [])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: &x [1]\nb: *x", r"the alias \*x\. Write the value in its place"),
        ("[" * 51 + "]" * 51, "more than 50 levels"),
        ("[" + "0," * 50_001 + "]", "more than 50000 nodes"),
        ("a: " + "${b}" * 20_000, "more than 50000 nodes"),
        ("a: " + "1" * 1001, "more than 1000 digits"),
        ("a" * (2**20 + 1), "the most are 1048576"),
    ],
)
def test_small_yaml_refuses_what_a_parser_would_expand(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        small_yaml(text)


def test_atomic_private_is_for_the_owner_from_its_first_byte(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with atomic(tmp_path / "a", private=True) as temporary:
            assert stat.S_IMODE(temporary.stat().st_mode) == 0o600
        with atomic(tmp_path / "b") as temporary:
            assert stat.S_IMODE(temporary.stat().st_mode) == 0o644
    finally:
        os.umask(before)
