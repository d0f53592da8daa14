"""Sweeps that are started in a stranger's folder: neither jobs nor ranks import its modules."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.strange_folder import NAMES, write_modules

from ..integration.conftest import TINY

MORE = (
    "hydra_plugins",
    "sitecustomize",
    "usercustomize",
    "joblib",
    "cloudpickle",
    "pickle",
    "omegaconf",
    "yaml",
)
SCHEDULERS = {
    "basic": [],
    "joblib": ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
    "submitit_local": ["hydra/launcher=submitit_local"],
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_jobs_of_a_sweep(scheduler: str, tmp_path: Path) -> None:
    strange = tmp_path / "strange"
    strange.mkdir()
    write_modules(strange, (*NAMES, *MORE))
    line = [str(Path(sys.executable).with_name("speechtrain-train")), "-m", *SCHEDULERS[scheduler], *TINY]
    line += [
        "seed=1,2",
        "trainer.max_steps=1",
        "hydra.sweep.dir=../jobs",
        "hydra.sweep.subdir=${hydra.job.num}",
    ]
    done = subprocess.run(
        line, cwd=strange, env={**os.environ}, capture_output=True, text=True, timeout=800, check=False
    )
    assert not (strange / "ran").exists(), (strange / "ran").read_text()
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(tmp_path.glob("jobs/*/result.json"))) == 2
