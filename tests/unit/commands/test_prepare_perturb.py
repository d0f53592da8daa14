"""speechtrain prepare perturb: copies of recordings at other speeds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile

from speechtrain.commands import prepare
from speechtrain.data.speed import change_speed
from speechtrain.errors import ConfigError
from tests.support.recordings import json_lines, write_tone

ARGUMENTS = ["perturb", "data", "--out", "out", "--speeds", "0.9,1.25"]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_tone(Path("data/a.wav"), 0.5, 44_100, channels=2).with_suffix(".txt").write_text("one")
    write_tone(Path("data/b.wav"), 1.0).with_suffix(".txt").write_text("two")


def copies() -> dict[str, Path]:
    """The audio file of each cut in the manifest by its id."""
    files = {}
    for cut in json_lines(Path("out/cuts.jsonl")):
        (source,) = cut["recording"]["sources"]
        files[cut["id"]] = Path(source["source"])
    return files


def test_each_recording_has_a_copy_at_each_speed() -> None:
    assert prepare.run(ARGUMENTS) == 0
    facts = []
    for cut in json_lines(Path("out/cuts.jsonl")):
        (supervision,) = cut["supervisions"]
        facts.append((cut["id"], cut["duration"] * 16_000, supervision["text"]))
    assert facts == [
        ("data/a_sp0.9", 8_889, "one"),
        ("data/b_sp0.9", 17_778, "two"),
        ("data/a_sp1.25", 6_400, "one"),
        ("data/b_sp1.25", 12_800, "two"),
    ]
    assert prepare.run(["manifest", "data", "out/cuts.jsonl", "--out", "all.jsonl", "--check"]) == 0
    assert len(json_lines(Path("all.jsonl"))) == 6


@pytest.mark.parametrize(("speed", "percent"), [("0.9", 90), ("1.25", 125)])
def test_the_samples_are_those_of_training_at_this_speed(speed: str, percent: int) -> None:
    original, _ = soundfile.read("data/b.wav", dtype="float32")
    assert prepare.run(ARGUMENTS) == 0
    samples, rate = soundfile.read(copies()[f"data/b_sp{speed}"], dtype="int16")
    expected = np.rint(change_speed(original, percent, 16_000) * 32768)
    assert rate == 16_000
    assert np.array_equal(samples, expected)


def test_a_second_run_writes_only_what_is_missing() -> None:
    assert prepare.run(ARGUMENTS) == 0
    manifest = Path("out/cuts.jsonl").read_text()
    times = {name: path.stat().st_mtime_ns for name, path in copies().items()}
    copies()["data/b_sp0.9"].unlink()
    assert prepare.run(ARGUMENTS) == 0
    assert Path("out/cuts.jsonl").read_text() == manifest
    changes = {name for name, path in copies().items() if path.stat().st_mtime_ns != times[name]}
    assert changes == {"data/b_sp0.9"}


@pytest.mark.parametrize("speeds", ["", "1", "0.9,1", "0.9,0.90", "0.905", "0.4", "2.01", "inf", "-0.9", "x"])
def test_another_speed_is_refused(speeds: str) -> None:
    with pytest.raises(ConfigError, match=r"^--speeds .*: give different factors from 0\.5 to 2"):
        prepare.run([*ARGUMENTS[:-2], f"--speeds={speeds}"])
    assert not Path("out").exists()
