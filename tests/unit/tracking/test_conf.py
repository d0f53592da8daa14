"""Every choice of the tracking group builds from its YAML, and takes overrides without a plus sign."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from speechtrain.start.run_config import part_of
from speechtrain.tracking.base import Tracker

CONF = Path(__file__).parents[3] / "conf" / "tracking"
EVENTS = [
    ("environment", {"host": "node-7", "threads": "2"}),
    ("data", {"train_samples": 3, "eval_samples": 1, "updates_per_epoch": 1, "n_fft": 512}),
    ("start", {"steps": 1, "parameters": 3, "ranks": 1, "accumulate": 1, "target": None}),
    ("train", {"step": 1, "loss": 1.0}),
    ("epoch", {"step": 1, "epoch": 1, "seconds": 1.0, "utterances_per_s": 3.0}),
    ("valid", {"step": 1, "set": "a", "wer": 0.5, "seconds": 1.0}),
    ("examples", {"step": 1, "set": "a", "rows": [{"id": "x", "reference": "a", "hypothesis": "b"}]}),
    ("end", {"status": "finished", "steps": 1}),
]


def _compose(choice: str, run_dir: Path, *overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONF.parent), version_base="1.3"):
        config = compose(overrides=[f"+tracking={choice}", f"+run_dir={run_dir}", *overrides])
    tracking: DictConfig = config.tracking
    return tracking


def _build(choice: str, run_dir: Path, *overrides: str) -> Tracker:
    node = _compose(choice, run_dir, *overrides)
    tracker = part_of(OmegaConf.create({"run_dir": str(run_dir), "tracking": node}), "tracking").build()
    assert isinstance(tracker, Tracker)
    return tracker


def _drive(tracker: Tracker) -> None:
    for event, values in EVENTS:
        tracker.log(event, values)
    tracker.close()


@pytest.mark.parametrize("choice", ["default", "jsonl", "none", "wandb"])
def test_every_choice_lists_the_trackers_of_the_others(choice: str, tmp_path: Path) -> None:
    trackers = _compose(choice, tmp_path).trackers
    assert trackers.wandb.enabled == (choice == "wandb")
    assert _compose(choice, tmp_path, "tracking.trackers.wandb.enabled=true").trackers.wandb.enabled


@pytest.mark.parametrize(
    ("choice", "overrides", "written", "is_heard"),
    [
        ("none", (), set(), False),
        ("jsonl", (), {"metrics.jsonl"}, False),
        ("default", (), {"metrics.jsonl", "tensorboard"}, True),
        ("default", ("tracking.trackers.tensorboard.enabled=false",), {"metrics.jsonl"}, True),
        (
            "default",
            ("tracking.trackers.tensorboard=null", "tracking.trackers.console.enabled=false"),
            {"metrics.jsonl"},
            False,
        ),
    ],
)
def test_what_a_choice_writes(
    choice: str,
    overrides: tuple[str, ...],
    written: set[str],
    is_heard: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _drive(_build(choice, tmp_path, *overrides))
    assert {path.name for path in tmp_path.iterdir()} == written
    assert ("wer 50.00 %" in capsys.readouterr().out) == is_heard
