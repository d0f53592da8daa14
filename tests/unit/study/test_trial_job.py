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
from omegaconf import DictConfig, OmegaConf
from optuna.distributions import FloatDistribution

from speechtrain.compute_policy import usable_cpus
from speechtrain.errors import MachineError, RunError
from speechtrain.run_directory import RunLock, RunResult
from speechtrain.study.objectives import Objective
from speechtrain.study.store import Study, StudySpec, TrialResult
from speechtrain.study.trial_job import _cores, run_trial

HOLDER = """
import os, sys
from speechtrain.study.trial_job import _cores

with _cores(int(sys.argv[1])):
    print(sorted(os.sched_getaffinity(0)), flush=True)
    sys.stdin.read()
"""


def hold(folder: Path, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLDER, str(count)]
    environment = {**os.environ, "TMPDIR": str(folder)}
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
    with pytest.raises(MachineError, match=f"{path}: it belongs to another user"), _cores(1):
        pass


def sweeper(pruner: str | None = None) -> DictConfig:
    return OmegaConf.create({"trial": 5, "pruner": pruner, "cores": 1})


def reported_study(folder: Path, value: float) -> Study:
    """A study with five trials that end with this value at their only validation, and a claimed sixth one."""
    space = {"optimizer.lr": FloatDistribution(1e-3, 1e-2)}
    study = Study(folder, StudySpec(space, [Objective("wer")], n_trials=6))
    for number in range(5):
        study.claim()
        study.report(number, [value])
        study.finish(number, TrialResult("finished"), [value])
    study.claim()
    return study


def test_median_rule_does_not_end_the_command_if_the_run_has_just_ended(tmp_path: Path) -> None:
    study = reported_study(tmp_path, 0.1)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text('{"event": "valid", "step": 1, "set": "dev", "wer": 0.9}\n')

    def end_after_the_signal() -> RunResult:
        deadline = time.monotonic() + 60
        while not study.trials()[5].intermediate_values:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.5)  # The signal follows at once.
        return RunResult("finished", metrics={"wer": 0.9})

    handler = signal.getsignal(signal.SIGTERM)
    assert run_trial(end_after_the_signal, tmp_path, run_dir, sweeper("median")).status == "finished"
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_trial_whose_validation_is_not_a_number_is_pruned(tmp_path: Path) -> None:
    assert reported_study(tmp_path, 0.1).report(5, [math.nan])


def _lock_for_half_a_second(run_dir: Path) -> None:
    threading.Timer(0.5, RunLock(run_dir).acquire().release).start()


def test_a_run_that_another_process_trains_is_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _lock_for_half_a_second(tmp_path)  # a process that an earlier command has left
    starts = []

    def start() -> RunResult:
        RunLock(tmp_path).acquire().release()
        starts.append("free")
        if len(starts) == 1:  # Another process begins with the same run at this moment.
            _lock_for_half_a_second(tmp_path)
            raise RunError("the run is in use")
        return RunResult("finished", metrics={"wer": 0.5})

    assert run_trial(start, tmp_path, tmp_path, sweeper()).metrics == {"wer": 0.5}
    assert len(starts) == 2
    assert capsys.readouterr().out.count(f"waiting for another process that trains {tmp_path}") == 2
