"""A group of trackers never raises, says once what failed, and goes on."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from speechtrain.run_directory import read_metrics
from speechtrain.tracking.base import Tracker
from speechtrain.tracking.group import Trackers
from speechtrain.tracking.jsonl import Jsonl


class Recorder(Tracker):
    """Keeps what it is told, and fails at the events that ``failures`` names."""

    def __init__(self, failures: dict[int, Exception] | None = None, enabled: bool = True) -> None:
        self.failures = failures or {}
        self.enabled = enabled
        self.told: list[int] = []
        self.closed = 0

    def log(self, event: str, values: Mapping[str, Any]) -> None:
        if values["step"] in self.failures:
            raise self.failures[values["step"]]
        self.told.append(values["step"])

    def close(self) -> None:
        self.closed += 1
        if -1 in self.failures:
            raise self.failures[-1]


def _run(group: Trackers, steps: int = 4) -> None:
    for step in range(1, steps + 1):
        group.log("train", {"step": step})
    group.close()


def test_every_member_is_told_and_closed() -> None:
    first, second = Recorder(), Recorder()
    _run(Trackers({"first": first, "second": second, "absent": None}))
    assert first.told == second.told == [1, 2, 3, 4]
    assert first.closed == second.closed == 1


def test_members_of_one_class_are_all_kept() -> None:
    members = [Recorder(), Recorder()]
    _run(Trackers(members))
    assert [m.told for m in members] == [[1, 2, 3, 4]] * 2


def test_a_member_that_is_not_enabled_is_not_touched() -> None:
    member = Recorder(enabled=False)
    _run(Trackers([member]))
    assert (member.told, member.closed) == ([], 0)


def test_no_members_do_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    _run(Trackers([]))
    _run(Trackers())
    assert capsys.readouterr() == ("", "")


def test_a_full_disk_is_reported_once_and_tried_again(capsys: pytest.CaptureFixture[str]) -> None:
    full = OSError(28, "No space left on device")
    sick, well = Recorder({2: full, 3: full}), Recorder()
    _run(Trackers({"sick": sick, "well": well}))
    assert (sick.told, well.told) == ([1, 4], [1, 2, 3, 4])
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "speechtrain: warning: tracker sick failed (OSError: [Errno 28] No space left on device); "
        "training continues, the tracker tries again at each event",
        "speechtrain: warning: tracker sick missed 2 events",
    ]


def test_a_defect_leaves_the_member_out(capsys: pytest.CaptureFixture[str]) -> None:
    sick, well = Recorder({2: ZeroDivisionError("two\nlines")}), Recorder()
    _run(Trackers({"sick": sick, "well": well}))
    assert (sick.told, well.told) == ([1], [1, 2, 3, 4])
    assert sick.closed == 1
    assert capsys.readouterr().err.splitlines() == [
        "speechtrain: warning: tracker sick failed (ZeroDivisionError: two lines); "
        "training continues, the tracker is off from now on",
        "speechtrain: warning: tracker sick missed 3 events",
    ]


def test_a_failing_close_is_reported_and_the_others_are_closed(capsys: pytest.CaptureFixture[str]) -> None:
    sick, well = Recorder({-1: OSError("gone")}), Recorder()
    _run(Trackers({"sick": sick, "well": well}))
    assert well.closed == 1
    assert "tracker sick failed (OSError: gone); training continues, its last" in capsys.readouterr().err


def test_an_interrupt_is_not_a_failure_of_a_tracker() -> None:
    class Interrupted(Recorder):
        def log(self, event: str, values: Mapping[str, Any]) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Trackers([Interrupted()]).log("train", {"step": 1})


def test_warnings_reach_stderr_where_no_member_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    Trackers([Recorder()]).log("warning", {"step": 1, "message": "slow\ndisk"})
    assert capsys.readouterr().err == "speechtrain: warning: slow disk\n"
    shown = Recorder()
    shown.visible = True
    Trackers([shown]).log("warning", {"step": 1, "message": "slow disk"})
    assert capsys.readouterr().err == ""


def test_a_real_record_survives_a_disk_without_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    group = Trackers({"jsonl": Jsonl(str(tmp_path))})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        group.log("train", {"step": 1})
        group.log("train", {"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    group.log("train", {"step": 3})
    group.close()
    assert [e["step"] for e in read_metrics(path.parent).rows] == [3]
    err = capsys.readouterr().err
    assert err.count("File too large") == 1
    assert "missed 2 events" in err
