"""The boundary of a rank: whatever happens, the parent is told, and never by another run's result."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from speechtrain.errors import ConfigError, MachineError
from speechtrain.launcher import PARENT, World
from speechtrain.run_directory import RunLock
from speechtrain.train_rank import StopRequest, trainer_config_for


def rank(run_dir: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "speechtrain.train_rank", str(run_dir / "config.yaml")]
    return subprocess.run(
        line, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )


def test_a_failure_is_a_result_with_a_code_and_a_trace(tmp_path: Path) -> None:
    done = rank(tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["status"] == "failed"
    assert result["exit_code"] == 2
    assert "config.yaml does not exist" in result["error"]
    assert result["steps"] == 0
    assert "Traceback" in (tmp_path / "error.log").read_text()


def test_a_rank_but_the_first_keeps_its_outcome_to_itself(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("of rank 0")
    done = rank(tmp_path, RANK="1", WORLD_SIZE="2")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")
    assert (tmp_path / "result.json").read_text() == "of rank 0"
    assert not (tmp_path / "lock").exists()
    own = tmp_path / "ranks" / "1"
    result = json.loads((own / "result.json").read_text())
    assert (result["status"], result["rank"], result["is_cause"]) == ("failed", 1, True)
    assert "Traceback" in (own / "error.log").read_text()
    assert (own / "output.log").read_text() == ""


def test_a_world_that_the_run_does_not_have_is_refused() -> None:
    config = OmegaConf.create({"world_size": 1, "trainer": {"simulate_world": 6}})
    assert trainer_config_for(config, World()).accumulate == 6
    with pytest.raises(MachineError, match="WORLD_SIZE=2 in the environment, but the run has world_size=1"):
        trainer_config_for(config, World(0, 2))
    config.world_size = 4
    with pytest.raises(ConfigError, match="is not a multiple of world_size=4"):
        trainer_config_for(config, World(0, 4))


def test_a_run_of_another_is_left_alone(tmp_path: Path) -> None:
    lock = RunLock(tmp_path).acquire()
    (tmp_path / "result.json").write_text("theirs")
    done = rank(tmp_path)
    lock.release()
    assert done.returncode == 5
    assert f"in use by pid {os.getpid()}" in done.stderr
    assert (tmp_path / "result.json").read_text() == "theirs"


def test_a_rank_that_outlived_its_command_before_it_could_ask_stops(tmp_path: Path) -> None:
    code = (
        "from speechtrain.train_rank import StopRequest, _stop_with_parent\n"
        "stop = StopRequest(); _stop_with_parent(stop); print(stop())"
    )
    gone = "999999999"
    for parent, expected in (
        *((str(os.getpid()), "False"), (gone, "True"), ("", "False")),
        (str(os.getppid()), "False"),  # this process is the agent between
    ):
        environment = {**os.environ, PARENT: parent}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert done.stdout.strip() == expected, done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_request(number: int) -> None:
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, before)
        signal.pthread_kill(
            threading.get_ident(), number
        )  # waits, as it does while a rank imports its libraries
        stop = StopRequest()
        assert stop()
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)


@pytest.mark.parametrize("environ", [{"RANK": "0"}, {"WORLD_SIZE": "2"}, {"RANK": "x", "WORLD_SIZE": "2"}])
def test_half_a_world_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(MachineError, match="environment variable"):
        World.from_environment(environ)
