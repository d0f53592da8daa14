"""Two ranks of each MPI that is here train what one process does, and are stopped like any others."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from speechtrain.processes import descendants_running

from .conftest import DEADLINE, Command, finish, wait_for
from .engines import SIZES, STEPS, assert_same, processes_of, run_alone, skip_without

ENGINES = {"openmpi": ["--allow-run-as-root", "--oversubscribe"], "mpich": []}
FOUND = [name for name in ENGINES if shutil.which(f"mpirun.{name}")]
if not FOUND:
    skip_without("mpirun.openmpi", "mpirun.mpich")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Command:
    return run_alone(tmp_path_factory.mktemp("alone"), environment)


@pytest.mark.parametrize("engine", ENGINES)
def test_two_ranks_train_what_one_process_does(
    engine: str, command: Callable[..., Command], alone: Command
) -> None:
    skip_without(f"mpirun.{engine}")
    mpi = ["launcher=mpi", f"launcher.engine={engine}", f"launcher.options=[{','.join(ENGINES[engine])}]"]
    run = command("run", *SIZES, *mpi, "world_size=2", "trainer.simulate_world=2")
    done = run.run(f"trainer.max_steps={STEPS}")
    assert (done.returncode, done.stderr) == (0, "")
    assert_same(run, alone)

    process = run.start("trainer.max_steps=5000")
    wait_for(lambda: len(run.events("train")) >= STEPS + 2, process)
    process.send_signal(signal.SIGTERM)
    ended = finish(process)
    assert ended.returncode == 75, ended.stderr
    assert run.checkpoints()[-1].name == f"step-{run.result()['steps']:08d}"
    assert processes_of(run) == []


@pytest.mark.parametrize("engine", FOUND)
def test_a_command_that_is_one_of_several_joins_the_others(
    engine: str, tmp_path: Path, environment: dict[str, str], alone: Command
) -> None:
    """``mpirun -n 2 speechtrain-train …``: as sites do that start everything so."""
    run = Command(tmp_path / "run", environment, [*SIZES, "trainer.simulate_world=2"])
    line = [f"mpirun.{engine}", "-n", "2", *ENGINES[engine]]
    command = [*line, sys.executable, "-m", "speechtrain.commands.train", *run.arguments]
    done = finish(run._popen([*command, f"trainer.max_steps={STEPS}"]))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert_same(run, alone)
    assert done.stdout.count("finished at step") == 1  # one of them speaks

    done = finish(run._popen([*command, f"trainer.max_steps={STEPS}"]))  # finished: all return at once
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("is done") == 1

    without = [argument for argument in command if not argument.startswith("run_dir=")]
    done = finish(run._popen(without))
    assert done.returncode != 0
    assert "run_dir" in done.stderr


@pytest.mark.parametrize("engine", FOUND)
def test_a_rank_that_dies_ends_all_an_early_signal_saves_and_nothing_outlives_the_command(
    engine: str, command: Callable[..., Command]
) -> None:
    mpi = ["launcher=mpi", f"launcher.engine={engine}", f"launcher.options=[{','.join(ENGINES[engine])}]"]
    run = command("run", *SIZES, *mpi, "world_size=2", "trainer.max_steps=5000")
    process = run.start()
    wait_for(lambda: descendants_running(process.pid, "speechtrain.worker"), process)
    process.send_signal(signal.SIGTERM)  # while the ranks import their libraries
    ended = finish(process)
    assert ended.returncode == 75, ended.stderr

    process = run.start()
    wait_for(lambda: run.events("train"), process)
    os.kill(max(descendants_running(process.pid, "speechtrain.worker")), signal.SIGKILL)
    assert finish(process).returncode not in (0, 75)
    wait_for(lambda: not processes_of(run))

    before = len(run.events("train"))
    process = run.start()
    wait_for(lambda: len(run.events("train")) > before, process)
    process.kill()  # nobody is left to ask
    process.communicate(timeout=DEADLINE)
    wait_for(lambda: not processes_of(run))
