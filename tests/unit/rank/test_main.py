"""The boundary of a rank: whatever happens, the parent is told, and never by another run's result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from speechtrain.launch.launcher import LaunchResult
from speechtrain.rank.main import _restart_entry
from speechtrain.run_directory import RunLock
from speechtrain.start.compose import compose
from speechtrain.start.resolved import dump
from speechtrain.start.start import _run_result
from speechtrain.tracking.console import start_lines

from ...conftest import Disk


def rank(run_dir: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    config = run_dir / "config.yaml"
    if not config.exists():
        config.write_text("[]")
    line = [sys.executable, "-m", "speechtrain.rank", str(config)]
    return subprocess.run(
        line, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )


def test_a_failure_is_a_result_with_a_code_and_a_trace(tmp_path: Path) -> None:
    done = rank(tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (5, "", "")
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["status"] == "failed"
    assert result["exit_code"] == 5
    assert "config.yaml is damaged" in result["error"]
    assert result["steps"] == 0
    assert "Traceback" in (tmp_path / "error.log").read_text()


RESTARTS = """
import json, os, pathlib, sys
from speechtrain.rank import main as train_rank
folder = pathlib.Path(sys.argv[1])
for count in ("0", "1", "2"):
    if not os.fork():
        os.environ["TORCHELASTIC_RESTART_COUNT"] = count
        os._exit(train_rank.main([str(folder / "config.yaml")]))
    os.wait()
    print(json.dumps(json.loads((folder / "result.json").read_text())), flush=True)
"""
"""Three ranks in turn, forked from one process: an import of torch takes seconds."""


@pytest.mark.slow
def test_a_failure_under_torchrun_says_which_restart_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    (tmp_path / "config.yaml").write_text("[]")
    line = [sys.executable, "-c", RESTARTS, str(tmp_path)]
    process = subprocess.run(line, capture_output=True, text=True, check=True)
    errors = [json.loads(result)["error"] for result in process.stdout.splitlines()]
    assert errors[0] == f"{errors[2]} (restart 1 of 2 follows)"
    assert errors[1] == f"{errors[2]} (restart 2 of 2 follows)"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert start_lines(_restart_entry()) == ["plan     restart 1 of 2"]


@pytest.mark.slow
def test_a_disk_without_room_for_a_file_of_a_rank_is_the_machines_fault(disk: Disk) -> None:
    config = compose(["recipe=demo", "tracking=jsonl", "data.workers=0"])
    config.run_dir = str(disk.path / "run")
    Path(config.run_dir).mkdir()
    (Path(config.run_dir) / "config.yaml").write_text(dump(config))
    disk.mount("remount,nr_inodes=3")
    done = rank(Path(config.run_dir))
    assert done.returncode == 4
    assert "lock" in done.stderr
    disk.mount("remount,nr_inodes=4")  # device.json has no room
    done = rank(Path(config.run_dir))
    assert done.returncode == 4
    assert "result.json cannot be written: [Errno 28] No space left on device" in done.stderr
    with pytest.raises(OSError, match="No space left on device"):  # which is code 4, whatever the agent's is
        _run_result(LaunchResult(1), Path(config.run_dir))


@pytest.mark.slow
def test_a_rank_but_the_first_keeps_its_outcome_to_itself(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("of rank 0")
    done = rank(tmp_path, RANK="1", WORLD_SIZE="2")
    assert (done.returncode, done.stdout, done.stderr) == (5, "", "")
    assert (tmp_path / "result.json").read_text() == "of rank 0"
    assert not (tmp_path / "lock").exists()
    own = tmp_path / "ranks" / "1"
    result = json.loads((own / "result.json").read_text())
    assert (result["status"], result["rank"], result["is_cause"]) == ("failed", 1, True)
    assert "Traceback" in (own / "error.log").read_text()
    assert (own / "output.log").read_text() == ""


@pytest.mark.slow
def test_a_run_of_another_is_left_alone(tmp_path: Path) -> None:
    lock = RunLock(tmp_path).acquire()
    (tmp_path / "result.json").write_text("theirs")
    done = rank(tmp_path)
    lock.release()
    assert done.returncode == 5
    assert f"in use by pid {os.getpid()}" in done.stderr
    assert (tmp_path / "result.json").read_text() == "theirs"
