"""What the tests of every launcher have in common: the run in one process that theirs must equal."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from .conftest import RECORDED, Command
from .forked import Forks

STEPS = 20
ENGINES = {"openmpi": ["--allow-run-as-root", "--oversubscribe"], "mpich": [], "intel": []}
"""Each MPI, and what its mpirun wants in a container."""
TOLERANCE = 1e-5
SIZES = [
    *("trainer.save_every=5000", "trainer.validate_every=5000", *RECORDED),
    "schedule=constant",  # others depend on the planned length
]


def is_everything() -> bool:
    """Whether this is ``make test-cluster``."""
    return os.environ.get("SPEECHTRAIN_ENGINES") == "must"


def skip_without(*programs: str, is_root: bool = False) -> None:
    """Skip the module where the engine is not there, and say what is missing.

    Under ``SPEECHTRAIN_ENGINES=must`` (``make test-cluster``) that is a failure.
    """
    missing = [name for name in programs if shutil.which(name) is None]
    reason = f"not installed here: {', '.join(missing)}" if missing else ""
    if not reason and is_root and os.geteuid():
        reason = "only root may start it"
    if reason and is_everything():
        pytest.fail(reason)
    if reason:
        pytest.skip(reason, allow_module_level=True)


def prepared(engine: str, environment: dict[str, str]) -> dict[str, str]:
    """The environment in which an MPI's mpirun is found; skips where it is not here.

    Intel's comes from PyPI (impi-rt), into the folder of this interpreter, whose name has no engine in it.
    """
    if engine != "intel":
        skip_without(f"mpirun.{engine}")
        return environment
    folder = Path(sys.executable).parent
    if not (folder / "mpiexec.hydra").exists():
        skip_without(f"impi-rt, in {folder}")
    return {**environment, "PATH": f"{folder}{os.pathsep}{environment['PATH']}"}


def run_alone(folder: Path, environment: dict[str, str], forks: Forks) -> Command:
    """One process that accumulates two micro-batches; made once in ``folder``, for all that ask."""
    run = Command(folder / "run", environment, [*SIZES, "trainer.accumulate=2", f"trainer.max_steps={STEPS}"])
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:  # 5 s of CPU that every launcher's tests would take
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (run.run_dir / "result.json").exists():
            assert forks.run(run.write()) == [0], run.result()
    return run


def figures(run: Command) -> np.ndarray:
    """Loss and gradient norm of each update."""
    return np.array([[e["step"], e["loss"], e["grad_norm"]] for e in run.events("train")])


def assert_same(run: Command, alone: Command, is_continued: bool = False) -> None:
    """Two ranks had the losses, gradient norms and samples of one process."""
    assert len(figures(alone)) == STEPS
    np.testing.assert_allclose(figures(run), figures(alone), rtol=TOLERANCE)
    assert sorted(run.handed()) == sorted(alone.handed())
    ranks = [e["ranks"] for e in run.events("start")]
    assert ranks == [2] or (is_continued and set(ranks) == {2})


def processes_of(run: Command) -> list[str]:
    """Command lines of the processes that have this run's directory in them; torchrun's doubles a ``$``."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_text(errors="replace").replace("\0", " ")
        except OSError:
            continue
        if str(run.run_dir) in line.replace("$$", "$") and int(path.parent.name) != os.getpid():
            found.append(f"{path.parent.name} {line}")
    return found
