"""A disk that fills at each file of a run in turn: code 4, nothing lost, and the same command goes on."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from speechtrain.checkpoint.checkpointer import Checkpointer

from ..conftest import Disk
from .conftest import Run

PLAN = ["trainer.max_steps=6", "trainer.save_every=2", "trainer.validate_every=2", "trainer.keep=1"]


def on(disk: Disk, environment: dict[str, str], *overrides: str) -> Run:
    """A run on a disk of its own."""
    return Run(disk.path / "run", environment, [*PLAN, *overrides])


def finished(run: Run) -> bool:
    return (run.run_dir / "result.json").exists() and run.result()["status"] == "finished"


def check_sound(run: Run) -> None:
    """What must hold whatever failed: all checkpoints are whole, and the best of the record is there."""
    checkpointer = Checkpointer(run.run_dir)
    for folder in checkpointer.folders():
        checkpointer.verify(folder)
    noted = [e for e in run.events("checkpoint") if (run.run_dir / "checkpoints" / e["path"]).exists()]
    assert not noted or checkpointer.folders()
    if finished(run):
        assert f"step-{run.result()['steps']:08d}" in {folder.name for folder in checkpointer.folders()}


@pytest.mark.timeout(3600)
def test_a_disk_without_room_for_the_nth_file(
    disk: Disk, environment: dict[str, str], figures: Callable[[str], None]
) -> None:
    """Each file of a run is one that fails once, from its folder to its last checkpoint's."""
    codes = []
    for files in range(1, 40):
        run = on(disk, environment)
        disk.mount(f"remount,nr_inodes={files}")
        ended = run.run()
        codes.append(ended.returncode)
        assert ended.returncode in (0, 4), (files, ended.stderr)
        assert "Traceback" not in ended.stderr
        check_sound(run)
        disk.mount("remount,nr_inodes=1000")
        again = run.run()
        assert again.returncode == 0, (files, again.stderr)
        assert finished(run)
        check_sound(run)
        subprocess.run(["rm", "-r", str(run.run_dir)], check=True)
        if ended.returncode == 0:
            break
    assert codes[-1] == 0
    figures(f"{codes.count(4)} times code 4, each finished by the same command with room")


@pytest.mark.ci_share
def test_a_cache_on_a_full_disk_is_one_line(
    disk: Disk, run: Callable[..., Run], figures: Callable[[str], None]
) -> None:
    disk.mount("remount,size=64k")
    found = run("run", *PLAN)
    found.environment["SPEECHTRAIN_CACHE"] = str(disk.path)
    ended = found.run()
    assert ended.returncode == 4, ended.stderr
    assert ended.stderr.count("\n") == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    disk.mount("remount,size=10m")
    assert found.run().returncode == 0
    figures("code 4 and one line, then finished")
