"""A group of trackers never raises or waits, reports the first failure of each, and counts lost records."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from speechtrain.tracking import group as tracking_group
from speechtrain.tracking.base import Tracker
from speechtrain.tracking.group import Trackers, is_hanging


class Recorder(Tracker):
    """Keeps the steps of its events, and fails at those that ``failures`` names (-1: at the end)."""

    def __init__(
        self,
        failures: dict[int, BaseException] | None = None,
        enabled: bool = True,
        background: bool = False,
    ) -> None:
        self.failures = failures or {}
        self.enabled = enabled
        self.background = background
        self.steps: list[int] = []
        self.ends: list[Mapping[str, Any]] = []
        self.threads: set[str] = set()
        self.closed = 0

    def log(self, event: str, values: Mapping[str, Any]) -> None:
        self.threads.add(threading.current_thread().name)
        if event == "end":
            self.ends.append(values)
        elif values["step"] in self.failures:
            raise self.failures[values["step"]]
        else:
            self.steps.append(values["step"])

    def close(self) -> None:
        self.closed += 1
        if -1 in self.failures:
            raise self.failures[-1]


class Blocked(Recorder):
    """Waits in its first event until ``gate`` is set."""

    def __init__(self) -> None:
        super().__init__(background=True)
        self.gate = threading.Event()
        self.is_reached = threading.Event()

    def log(self, event: str, values: Mapping[str, Any]) -> None:
        self.is_reached.set()
        self.gate.wait()
        super().log(event, values)


def _run(group: Trackers, steps: int = 4) -> None:
    for step in range(1, steps + 1):
        group.log("train", {"step": step})
    group.log("end", {"status": "finished"})
    group.close()


BOTH = pytest.mark.parametrize("background", [False, True])


@BOTH
def test_every_member_gets_every_event_and_is_closed(background: bool) -> None:
    first, second = Recorder(background=background), Recorder(background=background)
    _run(Trackers({"first": first, "second": second, "absent": None}))
    assert first.steps == second.steps == [1, 2, 3, 4]
    assert first.ends[0]["status"] == "finished"
    assert first.closed >= 1
    assert ("MainThread" in first.threads) != background


def test_a_member_that_is_not_enabled_is_not_touched() -> None:
    member = Recorder(enabled=False)
    _run(Trackers({"member": member}))
    assert (member.steps, member.ends, member.closed) == ([], [], 0)


@BOTH
def test_a_full_disk_is_reported_once_and_tried_again(
    background: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    full = OSError(28, "No space left on device")
    sick, well = Recorder({2: full, 3: full}, background=background), Recorder()
    _run(Trackers({"sick": sick, "well": well}))
    assert (sick.steps, well.steps) == ([1, 4], [1, 2, 3, 4])
    assert well.ends[0]["dropped"] == {"sick": 2}
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "speechtrain: warning: tracker sick failed (OSError: [Errno 28] No space left on device); "
        "training continues, some of its records are lost",
        "speechtrain: warning: records dropped: sick 2",
    ]


@BOTH
@pytest.mark.parametrize("defect", [ZeroDivisionError("two\nlines"), SystemExit("two lines")])
def test_a_defect_leaves_the_member_out(
    background: bool, defect: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    sick, well = Recorder({2: defect}, background=background), Recorder()
    _run(Trackers({"sick": sick, "well": well}))
    assert (sick.steps, well.steps) == ([1], [1, 2, 3, 4])
    assert sick.closed >= 1
    dropped = 3 + background  # for a tracker in the background, the event of the end is one more
    assert capsys.readouterr().err.splitlines() == [
        f"speechtrain: warning: tracker sick failed ({type(defect).__name__}: two lines); "
        "training continues, the tracker is off from now on",
        f"speechtrain: warning: records dropped: sick {dropped}",
    ]


@BOTH
def test_a_failing_close_is_reported_and_the_others_are_closed(
    background: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    sick, well = Recorder({-1: OSError("gone")}, background=background), Recorder()
    _run(Trackers({"sick": sick, "well": well}))
    assert well.closed == 1
    assert "tracker sick failed (OSError: gone); training continues, some" in capsys.readouterr().err


def test_an_interrupt_is_not_a_failure_of_a_tracker() -> None:
    class Interrupted(Recorder):
        def log(self, event: str, values: Mapping[str, Any]) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Trackers({"member": Interrupted()}).log("train", {"step": 1})


def test_the_values_in_a_queue_are_copies() -> None:
    class Rows(Blocked):
        def log(self, event: str, values: Mapping[str, Any]) -> None:
            self.gate.wait()
            self.ends.append(values)

    member, row = Rows(), {"reference": "one"}
    group = Trackers({"member": member})
    group.log("examples", {"step": 1, "rows": [row]})
    row["reference"] = "two"
    member.gate.set()
    group.close()
    assert member.ends == [{"step": 1, "rows": [{"reference": "one"}]}]


def test_values_that_cannot_be_copied_do_not_reach_training(capsys: pytest.CaptureFixture[str]) -> None:
    member = Recorder(background=True)
    group = Trackers({"odd": member})
    group.log("train", {"step": 1, "odd": threading.Lock()})
    group.close()
    assert member.steps == []
    assert "tracker odd failed (TypeError: cannot pickle" in capsys.readouterr().err


def test_a_full_queue_drops_records(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tracking_group, "_MAX_RECORDS", 3)
    slow, well = Blocked(), Recorder()
    group = Trackers({"slow": slow, "well": well})
    group.log("train", {"step": 1})
    assert slow.is_reached.wait(60)
    for step in range(2, 10):
        group.log("train", {"step": step})
    slow.gate.set()
    group.close()
    assert slow.steps == [1, 2, 3, 4]
    assert well.steps == list(range(1, 10))
    assert capsys.readouterr().err.splitlines() == [
        "speechtrain: warning: tracker slow has 3 records to write; training continues, further ones are "
        "dropped"
    ]


def test_the_end_waits_for_all_hanging_members_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tracking_group, "_CLOSING_SECONDS", 0.2)
    hanging, healthy, well = [Blocked(), Blocked()], Recorder(background=True), Recorder()
    group = Trackers({"first": hanging[0], "second": hanging[1], "healthy": healthy, "well": well})
    assert not is_hanging()
    _run(group)
    assert is_hanging()
    assert healthy.steps == [1, 2, 3, 4]
    assert well.ends[0]["dropped"] == {"first": 5, "second": 5}
    assert well.ends[0]["tracker_seconds"] < 0.2, "the wait at the end is not a part of it"
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == [
        f"speechtrain: warning: tracker {name} has not ended 0.2 s after training; its last records are lost"
        for name in ("first", "second")
    ]
    assert lines[2:] == ["speechtrain: warning: records dropped: first 5, second 5"]
    for member in hanging:
        member.gate.set()
    group.close()


def test_a_hanging_thread_does_not_hold_the_interpreter() -> None:
    program = """
import threading
from speechtrain.tracking import group
from speechtrain.tracking.base import Tracker

class Hanging(Tracker):
    def log(self, event, values):
        threading.Event().wait()

group._CLOSING_SECONDS = 0.2
trackers = group.Trackers({"hanging": Hanging()})
trackers.log("train", {"step": 1})
trackers.close()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120, check=False)
    assert ended.returncode == 0
    assert b"hanging has not ended" in ended.stderr


def test_warnings_reach_stderr_if_no_member_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    Trackers({"member": Recorder()}).log("warning", {"step": 1, "message": "slow\ndisk"})
    assert capsys.readouterr().err == "speechtrain: warning: slow disk\n"
    screen = Recorder()
    screen.visible = True
    Trackers({"screen": screen}).log("warning", {"step": 1, "message": "slow disk"})
    assert capsys.readouterr().err == ""
