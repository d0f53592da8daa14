from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from optuna.distributions import FloatDistribution

from speechtrain.compute_policy import usable_cpus
from speechtrain.errors import ConfigError, MachineError, RunError
from speechtrain.run_directory import RunLock, RunResult
from speechtrain.study.objectives import Objective
from speechtrain.study.store import Outcome, Study, StudySpec
from speechtrain.study.trial_job import TrialJob, TrialSettings, _cores

HOLDER = """
import os, sys
from pathlib import Path
from speechtrain.runs.started_runs import remember
from speechtrain.study.trial_job import _cores

with _cores(int(sys.argv[1])):
    remember(Path(os.environ["TMPDIR"]))  # as the start of a run does
    print(sorted(os.sched_getaffinity(0)), flush=True)
    sys.stdin.read()
"""


def hold(folder: Path, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLDER, str(count)]
    environment = {**os.environ, "TMPDIR": str(folder), "XDG_STATE_HOME": str(folder)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.slow
@pytest.mark.skipif(len(usable_cpus()) < 2, reason="two trials need two cores")
def test_cores_of_two_trials_differ_and_a_third_waits_for_a_killed_one(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    cores = usable_cpus()
    waiting = "waiting for 1 free cores. A smaller hydra.sweeper.cores=N helps"
    processes = [hold(tmp_path, len(cores) - 1)]
    try:
        claimed = set(json.loads(first_line(processes[0])))
        assert len(claimed) == len(cores) - 1
        free = str(sorted(cores - claimed))
        processes += [hold(tmp_path, 1), hold(tmp_path, 1)]
        lines = {first_line(process): process for process in processes[1:]}
        assert lines.keys() == {free, waiting}
        lines[free].kill()
        assert first_line(lines[waiting]) == free
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_cores_refuse_a_file_that_another_user_may_have_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with _cores(1):
        (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(MachineError, match=rf"{path}: .*\. Remove it, or set TMPDIR"), _cores(1):
        pass
    if os.geteuid() != 0:
        pytest.skip("only root gives a file to another user")
    path.unlink()
    path.touch()
    os.chown(path, 65534, 65534)
    with pytest.raises(MachineError, match=f"{path} belongs to another user"), _cores(1):
        pass


def settings_of(trial: int, pruner: str | None) -> TrialSettings:
    handling = {"failed": "retry", "refused": "prune", "diverged": "worst", "out_of_memory": "prune"}
    return TrialSettings(trial=trial, pruner=pruner, cores=1, retries=1, **handling)


def test_median_rule_does_not_end_the_command_if_the_run_has_just_ended(tmp_path: Path) -> None:
    space = {"optimizer.lr": FloatDistribution(1e-3, 1e-2)}
    study = Study(tmp_path, StudySpec(space, (Objective("wer"),), n_trials=6))
    for trial in study.claim(5):
        study.report(trial.number, [0.1])
        study.finish(trial.number, Outcome("finished"), [0.1])
    (trial,) = study.claim(1)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text('{"event": "valid", "step": 1, "set": "dev", "wer": 0.9}\n')
    job = TrialJob(tmp_path, run_dir, settings_of(trial.number, "median"))

    def end_after_the_signal() -> RunResult:
        deadline = time.monotonic() + 60
        while not job._is_pruned:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.1)
        return RunResult("finished", metrics={"wer": 0.9})

    handler = signal.getsignal(signal.SIGTERM)
    assert job.run(end_after_the_signal).status == "finished"
    assert signal.getsignal(signal.SIGTERM) is handler
    assert study.trials()[5].values == [0.9]


@pytest.fixture
def study(tmp_path: Path) -> Study:
    """A study with a claimed trial, whose run is in ``tmp_path / "run"``."""
    study = Study(tmp_path, StudySpec({"lr": FloatDistribution(1e-3, 1e-2)}, (Objective("wer"),), n_trials=1))
    study.claim(1)
    (tmp_path / "run").mkdir()
    return study


def _lock_for_half_a_second(run_dir: Path) -> None:
    threading.Timer(0.5, RunLock(run_dir).acquire().release).start()


def _is_free(run_dir: Path) -> bool:
    """Return whether no process has the lock of the run."""
    lock = RunLock(run_dir)
    try:
        lock.acquire()
    except RunError:
        return False
    lock.release()
    return True


def test_a_run_that_another_process_trains_is_no_failure(
    tmp_path: Path, study: Study, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    _lock_for_half_a_second(run_dir)  # a process that an earlier command has left
    starts = []

    def start() -> RunResult:
        starts.append(_is_free(run_dir))
        if len(starts) == 1:  # Another process begins with the same run at this moment.
            _lock_for_half_a_second(run_dir)
            raise RunError("the run is in use")
        return RunResult("finished", metrics={"wer": 0.5})

    TrialJob(tmp_path, run_dir, settings_of(0, None)).run(start)
    assert starts == [True, True]
    assert capsys.readouterr().out.count(f"waiting for another process that trains {tmp_path / 'run'}") == 2
    (trial,) = study.trials()
    assert trial.values == [0.5]
    assert trial.user_attrs["attempts"] == 0


@pytest.mark.parametrize("error", [None, RunError("the host was lost")])
def test_an_outcome_that_another_process_has_stored_stays(
    tmp_path: Path, study: Study, error: RunError | None
) -> None:
    def start() -> RunResult:
        study.finish(0, Outcome("finished"), [0.5])
        if error is not None:
            raise error
        return RunResult("finished", metrics={"wer": 0.9})

    job = TrialJob(tmp_path, tmp_path / "run", settings_of(0, None))
    if error is None:
        job.run(start)
    else:
        with pytest.raises(RunError, match="the host was lost"):
            job.run(start)
    assert study.trials()[0].values == [0.5]


def test_a_trial_whose_validation_is_not_a_number_is_pruned(tmp_path: Path) -> None:
    study = Study(
        tmp_path, StudySpec({"lr": FloatDistribution(1e-3, 1e-2)}, (Objective("loss"),), n_trials=6)
    )
    for trial in study.claim(5):
        study.report(trial.number, [0.1])
        study.finish(trial.number, Outcome("finished"), [0.1])
    (trial,) = study.claim(1)
    assert study.report(trial.number, [math.nan])


@pytest.mark.parametrize("key", ["failed", "refused", "diverged", "out_of_memory"])
def test_trial_settings_refuse_an_unknown_handling(key: str) -> None:
    handling = {"failed": "retry", "refused": "prune", "diverged": "worst", "out_of_memory": "prune"}
    settings = {"trial": 0, "pruner": None, "cores": 1, "retries": 1, **handling}
    assert TrialSettings(**settings)
    with pytest.raises(ConfigError, match=rf"hydra\.sweeper\.{key} is ignore: it is retry, prune or worst"):
        TrialSettings(**{**settings, key: "ignore"})
    with pytest.raises(ConfigError, match=r"hydra\.sweeper\.pruner is best: it is median or null"):
        TrialSettings(**{**settings, "pruner": "best"})
