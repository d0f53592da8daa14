"""Odd surroundings of real runs: directories that move, closed streams, sweeps, memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable

from ..integration.conftest import finish
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
