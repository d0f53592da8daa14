"""A study that is ended at some moment, under each launcher of Hydra, and the same command again."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from speechtrain.launch.launcher import WORKER
from speechtrain.study.store import Study

from ..integration.conftest import finish
from ..integration.starting import Started
from .conftest import SLOW_DATA, Run, wait_until

RATES = "optimizer.lr=1e-3,2e-3,3e-3,4e-3"
LIMITS = ["trainer.max_steps=16", "trainer.save_every=2", "trainer.validate_every=16"]
STUDY = ["hydra/sweeper=study", "hydra.sweeper.sampler=grid", "hydra.sweeper.objectives=[loss]"]
LAUNCHERS = {
    "default": [],
    "joblib": ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
    "submitit_local": ["hydra/launcher=submitit_local", "hydra.sweeper.parallel=2"],
}
TARGETS = ("command", "group")
SIGNALS = {"TERM": 75, "KILL": -signal.SIGKILL}
"""The exit code of the command by the signal."""
_SECONDS_TO_END = 120.0  # A rank that gets SIGTERM during its imports ends after them.
MOMENTS = ("start", "train", "later")


class Trials(Run):
    """A study of four trials with fixed values. ``run_dir`` is the folder of the study."""

    def __init__(self, folder: Path, environment: dict[str, str], launcher: str) -> None:
        keys = [*STUDY, *LAUNCHERS[launcher], "hydra.sweeper.cores=1", RATES, *LIMITS, *SLOW_DATA]
        super().__init__(folder, {**environment, "FAULTS_PAUSE": "0.2"}, keys)
        self.arguments.insert(0, "-m")

    def trial_events(self, kind: str) -> dict[str, list[dict[str, Any]]]:
        """Return the events of a kind by the trial."""
        events = {}
        for path in sorted(self.run_dir.glob("trial-*/metrics.jsonl")):
            rows = [json.loads(line) for line in path.read_text().split("\n")[:-1] if line.endswith("}")]
            events[path.parent.name] = [row for row in rows if row["event"] == kind]
        return events

    def losses_of_trials(self) -> dict[str, float]:
        """Return the loss in ``result.json`` of each trial whose run has finished."""
        losses = {}
        for path in sorted(self.run_dir.glob("trial-*/result.json")):
            result = json.loads(path.read_text())
            if result["status"] == "finished":
                losses[path.parent.name] = result["metrics"]["loss"]
        return losses

    def stored_values(self) -> dict[str, list[float] | None]:
        """Return the values that the study has stored for each complete trial."""
        trials = Study(self.run_dir).complete_trials()
        return {f"trial-{trial.number:03}": trial.values for trial in trials}

    def reach(self, moment: str, process: Started) -> None:
        """Wait for a rank, for an update, or for an update after the end of a trial."""
        if moment == "start":
            wait_until(lambda: self.running(WORKER), process, "a rank")
            return
        count = self._update_count()
        wait_until(lambda: self._update_count() > count, process, "an update")
        if moment == "later":
            wait_until(self.losses_of_trials, process, "the end of a trial")
            count = self._update_count()
            wait_until(lambda: self._update_count() > count, process, "an update of another trial")

    def _update_count(self) -> int:
        return sum(map(len, self.trial_events("train").values()))

    def remaining(self) -> list[psutil.Process]:
        """Return the processes of the study that do not end. They are killed."""
        _, running = psutil.wait_procs(self.processes(), timeout=_SECONDS_TO_END)
        running += [process for process in self.processes() if process not in running]
        for process in running:
            process.kill()
        return running


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> dict[str, float]:
    """The loss of each trial of a study that nobody ends."""
    study = Trials(tmp_path_factory.mktemp("undisturbed") / "study", environment, "default")
    study.environment["FAULTS_PAUSE"] = "0"
    done = study.run()
    assert done.returncode == 0, done.stderr
    return study.losses_of_trials()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", SIGNALS)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_study_ended_at_three_moments_equals_an_undisturbed_one(
    launcher: str,
    name: str,
    target: str,
    tmp_path: Path,
    environment: dict[str, str],
    undisturbed: dict[str, float],
    figures: Callable[[str], None],
) -> None:
    study = Trials(tmp_path / "study", environment, launcher)
    number = getattr(signal, f"SIG{name}")
    remaining = {}
    ended = {}
    for moment in MOMENTS:
        process = study.start()
        study.reach(moment, process)
        if target == "group":
            os.killpg(process.pid, number)
        else:
            os.kill(process.pid, number)
        done = finish(process)
        assert done.returncode == SIGNALS[name], (moment, done)
        remaining[moment] = study.remaining()
        ended[moment] = study.losses_of_trials()
    done = finish(study.start())
    remaining["end"] = study.remaining()
    assert done.returncode == 0, done.stderr
    values = study.stored_values()
    ends = study.trial_events("end")
    twice = [trial for trial, rows in ends.items() if [row["status"] for row in rows].count("finished") > 1]
    for moment in MOMENTS:
        lost = ended[moment].keys() - values.keys()
        figures(
            f"{moment}: {len(ended[moment])} finished, {len(lost)} lost, {len(twice)} twice, "
            f"{len(remaining[moment])} processes left"
        )
    assert not any(remaining.values()), remaining
    assert not twice
    assert study.losses_of_trials() == undisturbed
    assert values == {trial: [loss] for trial, loss in undisturbed.items()}
