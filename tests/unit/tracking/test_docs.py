"""The example of docs/trackers.md works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from speechtrain.start.check_keys import check
from speechtrain.start.compose import compose
from speechtrain.start.run_config import part_of
from speechtrain.start.targets import ALLOW_TARGETS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "trackers.md"


def test_the_csv_tracker_writes_the_metrics_of_a_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"```(python|yaml)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (_, module), (_, choice) = blocks
    (tmp_path / "csv_tracker.py").write_text(module)
    folder = tmp_path / "conf" / "tracking"
    folder.mkdir(parents=True)
    (folder / "csv.yaml").write_text(choice)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(ALLOW_TARGETS, "csv_tracker")
    config = compose(["tracking=csv", "recipe=demo", f"run_dir={tmp_path}"], str(tmp_path / "conf"))
    check(config)
    assert {"console", "jsonl", "tensorboard", "csv"} < set(config.tracking.trackers)
    tracker = part_of(config, "tracking").build()
    tracker.log("train", {"step": 1, "loss": 3.0})
    tracker.log("valid", {"step": 2, "set": "dev", "seconds": 0.5, "wer": 0.25, "loss": 2.0})
    tracker.close()
    assert (tmp_path / "valid.csv").read_text().splitlines() == ["2,dev,wer,0.25", "2,dev,loss,2.0"]
