from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from speechtrain.compute_policy import usable_cpus
from speechtrain.errors import ConfigError
from speechtrain.study.trial_job import TrialSettings

HOLDER = """
import os, sys
from pathlib import Path
from speechtrain.study.trial_job import _cores

with _cores(int(sys.argv[2]), Path(sys.argv[1])):
    print(sorted(os.sched_getaffinity(0)), flush=True)
    sys.stdin.read()
"""


def hold(folder: Path, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLDER, str(folder), str(count)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.skipif(len(usable_cpus()) < 2, reason="two trials need two cores")
def test_cores_of_two_trials_differ_and_a_third_waits_for_a_killed_one(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("key", ["failed", "refused", "diverged", "out_of_memory"])
def test_trial_settings_refuse_an_unknown_handling(key: str) -> None:
    handling = {"failed": "retry", "refused": "prune", "diverged": "worst", "out_of_memory": "prune"}
    settings = {"trial": 0, "pruner": None, "cores": 1, "retries": 1, **handling}
    assert TrialSettings(**settings)
    with pytest.raises(ConfigError, match=rf"hydra\.sweeper\.{key} is ignore: it is retry, prune or worst"):
        TrialSettings(**{**settings, key: "ignore"})
    with pytest.raises(ConfigError, match=r"hydra\.sweeper\.pruner is best: it is median or null"):
        TrialSettings(**{**settings, "pruner": "best"})
