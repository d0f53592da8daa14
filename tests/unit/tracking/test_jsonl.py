"""The JSON-lines record: valid JSON always, whole lines always, and what a resume makes void."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from speechtrain.run_directory import read_metrics
from speechtrain.tracking.jsonl import Jsonl


def _log(folder: Path, *events: tuple[str, dict[str, Any]]) -> Path:
    tracker = Jsonl(str(folder))
    for event, values in events:
        tracker.log(event, values)
    tracker.close()
    return tracker.path


def _train(step: int, **values: Any) -> tuple[str, dict[str, Any]]:
    return "train", {"step": step, **values}


def test_each_line_is_on_disk_when_log_returns(tmp_path: Path) -> None:
    tracker = Jsonl(str(tmp_path / "new" / "run"))
    for step in (1, 2):
        tracker.log("train", {"step": step, "loss": 0.5})
        assert tracker.path.read_text().count("\n") == step
    first = json.loads(tracker.path.read_text().splitlines()[0])
    assert first.pop("time") > 1.7e9
    assert first == {"event": "train", "step": 1, "loss": 0.5}


def test_every_value_becomes_strict_json(tmp_path: Path) -> None:
    path = _log(
        tmp_path,
        (
            "train",
            {
                "nan": float("nan"),
                "inf": [float("inf"), -float("inf")],
                "tensor": torch.tensor(2.5),
                "bad": torch.tensor(float("nan")),
                "array": np.float32(1.5),
                "count": np.int64(7),
                "path": Path("a/b"),
                "text": "zażółć\n\udc80",
                3: True,
            },
        ),
    )
    (line,) = path.read_bytes().splitlines()
    record = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    record.pop("time")
    assert record == {
        "event": "train",
        "nan": None,
        "inf": [None, None],
        "tensor": 2.5,
        "bad": None,
        "array": 1.5,
        "count": 7,
        "path": "a/b",
        "text": "zażółć\n\udc80",
        "3": True,
    }


def test_a_resumed_run_takes_the_last_word_of_each_step(tmp_path: Path) -> None:
    _log(
        tmp_path,
        ("start", {"steps": 9}),
        *[_train(step, attempt=1) for step in (1, 2, 3, 4)],
        ("valid", {"step": 4, "set": "a", "attempt": 1}),
        ("valid", {"step": 4, "set": "b", "attempt": 1}),
        ("warning", {"message": "kept"}),
        ("warning", {"message": "void", "step": 3}),
        ("end", {"status": "preempted", "steps": 4}),
    )
    _log(
        tmp_path,
        ("start", {"steps": 9}),
        ("warning", {"message": "fell back"}),
        ("resume", {"step": 2}),
        _train(2, attempt=2),
        _train(3, attempt=2),
        ("valid", {"step": 3, "set": "a", "attempt": 2}),
        ("valid", {"step": 3, "set": "b", "attempt": 2}),
        ("valid", {"step": 3, "set": "b", "attempt": 3}),
    )
    events = read_metrics(tmp_path).rows
    assert [(e["event"], e.get("step"), e.get("attempt")) for e in events] == [
        ("start", None, None),
        ("train", 1, 1),
        ("warning", None, None),
        ("end", None, None),
        ("start", None, None),
        ("warning", None, None),
        ("resume", 2, None),
        ("train", 2, 2),
        ("train", 3, 2),
        ("valid", 3, 2),
        ("valid", 3, 3),
    ]
    assert [e["set"] for e in events if e["event"] == "valid"] == ["a", "b"]


def test_several_warnings_at_one_step_all_stand(tmp_path: Path) -> None:
    path = _log(tmp_path, *[("warning", {"message": m, "step": 5}) for m in ("one", "two")])
    assert [e["message"] for e in read_metrics(path.parent).rows] == ["one", "two"]


def test_an_attempt_that_began_again_voids_what_it_has_not_reached(tmp_path: Path) -> None:
    first = [("start", {}), _train(10, attempt=1), _train(20, attempt=1), ("valid", {"step": 20, "set": "a"})]
    path = _log(tmp_path, *first, ("start", {}), _train(10, attempt=2))
    events = read_metrics(path.parent).rows
    assert [(e["event"], e.get("step"), e.get("attempt")) for e in events] == [
        ("start", None, None),
        ("start", None, None),
        ("train", 10, 2),
    ]


def test_a_file_cut_at_any_byte_reads_as_its_whole_lines_and_is_continued(tmp_path: Path) -> None:
    whole = _log(tmp_path, *[_train(step, note="é") for step in (1, 2, 3)]).read_bytes()
    for size in range(len(whole)):
        folder = tmp_path / str(size)
        folder.mkdir()
        (folder / "metrics.jsonl").write_bytes(whole[:size])
        ended = whole[: size + 1].count(b"\n")  # a line that lacks only its line feed is whole
        path = folder / "metrics.jsonl"
        assert [e["step"] for e in read_metrics(path.parent).rows] == list(range(1, ended + 1))
        _log(folder, _train(10))
        assert [e["step"] for e in read_metrics(path.parent).rows] == [*range(1, ended + 1), 10]


def test_lines_that_are_no_events_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'\xff\xfe\n[1]\n{"step": 1}\n{"event": 3}\nnull\n\n{"event": "train", "step": 1}\n')
    assert read_metrics(path.parent).rows == [{"event": "train", "step": 1}]


def test_a_line_torn_by_a_full_disk_does_not_spoil_the_next(tmp_path: Path) -> None:
    tracker = Jsonl(str(tmp_path))
    tracker.log("train", {"step": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (tracker.path.stat().st_size + 9, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            tracker.log("train", {"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    tracker.log("train", {"step": 3})
    tracker.close()
    assert len(tracker.path.read_bytes().splitlines()) == 3
    assert [e["step"] for e in read_metrics(tmp_path).rows] == [1, 3]
