"""A sweep trains each of its jobs, whichever keys it varies."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from .conftest import STARTER, TINY, finish, wait_for

SHORT = [text for text in TINY if not text.startswith(("trainer.max_steps", "trainer.validate_every"))]


@pytest.fixture
def sweep(tmp_path: Path, environment: dict[str, str]) -> Callable[..., CompletedProcess[str]]:
    """``sweep(*overrides)`` trains each job of a sweep of the tiny recipe below ``tmp_path``."""

    def run(*overrides: str) -> CompletedProcess[str]:
        arguments = ["-m", *SHORT, *overrides]
        return finish(STARTER.start(arguments, {**environment, "OUTPUT_DIR": str(tmp_path)}))

    return run


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def runs_by_steps(folder: Path) -> dict[int, Path]:
    run_dirs = {}
    for path in folder.glob("*/result.json"):
        run_dirs[json.loads(path.read_text())["steps"]] = path.parent
    return run_dirs


def test_sweep_over_a_limit_has_a_schedule_for_each_job(
    sweep: Callable[..., CompletedProcess[str]], tmp_path: Path
) -> None:
    command = sweep("trainer.max_steps=2,4")
    assert command.returncode == 0, command.stderr
    run_dirs = runs_by_steps(tmp_path)
    assert sorted(run_dirs) == [2, 4]
    for steps, run_dir in run_dirs.items():
        assert [event["step"] for event in events(run_dir, "train")] == list(range(1, steps + 1))
        assert events(run_dir, "resume") == []
    assert not list(tmp_path.glob(".sweep-*"))
    second = sweep("trainer.max_steps=2,4")
    assert second.stdout.count(" is done: finished at step") == 2
    assert runs_by_steps(tmp_path) == run_dirs


def test_sweep_under_joblib_ends_with_the_table(sweep: Callable[..., CompletedProcess[str]]) -> None:
    schedule = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    command = sweep(*schedule, "trainer.max_steps=1", "optimizer.lr=1e-3,-1")
    assert command.returncode == 2, command.stderr
    heading, *table = [line.split() for line in command.stdout.splitlines()[-3:]]
    assert heading == ["job", "metric", "status", "speed", "overrides"]
    assert table[0][:2] == ["job", "1"]
    assert table[0][-2:] == ["optimizer.lr=0.001", "(best)"]
    speed = table[0][table[0].index("finished") + 1 : -2]
    assert speed[1::2] == ["utt/s,", "audio-s/s,", "s/epoch,", "ms/audio-s"]
    assert all(float(figure) > 0 for figure in speed[::2])
    assert table[1] == ["job", "2", "-", "ConfigError", "optimizer.lr=-1"]
    assert "1 of 2 jobs failed, first: optimizer.lr is -1" in command.stderr


def test_a_sweep_that_is_stopped_begins_no_job_and_continues(
    sweep: Callable[..., CompletedProcess[str]], tmp_path: Path, environment: dict[str, str]
) -> None:
    keys = ["seed=1,2", "trainer.validate_every=5000"]
    variables = {**environment, "OUTPUT_DIR": str(tmp_path)}
    process = STARTER.start(["-m", *SHORT, *keys, "trainer.max_steps=5000"], variables)
    wait_for(
        lambda: [path for path in tmp_path.glob("*/metrics.jsonl") if events(path.parent, "train")], process
    )
    process.send_signal(signal.SIGTERM)
    assert finish(process).returncode == 75
    (first,) = runs_by_steps(tmp_path)
    command = sweep(*keys, f"trainer.max_steps={first + 1}")
    assert command.returncode == 0, command.stderr
    results = [json.loads(path.read_text()) for path in tmp_path.glob("*/result.json")]
    assert [(result["status"], result["steps"]) for result in results] == [("finished", first + 1)] * 2
    assert sum(len(events(path.parent, "resume")) for path in tmp_path.glob("*/metrics.jsonl")) == 1
