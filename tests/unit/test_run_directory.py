"""The run directory: one run at a time, whose holder is named, and a result that is whole or absent."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from speechtrain.errors import RunError
from speechtrain.run_directory import RESULT, RunLock, about, git_state, outcome, read_result


def test_the_lock_names_its_holder_and_dies_with_it(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from speechtrain.run_directory import RunLock\n"
        f"lock = RunLock(pathlib.Path({str(tmp_path)!r})).acquire()\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(RunError, match=f"in use by pid {holder.pid} on {platform.node()}"):
        RunLock(tmp_path).acquire()
    holder.kill()
    holder.communicate()
    lock = RunLock(tmp_path).acquire()
    assert (tmp_path / "lock").read_text() == f"pid {os.getpid()} on {platform.node()}\n"
    lock.release()
    lock.release()
    RunLock(tmp_path).acquire().release()


def test_a_child_does_not_inherit_the_lock(tmp_path: Path) -> None:
    """A data worker that outlives a killed rank must not keep the run busy."""
    lock = RunLock(tmp_path).acquire()
    program = [sys.executable, "-c", "print(flush=True); input()"]
    child = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False)
    assert child.stdout is not None
    child.stdout.readline()  # it runs: its copy of the lock was closed on the way
    lock.release()
    RunLock(tmp_path).acquire().release()
    child.kill()
    child.communicate()


@pytest.mark.parametrize("content", [None, "", '{"status": "fin', "[1]", "\x00"])
def test_a_result_that_cannot_be_read_is_none(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / RESULT).write_text(content)
    assert read_result(tmp_path) is None


def test_a_result_in_words_is_of_the_best_checkpoint_and_then_of_the_last() -> None:
    result = {"metrics": {"wer": 0.1, "dev/wer": 0.1}, "steps": 20}
    assert outcome({}) == ""
    assert outcome(result) == "dev/wer 10.00 %"  # of an earlier release
    assert outcome({**result, "last_metrics": result["metrics"]}) == "dev/wer 10.00 %"
    other = {"last_metrics": {"wer": 0.2, "dev/wer": None}, "checkpoint": "step-00000012"}
    assert outcome({**result, **other}) == "best at step 12: dev/wer 10.00 %; last dev/wer -"


def test_about_says_how_a_run_came_to_be(tmp_path: Path) -> None:
    said = about(["seed=2"])
    assert said["argv"] == ["seed=2"]
    assert {"python", "torch", "lhotse", "speechtrain"} <= set(said["versions"])
    assert said["host"] == platform.node()
    assert git_state(tmp_path) == {}
