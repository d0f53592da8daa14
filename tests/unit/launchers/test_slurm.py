"""The batch script: its directives, what it refuses, and what stands in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from speechtrain.launchers.slurm import Slurm

from speechtrain.errors import ConfigError
from speechtrain.launch.launcher import Job


def job(folder: Path, world_size: int = 4, **environment: str) -> Job:
    return Job(folder / "config.yaml", folder, world_size, environment)


def directives(script: str) -> set[str]:
    return {line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")}


def test_only_what_is_set_is_said(tmp_path: Path) -> None:
    assert directives(Slurm(nodes=2).script(job(tmp_path))) == {
        *("--job-name=speechtrain", "--nodes=2", "--ntasks-per-node=2", "--signal=TERM@120"),
        *("--requeue", "--open-mode=append"),
    }
    given = Slurm(
        nodes=2, time="12:00:00", partition="main", account="us", cpus_per_rank=8, gpus_per_node=2,
        warn_seconds=60, requeue=False, segments=3,
    )  # fmt: skip
    said = directives(given.script(job(tmp_path)))
    assert {"--time=12:00:00", "--partition=main", "--account=us", "--cpus-per-task=8"} < said
    assert {"--gpus-per-node=2", "--signal=TERM@60", "--no-requeue", "--array=0-2%1"} < said


def test_values_are_quoted_and_secrets_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    folder = tmp_path / "50% $(touch x)"
    text = Slurm().render(job(folder, 1, A="$(touch y)", OMP_NUM_THREADS="8", MY_TOKEN="hush"))
    assert "export A='$(touch y)'" in text
    assert "OMP_NUM_THREADS" not in text  # the user's travels with the job
    assert "hush" not in text
    assert f"'--output={tmp_path}/50%% $(touch x)/slurm.log'" in text


@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_are_shared_evenly(tmp_path: Path, world_size: int) -> None:
    with pytest.raises(ConfigError, match=f"world_size={world_size}"):
        Slurm(nodes=2).check(job(tmp_path, world_size))


@pytest.mark.parametrize(
    "settings",
    [{"nodes": 0}, {"segments": 0}, {"warn_seconds": 0}, {"poll_seconds": 0}, {"partition": "a\nb"}],
)
def test_what_cannot_be_meant_is_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        Slurm(**settings)  # type: ignore[arg-type]


def install_programs(folder: Path, monkeypatch: pytest.MonkeyPatch, **lines: str) -> None:
    """Put shell scripts in place of Slurm's programs. They run in ``folder``."""
    for name, line in lines.items():
        (folder / name).write_text(f"#!/bin/sh\ncd {folder}\n{line}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_launch_names_the_log_and_waits_for_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    states = tmp_path / "states"
    states.write_text("PENDING\nRUNNING\n")
    submit = "echo 'begun' >> 'a run/slurm.log'; echo 7"
    install_programs(tmp_path, monkeypatch, sbatch=submit, squeue="head -n 1 states; sed -i 1d states")
    run_dir = tmp_path / "a run"
    run_dir.mkdir()
    assert Slurm(poll_seconds=0.01).launch(job(run_dir, 1)).returncode == 0
    assert states.read_text() == ""
    log = f"tail -F '{run_dir}/slurm.log'"
    assert capsys.readouterr().out == f"submitted Slurm job 7; to follow its log: {log}\n"
