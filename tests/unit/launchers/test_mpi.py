"""Which mpirun is taken, and what it is given."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from speechtrain.launchers.mpi import Mpi

from speechtrain.launch.launcher import Job

SAID = {
    "openmpi": "mpirun (Open MPI) 4.1.4",
    "mpich": "HYDRA build details:",
    "intel": "Intel(R) MPI Library\nHYDRA",
}


def program(folder: Path, name: str, said: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\n")
    path.chmod(0o755)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose programs come first."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    return tmp_path


def job(folder: Path, world_size: int = 2, **environment: str) -> Job:
    return Job(folder / "config.yaml", folder, world_size, environment)


@pytest.mark.parametrize("engine", SAID)
def test_an_mpirun_is_what_it_says(engine: str, place: Path) -> None:
    program(place, "mpirun", SAID[engine])
    assert Mpi().detected_engine == engine
    other = next(name for name in SAID if name != engine)
    assert Mpi(engine).missing_program() == ""
    assert f"is {engine}, not engine={other}" in Mpi(other, program="mpirun").missing_program()


def test_what_is_no_mpi_is_refused(place: Path) -> None:
    program(place, "mpirun", "something else")
    assert "is an unknown MPI" in Mpi().missing_program()
    assert "there is no nowhere on this machine" in Mpi(program="nowhere").missing_program()
    with pytest.raises(ValueError, match="engine=lam"):
        Mpi("lam")


@pytest.mark.parametrize(("engine", "option"), [("openmpi", "--hostfile"), ("mpich", "-f"), ("intel", "-f")])
def test_the_ranks_meet_on_the_first_host(engine: str, option: str, place: Path) -> None:
    program(place, "mpirun", SAID[engine])
    (place / "hosts").write_text("# two\n\nfirst:2 # a\nsecond:2\n")
    rendered = Mpi(hostfile=str(place / "hosts"), port=77).render(job(place, 4, A="$(id) b", MY_TOKEN="hush"))
    words = shlex.split(rendered)
    assert words[:3] == ["mpirun", "-n", "4"]
    assert words[words.index(option) + 1] == str(place / "hosts")
    assert {"MASTER_ADDR=first", "MASTER_PORT=77", "A=$(id) b"} < set(words)
    assert words[words.index("-u") + 1] == "SPEECHTRAIN_PARENT"  # of no use on another host
    assert "hush" not in rendered
