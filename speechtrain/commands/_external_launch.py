"""A command that another program has started several times: rank 0 composes, the others wait and join."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from speechtrain.errors import ConfigError, MachineError, Preempted, SpeechtrainError
from speechtrain.files import read_json, write_json
from speechtrain.launcher import Job, Launcher, Result, World
from speechtrain.run_directory import CONFIG, rank_folder, read_result
from speechtrain.supervision.rendezvous import rendezvous_port
from speechtrain.supervision.supervise import supervise

RENDEZVOUS = "rendezvous.json"
"""File in the run directory: what rank 0 passes to the other ranks of this start."""

_POLL_SECONDS = 0.1
_WAIT_SECONDS = 600.0
# variables that differ between two starts, if the starter sets them
_STARTS = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "PMIX_NAMESPACE", "TORCHELASTIC_RUN_ID")


def world_of(argv: list[str]) -> World:
    """This process's rank among processes that were started together; rank 0 of 1 if it is alone.

    Raises ConfigError if there are several and ``argv`` does not name the run directory.
    """
    world = World.from_environment(os.environ)
    if world.size > 1 and explicit_run_dir(argv) is None:
        raise ConfigError(
            f"run_dir is not set, and this is rank {world.rank} of {world.size} processes that were started "
            "together; set run_dir=, so that all use the same run directory"
        )
    return world


def explicit_run_dir(argv: list[str]) -> Path | None:
    """The run directory that the command line names; None for a sweep, which has several."""
    named = [value for key, _, value in (a.partition("=") for a in argv) if key == "run_dir"]
    if not named or {"-m", "--multirun"} & set(argv):
        return None
    text = named[-1]
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        quote, text = text[0], text[1:-1]
        text = text.replace(f"\\{quote}", quote).replace("\\\\", "\\")
    return Path(text).resolve()


def _start(world: World) -> list[str]:
    """Values that all processes of this start share, and processes of another start do not."""
    known = [os.environ.get(name, "") for name in _STARTS]
    if world.local_size == world.size:
        known.append(str(os.getppid()))  # MPICH sets none of these variables
    return [*known, str(world.size)]


@dataclass
class ExternalLaunch(Launcher):
    """Rank 0's launcher: the other ranks run already, and only wait for its file."""

    world: World
    told: bool = field(default=False, init=False)

    def check(self, job: Job) -> None:
        if job.world_size != self.world.size:
            raise ConfigError(
                f"world_size={job.world_size}, but {self.world.size} processes were started together; remove "
                "world_size, or start as many processes"
            )

    def launch(self, job: Job) -> Result:
        environment = dict(job.environment)
        if "MASTER_ADDR" not in os.environ:
            is_here = self.world.local_size == self.world.size
            environment["MASTER_ADDR"] = "127.0.0.1" if is_here else socket.gethostname()
        if "MASTER_PORT" not in os.environ:
            environment["MASTER_PORT"] = str(rendezvous_port(job.run_dir))
        self.tell(job.run_dir, {"environment": environment})
        own = Job(job.config, job.run_dir, job.world_size, environment)
        return Result(supervise(own.command, own.environ()))

    def render(self, job: Job) -> str:
        return f"# {self.world.size} processes were started together; each runs\n" + " ".join(job.command)

    def tell(self, run_dir: Path, content: dict[str, Any]) -> None:
        """Write ``content`` for the other ranks, which then continue or exit."""
        self.told = True
        write_json(run_dir / RENDEZVOUS, {"start": _start(self.world), **content})

    @contextmanager
    def telling(self, run_dir: Path) -> Iterator[None]:
        """A context that reports to the other ranks in any case, also if rank 0 fails in it."""
        (run_dir / RENDEZVOUS).unlink(missing_ok=True)
        code = 1
        try:
            yield
            code = 0
        except SpeechtrainError as error:
            code = error.exit_code
            raise
        finally:
            if not self.told and run_dir.is_dir():
                with suppress(OSError):
                    self.tell(run_dir, {"code": code})


def join(argv: list[str], world: World) -> int:
    """Run a rank other than 0: wait for rank 0's file, train, and return the exit code."""
    run_dir = explicit_run_dir(argv)
    assert run_dir is not None  # world_of has checked it
    content = _heard(run_dir, world)
    if "code" in content:
        return int(content["code"])
    job = Job(run_dir / CONFIG, run_dir, world.size, content["environment"])
    code = supervise(job.command, job.environ())
    result = read_result(rank_folder(run_dir, world.rank)) or {}
    return Preempted.exit_code if result.get("status") == "preempted" else code


def _heard(run_dir: Path, world: World) -> dict[str, Any]:
    begun = time.monotonic()
    while time.monotonic() - begun < _WAIT_SECONDS:
        content = read_json(run_dir / RENDEZVOUS)
        if content.get("start") == _start(world):
            return content
        time.sleep(_POLL_SECONDS)
    raise MachineError(
        f"rank {world.rank} ({socket.gethostname()}, {sys.executable}) found no {run_dir / RENDEZVOUS} of "
        f"rank 0 within {_WAIT_SECONDS:.0f} s; set run_dir to a folder that all hosts share"
    )
