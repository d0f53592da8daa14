"""A study trains its trials, names those that fail, and continues after a kill."""

from __future__ import annotations

import json
import shlex
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from optuna.trial import TrialState

from speechtrain.study.store import Study, result_of

from .conftest import INLINE, STARTER, TINY, Started, finish, wait_for

SHORT = [text for text in TINY if not text.startswith(("trainer.", "schedule."))]
SPACE = ["optimizer.lr=tag(log,interval(1e-3,1e-2))", "schedule.warmup_steps=range(1,4)"]

Start = Callable[..., Started]


@pytest.fixture
def start(tmp_path: Path, environment: dict[str, str]) -> Start:
    """``start(*overrides)`` begins a study of the tiny recipe in ``tmp_path / "study"``."""

    def begin(*overrides: str) -> Started:
        limits = ["trainer.max_epochs=null", "trainer.max_steps=4", "trainer.log_every=1"]
        limits += ["trainer.save_every=1", "trainer.validate_every=2"]
        keys = [*SHORT, *INLINE, *limits, "hydra/sweeper=study", f"run_dir={tmp_path / 'study'}"]
        return STARTER.start(["-m", *keys, *overrides], environment)

    return begin


def rows(folder: Path) -> list[tuple]:
    trials = []
    for trial in Study(folder).trials():
        trials.append((trial.number, trial.state, trial.params, trial.values))
    return trials


def test_study_writes_table_and_page_and_continues(start: Start, tmp_path: Path) -> None:
    objectives = "hydra.sweeper.objectives=[{name: wer, threshold: 0.1}, wall_s, memory_mib]"
    command = finish(start(*SPACE, objectives, "hydra.sweeper.n_trials=2"))
    assert command.returncode == 0, command.stderr
    heading, *table = [line.split() for line in command.stdout.splitlines()[-4:-1]]
    assert heading == ["trial", "status", "wer", "wall_s", "memory_mib", "assignments"]
    assert [row[0] for row in table] == ["0", "1"]
    assert all(row[1:4] == ["finished,", "beyond", "wer"] for row in table)
    study = tmp_path / "study"
    assert sorted(path.name for path in study.glob("trial-*")) == ["trial-000", "trial-001"]
    assert "optimizer.lr" in (study / "study.html").read_text()

    command = finish(start(*SPACE, objectives, "hydra.sweeper.n_trials=3"))
    assert command.returncode == 0, command.stderr
    assert "trial 2: " in command.stdout
    assert "trial 1: " not in command.stdout

    best = Study(study).best()
    assert best is not None
    words = shlex.split(command.stdout.splitlines()[-1].removeprefix("train with: speechtrain train "))
    text = finish(STARTER.start([*words, "--cfg", "job"], {})).stdout
    assert f"lr: {best.params['optimizer.lr']}" in text
    assert f"warmup_steps: {best.params['schedule.warmup_steps']}" in text
    assert "hidden: 32" in text


def test_study_names_each_failure_and_goes_on(start: Start, tmp_path: Path) -> None:
    rates = "optimizer.lr=1e-3,-1,2e-3,1e25"
    plugin = ["optimizer._target_=hungry.HungryAdamW", "allow_targets=hungry"]
    schedule = ["schedule.warmup_steps=0", "trainer.max_bad_updates=1", "hydra.sweeper.sampler=grid"]
    command = finish(start(rates, *plugin, *schedule))
    assert command.returncode == 0, command.stderr
    trials = Study(tmp_path / "study").trials()
    assert [result_of(trial).status for trial in trials] == [
        "finished",
        "refused",
        "out_of_memory",
        "diverged",
    ]
    causes = [result_of(trial).error for trial in trials]
    assert causes[0] == ""
    assert "optimizer.lr is -1" in causes[1]
    assert "is out of memory" in causes[2]
    assert [trial.state for trial in trials] == [
        *(TrialState.COMPLETE, TrialState.PRUNED, TrialState.PRUNED, TrialState.COMPLETE)
    ]
    assert trials[3].values == trials[0].values, "a trial that diverges gets the worst value"


def test_study_continues_after_kills(start: Start, tmp_path: Path) -> None:
    study = tmp_path / "study"
    options = [*SPACE, "hydra.sweeper.n_trials=3", "hydra.sweeper.objectives=[loss]"]

    def checkpoints(trial: str) -> list[Path]:
        return list((study / trial / "checkpoints").glob("step-*"))

    for trial in ("trial-000", "trial-001"):
        command = start(*options)
        wait_for(lambda trial=trial: checkpoints(trial), command, f"a checkpoint of {trial}")
        command.send_signal(signal.SIGKILL)
        command.wait(timeout=60)
    assert finish(start(*options)).returncode == 0
    interrupted = rows(study)
    resumed = [json.loads(line) for line in (study / "trial-001/metrics.jsonl").read_text().splitlines()]
    assert [event["event"] for event in resumed].count("resume") == 1
    study.rename(tmp_path / "interrupted")
    assert finish(start(*options)).returncode == 0
    assert rows(study) == interrupted
    assert [state for _, state, _, _ in interrupted] == [TrialState.COMPLETE] * 3


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGKILL, -9)])
def test_study_under_joblib_leaves_no_process_and_loses_no_trial(
    start: Start, tmp_path: Path, number: int, code: int
) -> None:
    study = tmp_path / "study"
    options = [*SPACE, "hydra.sweeper.n_trials=2", "hydra.sweeper.objectives=[loss]", "hydra.sweeper.cores=1"]
    options += ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "trainer.max_steps=12"]
    command = start(*options)
    wait_for(lambda: list(study.glob("trial-*/checkpoints/step-*")), command, "a checkpoint")
    workers = psutil.Process(command.pid).children(recursive=True)
    command.send_signal(number)
    assert finish(command).returncode == code
    wait_for(lambda: not any(worker.is_running() for worker in workers), goal="the end of the workers")
    command = finish(start(*options))
    assert command.returncode == 0, command.stderr
    assert [state for _, state, _, _ in rows(study)] == [TrialState.COMPLETE] * 2
    for path in study.glob("trial-*/metrics.jsonl"):
        events = [json.loads(line) for line in path.read_text().splitlines()]
        assert [event["status"] for event in events if event["event"] == "end"].count("finished") == 1


def test_median_rule_stops_a_trial_at_a_validation(start: Start, tmp_path: Path) -> None:
    rates = [{"optimizer.lr": 3e-3}] * 5 + [{"optimizer.lr": 1e-9}]
    points = json.dumps(rates).replace('"', "")
    options = ["optimizer.lr=interval(1e-9,1e-2)", f"hydra.sweeper.first={points}", "schedule.warmup_steps=0"]
    options += ["hydra.sweeper.n_trials=6", "hydra.sweeper.objectives=[loss]", "hydra.sweeper.pruner=median"]
    command = finish(start(*options, "trainer.max_steps=40", "trainer.validate_every=10"))
    assert command.returncode == 0, command.stderr
    trials = Study(tmp_path / "study").trials()
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * 5 + [TrialState.PRUNED]
    assert 0 < len(trials[5].intermediate_values) < 4
