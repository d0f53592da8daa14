from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from optuna.distributions import FloatDistribution
from optuna.trial import TrialState

from speechtrain.errors import ConfigError, Diverged, Preempted, RunError
from speechtrain.run_directory import RunResult
from speechtrain.study.objectives import Objective
from speechtrain.study.store import Study, StudySpec, TrialResult, result_of
from speechtrain.study.sweep import _check_settings, _store_end

SETTINGS = {
    "failed": "retry",
    "refused": "prune",
    "diverged": "worst",
    "out_of_memory": "prune",
    "retries": 1,
    "pruner": None,
}
SPEC = StudySpec({"lr": FloatDistribution(1e-3, 1e-2)}, [Objective("wer")], n_trials=3)


def finished(wer: float) -> RunResult:
    return RunResult("finished", metrics={"wer": wer})


def test_store_end_tries_a_lost_trial_again_and_then_fails_it(tmp_path: Path) -> None:
    study = Study(tmp_path, SPEC)
    study.claim()
    failures: Counter[int] = Counter()
    for _ in range(3):
        _store_end(study, 0, Preempted("stopped"), SETTINGS, failures)
    for _ in range(2):
        assert study.trials()[0].state == TrialState.RUNNING
        _store_end(study, 0, RunError("the host was lost"), SETTINGS, failures)
    assert study.trials()[0].state == TrialState.FAIL
    assert result_of(study.trials()[0]) == TrialResult("failed", "the host was lost")


def test_store_end_gives_a_diverged_trial_the_worst_value(tmp_path: Path) -> None:
    study = Study(tmp_path, SPEC)
    for number, end in enumerate([finished(0.5), Diverged("loss"), finished(float("nan"))]):
        study.claim()
        _store_end(study, number, end, SETTINGS, Counter())
    assert [trial.values for trial in study.trials()] == [[0.5]] * 3
    assert [result_of(trial).status for trial in study.trials()] == ["finished", "diverged", "diverged"]


@pytest.mark.parametrize("key", ["failed", "refused", "diverged", "out_of_memory", "pruner"])
def test_check_settings_refuses_an_unknown_value(key: str) -> None:
    _check_settings(SETTINGS, SPEC)
    with pytest.raises(ConfigError, match=rf"hydra\.sweeper\.{key} is ignore: it is "):
        _check_settings({**SETTINGS, key: "ignore"}, SPEC)
