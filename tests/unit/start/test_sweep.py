"""Tests of the jobs of a command: the table of a sweep, and the dry runs of a study and of several ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from speechtrain.commands import train
from speechtrain.start.command_line import read_command
from speechtrain.start.sweep import _JobResult, _Jobs
from tests.support.tiny_run import TINY


def table(capsys: pytest.CaptureFixture[str], *results: _JobResult) -> list[str]:
    """Return the lines of the table of a sweep with these results."""
    jobs = _Jobs(read_command(["-m", "device=cpu", "seed=1,2"]))
    jobs.results = [*results]
    jobs._print_table()
    return capsys.readouterr().out.splitlines()


def test_differing_policies_are_the_last_column(capsys: pytest.CaptureFixture[str]) -> None:
    failed = _JobResult("seed=3", "RunError", error="x", exit_code=2)
    results = [replace(job_result(seed, 0.5, 1.0), computes="fp32") for seed in (1, 2)]
    assert "computes" not in "".join(table(capsys, *results, failed))
    results[1] = replace(results[1], computes="fp32 fp32_matmul=medium")
    lines = table(capsys, *results, failed)
    assert lines[0].split()[-1] == "computes"
    assert [line.split()[-1] for line in lines[1:3]] == ["fp32", "fp32_matmul=medium"]


def job_result(seed: int, wer: float, loss: float, speed: str = "") -> _JobResult:
    metrics: dict[str, float | None] = {"wer": wer, "loss": loss, "cer": wer}
    return _JobResult(
        *(f"seed={seed}", "finished", wer), metrics=metrics, metric_text=f"wer {wer:.2%}", speed=speed
    )


def test_the_columns_of_a_table_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    failed = _JobResult("seed=3", "SomeErrorOfALongName", error="x", exit_code=2)
    lines = table(capsys, job_result(1, 0.5, 2.0, "9 utt/s"), job_result(2, 0.25, 2.0, "10.5 utt/s"), failed)
    assert [line.split()[0] for line in lines] == ["job"] * 4
    assert len({line.index("seed=") for line in lines[1:]} | {lines[0].index("overrides")}) == 1
    assert [line.endswith("(best)") for line in lines] == [False, False, True, False]
    assert "speed" not in table(capsys, job_result(1, 0.5, 2.0), failed)[0]


def test_the_loss_decides_between_equal_metrics_and_nothing_between_equal_jobs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = table(capsys, job_result(1, 0.5, 2.0), job_result(2, 0.5, 1.0), job_result(3, 0.5, 3.0))
    assert [line.endswith("(best)") for line in lines] == [False, False, True, False]
    lines = table(capsys, job_result(1, 0.5, 2.0), job_result(2, 0.5, 2.0))
    assert not any("(best)" in line for line in lines)


@pytest.mark.slow
def test_a_dry_run_of_a_study_prints_what_it_searches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUTPUT_DIR", str(tmp_path))
    search = "optimizer.lr=tag(log,interval(1e-3,1e-2))"
    own = ["-m", "hydra/sweeper=study", "hydra.sweeper.n_trials=3", "recipe=demo", "run_dir=study"]
    monkeypatch.chdir(tmp_path)
    assert train.run([*own, search, "dry_run=true"]) == 0
    assert capfd.readouterr().out.splitlines() == [
        f"study {tmp_path}/study: 3 trials, sampler=tpe, it searches",
        search,
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "accumulate"), [(1, 8), (4, 2)])
def test_a_dry_run_prints_the_accumulation(
    world_size: int, accumulate: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    own = [f"world_size={world_size}", "trainer.simulate_world=8", "device.oversubscribe=true"]
    assert train.run([*TINY, *own, f"run_dir={tmp_path}/run", "dry_run=true"]) == 0
    factors = f"trainer.simulate_world=8: world_size {world_size} × accumulate {accumulate}"
    assert f"speechtrain: {factors}\n" in capfd.readouterr().err
