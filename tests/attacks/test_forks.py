"""The runner itself: what it must see, it sees."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ..support.digits import write_sample
from .forks import Ended, Forks, faults, raw_escapes


@pytest.mark.ci_share
def test_a_command_ends_as_it_would_in_a_shell(forks: Forks, good: Path, tmp_path: Path) -> None:
    wav = tmp_path / "s.wav"
    write_sample(wav)
    ended = forks.run("transcribe", good, "s.wav", cwd=tmp_path)
    assert faults(ended, refuses=False) == []
    assert ended.out.startswith("s.wav\t")
    assert faults(forks.run("transcribe", good, tmp_path / "none.wav"), refuses=True) == []


def test_a_command_above_its_limit_is_killed_and_told(forks: Forks, good: Path, tmp_path: Path) -> None:
    ended = forks.run("evaluate", good, seconds=0)
    assert ended.limit == "time"
    assert faults(ended)


@pytest.mark.ci_share
def test_what_harms_is_a_fault(tmp_path: Path) -> None:
    held = Ended(2, "", [], 0, "", "speechtrain: error: no\n")
    assert faults(held, refuses=True, canaries=[tmp_path / "none"]) == []
    os.symlink("nowhere", tmp_path / "canary")
    assert faults(held, canaries=[tmp_path / "canary"])
    assert faults(held, refuses=False)
    assert faults(held, private=["error: no"])
    for code, err in (
        (0, "\x1b[2J"),
        (1, "speechtrain: internal error: x"),
        (2, ""),
        (-9, ""),
        (2, held.err * 2),
    ):
        assert faults(Ended(code, "", [], 0, "", err)), err
    assert raw_escapes("a\tb\n\u202e\udcff\x9b") == r"\u202e\udcff\x9b"
