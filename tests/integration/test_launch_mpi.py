"""Two ranks of each MPI that is here train what one process does, and are stopped like any others."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from speechtrain.launch.process_tree import descendants_running

from .conftest import DEADLINE, Command, beyond_loopback, finish, wait_for
from .engines import (
    ENGINES,
    SIZES,
    STEPS,
    assert_same,
    is_everything,
    prepared,
    processes_of,
)

pytestmark = pytest.mark.nightly


def with_mpi(engine: str, folder: Path, environment: dict[str, str]) -> Command:
    """Two ranks, which ``launcher=mpi`` starts."""
    options = f"launcher.options=[{','.join(ENGINES[engine])}]"
    mpi = ["launcher=mpi", f"launcher.engine={engine}", options, "world_size=2", "trainer.simulate_world=2"]
    return Command(folder / "run", prepared(engine, environment), [*SIZES, *mpi])


@pytest.mark.ci_share
@pytest.mark.parametrize("engine", ENGINES)
def test_two_ranks_train_what_one_process_does_after_an_early_signal(
    engine: str, tmp_path: Path, environment: dict[str, str], alone: Command
) -> None:
    run = with_mpi(engine, tmp_path, environment)
    if engine == "intel" or is_everything():  # its mpirun is a script, which the others' are not
        process = run.start(f"trainer.max_steps={STEPS}")
        wait_for(lambda: descendants_running(process.pid, "speechtrain.rank"), process)
        process.send_signal(signal.SIGTERM)  # while the ranks import their libraries
        ended = finish(process)
        assert ended.returncode == 75, ended.stderr
        assert run.result()["steps"] <= 1
        assert processes_of(run) == []

    done = run.run(f"trainer.max_steps={STEPS}")
    assert (done.returncode, done.stderr) == (0, "")
    assert_same(run, alone, is_continued=True)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_signal_saves_a_rank_that_dies_ends_all_and_nothing_outlives_the_command(
    engine: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    run = with_mpi(engine, tmp_path, environment)
    process = run.start("trainer.max_steps=5000")
    wait_for(lambda: len(run.events("train")) >= 2, process)
    if engine == "openmpi":  # mpirun itself listens on all addresses, and MPICH's ranks inherit that socket
        ranks = descendants_running(process.pid, "speechtrain.rank")
        assert [beyond_loopback(pid) for pid in ranks] == [[], []]
    process.send_signal(signal.SIGTERM)
    ended = finish(process)
    assert ended.returncode == 75, ended.stderr
    assert run.checkpoints()[-1].name == f"step-{run.result()['steps']:08d}"

    before = len(run.events("train"))
    process = run.start("trainer.max_steps=5000")
    wait_for(lambda: len(run.events("train")) > before, process)
    os.kill(max(descendants_running(process.pid, "speechtrain.rank")), signal.SIGKILL)
    assert finish(process).returncode not in (0, 75)
    wait_for(lambda: not processes_of(run))

    before = len(run.events("train"))
    process = run.start("trainer.max_steps=5000")
    wait_for(lambda: len(run.events("train")) > before, process)
    process.kill()  # nobody is left to ask
    process.communicate(timeout=DEADLINE)
    wait_for(lambda: not processes_of(run))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_command_that_is_one_of_several_joins_the_others(
    engine: str, tmp_path: Path, environment: dict[str, str], alone: Command
) -> None:
    """``mpirun -n 2 speechtrain train …``: as sites do that start everything so."""
    run = Command(tmp_path / "run", prepared(engine, environment), [*SIZES, "trainer.simulate_world=2"])
    program = "mpirun" if engine == "intel" else f"mpirun.{engine}"
    command = [program, "-n", "2", *ENGINES[engine], sys.executable, "-m", "speechtrain.commands.train"]
    command += [*run.arguments, f"trainer.max_steps={STEPS}"]
    done = finish(run._popen(command))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert_same(run, alone)
    assert done.stdout.count("finished at step") == 1  # one of them speaks
    if engine != "openmpi":
        return  # what follows is the same for all

    done = finish(run._popen(command))  # finished: all return at once
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("is done") == 1

    without = [argument for argument in command if not argument.startswith("run_dir=")]
    done = finish(run._popen(without))
    assert done.returncode != 0
    assert "run_dir" in done.stderr
