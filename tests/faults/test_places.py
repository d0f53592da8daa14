"""Odd surroundings of real runs: directories that move, closed streams, sweeps, memory."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ..integration.conftest import finish, wait_for
from .conftest import SLOW_DATA, Run

LONG = [*SLOW_DATA, "trainer.max_steps=60", "trainer.save_every=10", "trainer.validate_every=60"]


def slow(run: Callable[..., Run], name: str, *overrides: str) -> Run:
    """A run of 60 updates that takes seconds."""
    found = run(name, *LONG, *overrides)
    found.environment["FAULTS_PAUSE"] = "0.1"
    return found


def test_a_run_directory_that_is_renamed_is_not_torn_in_two(
    run: Callable[..., Run], figures: Callable[[str], None]
) -> None:
    found = slow(run, "run")
    process = found.start()
    found.wait_for_step(12, process)
    moved = found.run_dir.with_name("moved")
    found.run_dir.rename(moved)
    ended = finish(process)
    assert ended.returncode == 4, ended.stderr
    assert "was moved or removed while the run went on" in ended.stderr
    assert not (found.run_dir / "checkpoints").exists()
    shutil.rmtree(found.run_dir, ignore_errors=True)
    moved.rename(found.run_dir)
    again = found.run()
    assert again.returncode == 0, again.stderr
    assert sorted(found.losses()) == list(range(1, 61))
    figures("code 4, then continued from where it was")


@pytest.mark.parametrize(
    "when", ["at once", "in start-up", pytest.param("in training", marks=pytest.mark.ci_share)]
)
def test_of_two_commands_in_one_directory_one_trains(
    run: Callable[..., Run], when: str, figures: Callable[[str], None]
) -> None:
    found = slow(run, "run")
    first = found.start()
    if when == "in start-up":
        wait_for((found.run_dir / "lock").exists, first, "a lock")
    elif when == "in training":
        found.wait_for_step(2, first)
    second = found.start()
    ended = [finish(first), finish(second)]
    assert sorted(e.returncode for e in ended) == [0, 5], [e.stderr for e in ended]
    (refused,) = [e for e in ended if e.returncode == 5]
    assert "is in use by pid" in refused.stderr
    steps = [e["step"] for e in found.events("train")]
    assert steps == list(range(1, 61))
    figures("codes 0 and 5, 60 updates in order")


@pytest.mark.parametrize("streams", ["stdin", "stdout", "stdout and stderr", "a reader that leaves"])
def test_streams_that_are_closed_stop_no_run(run: Callable[..., Run], streams: str) -> None:
    found = run("run", "trainer.max_steps=4", "trainer.save_every=4")
    shell = {"stdin": "<&-", "stdout": ">&-", "stdout and stderr": ">&- 2>&-"}.get(streams, "| head -0")
    line = 'exec "$@" ' + shell if "head" not in shell else 'set -o pipefail; "$@" ' + shell
    command = [sys.executable, "-m", "speechtrain.commands.train", *found.arguments]
    done = subprocess.run(["bash", "-c", line, "bash", *command], env=found.environment, timeout=300)
    assert done.returncode == 0
    assert found.result()["status"] == "finished"
    assert [c.name for c in found.checkpoints()] == ["step-00000004"]


@pytest.mark.timeout(3600)
def test_a_sweep_that_is_stopped_and_killed_ends_with_all_its_jobs(
    run: Callable[..., Run], figures: Callable[[str], None]
) -> None:
    found = slow(run, "sweep", "trainer.max_steps=12", "trainer.validate_every=12")
    arguments = ["-m", *found.arguments, "optimizer.lr=1e-3,2e-3,4e-3"]

    def jobs() -> list[Path]:
        return sorted(path.parent for path in found.run_dir.glob("*/metrics.jsonl"))

    found.arguments = arguments
    process = found.start()
    wait_for(lambda: len(jobs()) >= 2, process, "a second job")
    process.send_signal(signal.SIGTERM)
    assert finish(process).returncode == 75
    found.wait_until_gone()
    done = {
        job: (job / "metrics.jsonl").read_bytes()
        for job in jobs()
        if (job / "result.json").exists() and Run(job, found.environment, []).result()["status"] == "finished"
    }
    assert done
    process = found.start()
    wait_for(lambda: len(jobs()) == 3, process, "a third job")
    process.kill()
    finish(process)
    found.wait_until_gone()
    last = found.run()
    assert last.returncode == 0, last.stderr
    assert len(jobs()) == 3
    for job in jobs():
        each = Run(job, found.environment, [])
        assert each.result()["status"] == "finished"
        assert sorted(each.losses()) == list(range(1, 13))
    for job, record in done.items():
        assert (job / "metrics.jsonl").read_bytes() == record
    figures("75, killed, then 3 of 3 jobs finished, the first of them once")


def test_memory_threads_and_descriptors_do_not_grow(
    run: Callable[..., Run], figures: Callable[[str], None]
) -> None:
    """Of the rank and its data worker, over 900 updates and nine validations and saves."""
    found = run(
        "run",
        *SLOW_DATA,
        *("data.workers=1", "trainer.max_steps=1500", "trainer.log_every=10"),
        *("trainer.save_every=100", "trainer.validate_every=100", "data.valid.unheard.utterances=2"),
    )
    process = found.start()
    measured = {}
    for step in (600, 1400):
        found.wait_for_step(step, process)
        rank, worker = found.ranks()[0], found.data_workers()[0]
        measured[step] = [
            (each.memory_info().rss / 2**20, each.num_threads(), each.num_fds()) for each in (rank, worker)
        ]
    ended = finish(process)
    assert ended.returncode == 0, ended.stderr
    for before, after in zip(*measured.values(), strict=True):
        assert after[1] == before[1]
        assert after[2] <= before[2] + 2  # one that is open while it is written
        assert after[0] < before[0] + 30
    told = [f"{a[0]:.0f} to {b[0]:.0f} MiB" for a, b in zip(*measured.values(), strict=True)]
    figures(f"rank {told[0]}, data worker {told[1]} from update 600 to 1400")
