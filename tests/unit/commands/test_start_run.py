"""A run's global batch belongs to it: another world size shares it out anew, or is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from speechtrain.commands._hydra_app import compose
from speechtrain.commands._start_run import launch
from speechtrain.config.resolved import dump, load
from speechtrain.errors import ConfigError, RunError
from speechtrain.run_directory import rank_folder, read_failure

DRY = ["recipe=demo", "dry_run=true"]


def begun(run_dir: Path, *overrides: str) -> None:
    """What the command leaves of a run's config."""
    config = compose([*DRY, *overrides])
    config.run_dir = str(run_dir)
    (run_dir / "config.yaml").write_text(dump(config))


def continued(run_dir: Path, *overrides: str) -> tuple[int | None, int]:
    """``simulate_world`` and ``accumulate`` as the same run gets them with these overrides."""
    config = compose([*DRY, *overrides])
    assert launch(config, run_dir, [], [])["status"] == "dry run"
    (run_dir / "config.yaml").write_text(dump(config))
    return config.trainer.simulate_world, config.trainer.accumulate


def test_another_world_keeps_the_global_batch(tmp_path: Path) -> None:
    begun(tmp_path, "world_size=4")
    assert continued(tmp_path, "world_size=4") == (None, 1)
    assert continued(tmp_path, "world_size=2") == (4, 2)
    assert continued(tmp_path, "world_size=1") == (4, 4)
    assert continued(tmp_path, "world_size=1") == (4, 4)  # the same command again
    assert continued(tmp_path, "world_size=4") == (None, 1)
    with pytest.raises(ConfigError, match="4 micro-batches an update, which world_size=3 does not divide"):
        continued(tmp_path, "world_size=3")
    assert load(tmp_path / "config.yaml").world_size == 4


def test_accumulation_that_was_asked_for_is_compared(tmp_path: Path) -> None:
    begun(tmp_path, "trainer.accumulate=2")
    assert continued(tmp_path, "trainer.accumulate=1", "world_size=2") == (
        None,
        1,
    )  # as many, dealt otherwise
    with pytest.raises(RunError, match=r"trainer\.accumulate: 1 there, 3 now"):
        continued(tmp_path, "trainer.accumulate=3")
    with pytest.raises(RunError, match=r"trainer\.simulate_world: None there, 8 now"):
        continued(tmp_path, "trainer.simulate_world=8")


def test_the_first_failure_that_has_a_cause_of_its_own_is_told(tmp_path: Path) -> None:
    assert read_failure(tmp_path) is None
    outcomes = {0: (2.0, False), 1: (3.0, True), 2: (4.0, True)}
    for rank, (when, is_cause) in outcomes.items():
        rank_folder(tmp_path, rank).mkdir(parents=True, exist_ok=True)
        outcome = {"status": "failed", "rank": rank, "failed_at": when, "is_cause": is_cause}
        (rank_folder(tmp_path, rank) / "result.json").write_text(json.dumps(outcome))
    failure = read_failure(tmp_path)
    assert failure is not None
    assert failure["rank"] == 1
