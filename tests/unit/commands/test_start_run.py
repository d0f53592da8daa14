"""A run's global batch belongs to it: another world size shares it out anew, or is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from speechtrain.commands import train
from speechtrain.commands._command_line import read
from speechtrain.commands._continue_run import continued, find_run
from speechtrain.commands._hydra_app import compose
from speechtrain.commands._start_run import start_run
from speechtrain.config.resolved import dump, load
from speechtrain.errors import ConfigError, RunError
from speechtrain.run_directory import rank_folder, read_failure

DRY = ["recipe=demo", "dry_run=true"]


def begun(run_dir: Path, *overrides: str) -> None:
    """What the command leaves of a run's config."""
    config = compose([*DRY, *overrides])
    config.run_dir = str(run_dir)
    (run_dir / "config.yaml").write_text(dump(config))
    (run_dir / "run.json").write_text(json.dumps({"overrides": [*DRY, *overrides]}))


def batches(run_dir: Path, *overrides: str) -> tuple[int, int | None, int]:
    """World size, ``simulate_world`` and ``accumulate`` of the run with these overrides; it keeps them."""
    command = read([*DRY, *overrides])
    config = continued(run_dir, command)
    assert start_run(command, config, {})["status"] == "dry run"
    (run_dir / "config.yaml").write_text(dump(config))
    return config.world_size, config.trainer.simulate_world, config.trainer.accumulate


def test_another_world_keeps_the_global_batch(tmp_path: Path) -> None:
    begun(tmp_path, "world_size=4")
    assert batches(tmp_path, "world_size=4") == (4, None, 1)
    assert batches(tmp_path, "world_size=2") == (2, 4, 2)
    assert batches(tmp_path) == (2, 4, 2)  # what is not typed stays
    assert batches(tmp_path, "world_size=1") == (1, 4, 4)
    assert batches(tmp_path, "world_size=1") == (1, 4, 4)  # the same command again
    with pytest.raises(ConfigError, match="4 micro-batches per update, which world_size=3 does not divide"):
        batches(tmp_path, "world_size=3")
    for wrong in ("world_size=0", "world_size=two", "trainer.accumulate=two"):
        with pytest.raises(ConfigError, match=wrong.partition("=")[0]):
            batches(tmp_path, wrong)
    assert load(tmp_path / "config.yaml").world_size == 1


def test_accumulation_that_was_asked_for_is_compared(tmp_path: Path) -> None:
    begun(tmp_path, "trainer.accumulate=2")
    # as many, dealt out in another way
    assert batches(tmp_path, "trainer.accumulate=1", "world_size=2") == (2, 2, 1)
    with pytest.raises(RunError, match=r"trainer\.accumulate: 1 in the run, 3 now"):
        batches(tmp_path, "trainer.accumulate=3")
    with pytest.raises(RunError, match=r"trainer\.simulate_world: 2 in the run, 8 now"):
        batches(tmp_path, "trainer.simulate_world=8")


def test_the_users_own_yaml_is_compared_with_what_it_was(tmp_path: Path) -> None:
    folder, run_dir = tmp_path / "conf", tmp_path / "run"
    (folder / "schedule").mkdir(parents=True)
    run_dir.mkdir()
    mine = folder / "schedule" / "mine.yaml"
    before = "# @package _global_\ntrainer:\n  max_steps: 5\nschedule:\n  warmup_steps: 3\n"
    mine.write_text(before)
    begun(run_dir)
    about = {"overrides": DRY, "written": {"schedule/mine": before}}
    (run_dir / "run.json").write_text(json.dumps(about))
    stored = load(run_dir / "config.yaml").trainer.max_steps
    command = read([*DRY, "--config-dir", str(folder)])
    assert continued(run_dir, command).trainer.max_steps == stored
    mine.write_text(before.replace("max_steps: 5", "max_steps: 7"))  # may change
    assert continued(run_dir, command).trainer.max_steps == 7
    mine.write_text(before.replace("warmup_steps: 3", "warmup_steps: 4"))
    with pytest.raises(RunError, match=r"schedule\.warmup_steps: 60 in the run, 4 now"):
        continued(run_dir, command)


def test_a_run_is_found_by_what_was_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTPUT_DIR", str(tmp_path))
    run_dir = tmp_path / "any name"
    run_dir.mkdir()
    begun(run_dir)
    (run_dir / "run.json").write_text(json.dumps({"argv": [], "overrides": ["seed=2", "trainer.keep=9"]}))
    assert find_run(["trainer.max_steps=5", "seed=2"], None) == run_dir
    assert find_run(["seed=3"], None) is None
    (run_dir / "run.json").write_text("{")  # damaged: it says nothing of what was typed
    assert find_run([], None) is None


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


def test_ranks_that_wait_learn_of_a_refused_argument(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else they would wait for minutes for a rank 0 that has exited."""
    begun(tmp_path, "world_size=2")
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    for run_dir, wrong, error in (
        (tmp_path, "seed=7", RunError),
        (tmp_path, "--sed", ConfigError),
        (tmp_path / "new", "sed=7", ConfigError),
        (tmp_path / "other", "optimizer.lr=-7", ConfigError),
    ):
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(error, match=wrong.strip("-")[:3]):
            train.run([f"run_dir={run_dir}", wrong])
        monkeypatch.setenv("RANK", "1")
        assert train.run([f"run_dir={run_dir}", wrong]) == error.exit_code
