from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState

from speechtrain.commands import study
from speechtrain.commands._cli import exit_code_of
from speechtrain.errors import ConfigError, MachineError, RunError
from speechtrain.run_directory import RunLock
from speechtrain.study.objectives import Objective
from speechtrain.study.store import JOURNAL, Study, StudySpec, TrialResult, result_of

SPACE = {"lr": FloatDistribution(1e-3, 1e-2, log=True), "steps": IntDistribution(20, 200)}

WORKER = """
import os, signal, sys
from pathlib import Path
from optuna.storages.journal import JournalFileBackend
from speechtrain.study.objectives import Objective
from speechtrain.study.store import TrialResult, Study, StudySpec
from optuna.distributions import FloatDistribution, IntDistribution

folder, kill_at, part = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
count = 0
whole = JournalFileBackend.append_logs


def append(backend, logs):
    global count
    count += 1
    if count == kill_at and part != "after":
        if part == "half":
            with open(backend._file_path, "ab") as file:
                file.write(b'{"op_code": 5, "wor')
        os.kill(os.getpid(), signal.SIGKILL)
    whole(backend, logs)
    if count == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)


JournalFileBackend.append_logs = append
space = {"lr": FloatDistribution(1e-3, 1e-2, log=True), "steps": IntDistribution(20, 200)}
study = Study(folder, StudySpec(space, [Objective("wer")], n_trials=14))
while trial := study.claim():
    wer = abs(trial.params["lr"] - 4e-3) * 100 + trial.params["steps"] / 1e3
    study.finish(trial.number, TrialResult("finished"), [wer])
    study.release(trial.number)
"""


def spec(**fields) -> StudySpec:
    return StudySpec(**{"space": SPACE, "objectives": [Objective("wer")], "n_trials": 4, **fields})


def work(folder: Path, kill_at: int = 0, part: str = "") -> int:
    command = [sys.executable, "-c", WORKER, str(folder), str(kill_at), part]
    return subprocess.run(command, check=False).returncode


def rows(folder: Path) -> list[tuple]:
    return [(trial.number, trial.state, trial.params, trial.values) for trial in Study(folder).trials()]


@pytest.mark.slow
def test_study_killed_at_any_record_equals_the_undisturbed_one(tmp_path: Path) -> None:
    assert work(tmp_path / "whole") == 0
    expected = rows(tmp_path / "whole")
    assert len(expected) == 14
    assert {state for _, state, _, _ in expected} == {TrialState.COMPLETE}
    kills = [(1, "before"), (2, "half"), (3, "after"), (3, "half"), (4, "before"), (4, "after"), (5, "half")]
    for kill_at, part in [*kills, (17, "before"), (28, "half"), (33, "after")]:
        folder = tmp_path / f"{kill_at}-{part}"
        assert work(folder, kill_at, part) == -9
        assert work(folder) == 0
        assert rows(folder) == expected, (kill_at, part)


@pytest.mark.slow
def test_study_shared_by_processes_loses_and_doubles_no_trial(tmp_path: Path) -> None:
    Study(tmp_path, spec(n_trials=14))
    command = [sys.executable, "-c", WORKER, str(tmp_path), "0", ""]
    workers = [subprocess.Popen(command) for _ in range(2)]
    killed = subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path), "9", "half"])
    assert killed.wait() == -9 or killed.returncode == 0
    assert [worker.wait() for worker in workers] == [0, 0]
    assert work(tmp_path) == 0  # It takes the trial that the killed worker left.
    numbers = [(number, state) for number, state, _, _ in rows(tmp_path)]
    assert numbers == [(number, TrialState.COMPLETE) for number in range(14)]


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_draws_follow_from_seed_and_number(tmp_path: Path, sampler: str) -> None:
    def draws(folder: str, seed: int) -> list[dict]:
        study = Study(tmp_path / folder, spec(sampler=sampler, seed=seed, n_trials=12))
        for number in range(12):
            trial = study.claim()
            study.finish(number, TrialResult("finished"), [trial.params["lr"]])
        return [trial.params for trial in study.trials()]

    first = draws("a", 1)
    assert first == draws("b", 1)
    assert first != draws("c", 2)
    assert len({params["lr"] for params in first}) == 12


def test_first_points_and_grid_fix_the_draws(tmp_path: Path) -> None:
    study = Study(tmp_path / "first", spec(first=[{"lr": 5e-3}, {"lr": 2e-3, "steps": 40}]))
    trials = [study.claim(), study.claim()]
    assert trials[0].params["lr"] == 5e-3
    assert 20 <= trials[0].params["steps"] <= 200
    assert trials[1].params == {"lr": 2e-3, "steps": 40}
    space = {"a": CategoricalDistribution(["x", "y"]), "b": IntDistribution(1, 3)}
    study = Study(tmp_path / "grid", spec(space=space, sampler="grid", n_trials=20))
    trials = [study.claim() for _ in range(6)]
    assert [tuple(trial.params.values()) for trial in trials] == [(a, b) for a in "xy" for b in (1, 2, 3)]
    assert study.claim() is None


def test_finish_refuses_a_second_end_and_keeps_the_first(tmp_path: Path) -> None:
    study = Study(tmp_path, spec())
    study.claim()
    study.finish(0, TrialResult("finished"), [0.5])
    for number in (0, 7):
        with pytest.raises(RunError, match=f"trial {number} is finished or does not exist"):
            study.finish(number, TrialResult("failed"))
    assert study.trials()[0].values == [0.5]
    assert result_of(study.trials()[0]) == TrialResult("finished")


def test_a_thread_may_report_while_another_one_ends_trials(tmp_path: Path) -> None:
    count = 60
    study = Study(tmp_path, spec(n_trials=count + 1))
    reported = study.claim()
    trials = [study.claim() for _ in range(count)]
    study.report(reported.number, [])
    is_over = threading.Event()

    def report() -> None:
        values: list[float] = []
        while not is_over.is_set():
            values.append(0.5)
            study.report(reported.number, values)

    def end_trials() -> None:
        for trial in trials:
            study.finish(trial.number, TrialResult("finished"), [0.1])
        is_over.set()

    # Daemons, because two threads that wait for each other would keep the process.
    threads = [threading.Thread(target=target, daemon=True) for target in (report, end_trials)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not [thread for thread in threads if thread.is_alive()], "the threads wait for each other"
    assert len(study.complete_trials()) == count


def test_best_is_within_the_thresholds_if_one_is(tmp_path: Path) -> None:
    objectives = [Objective("wer", threshold=0.25), Objective("speed", "maximize", threshold=10)]
    study = Study(tmp_path, spec(objectives=objectives))
    for number, values in enumerate([[0.1, 5], [0.2, 12], [0.24, 20]]):
        study.claim()
        study.finish(number, TrialResult("finished"), values)
    best = study.best()
    assert best is not None
    assert best.number == 1
    assert study.trials()[0].constraints == {"wer": pytest.approx(-0.15), "speed": 5}
    assert study.worst_values() == [0.24, 5]


def test_a_study_with_another_definition_is_refused_and_more_trials_are_not(tmp_path: Path) -> None:
    Study(tmp_path, spec())
    assert Study(tmp_path, spec(n_trials=9)).spec.n_trials == 9
    assert Study(tmp_path).spec == spec(n_trials=9)
    with pytest.raises(ConfigError, match="another seed"):
        Study(tmp_path, spec(seed=3))
    with pytest.raises(RunError, match="holds no study"):
        Study(tmp_path / "other")


def test_claims_of_a_process_end_with_it(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from speechtrain.study.store import Study\n"
        "study = Study(Path(sys.argv[1])); print(study.claim().number, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    study = Study(tmp_path, spec(n_trials=2))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "0\n"
        assert study.claim().number == 1
        assert study.claim() is None
        process.kill()
    assert study.claim().number == 0
    study.release(0)
    assert study.claim().number == 0


def test_journal_file_is_one_record_a_line(tmp_path: Path) -> None:
    study = Study(tmp_path, spec())
    lines = (tmp_path / JOURNAL).read_text().count("\n")
    study.claim()
    assert (tmp_path / JOURNAL).read_text().count("\n") == lines + 1


def test_a_disk_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Study(tmp_path, spec())

    def flock(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)  # The disks of this machine have locks.
    commands = [lambda: study.run(["status", str(tmp_path)]), lambda: RunLock(tmp_path).acquire()]
    for command in commands:
        assert exit_code_of(command) == MachineError.exit_code
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith("the disk of the run or of the study has no locks. Set run_dir to another disk")
