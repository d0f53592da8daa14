"""A command that another program has started several times: rank 0 composes, the others wait and join."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from speechtrain.errors import ConfigError, MachineError, Preempted, RunError, SpeechtrainError
from speechtrain.files import read_json, write_json
from speechtrain.launcher import RANK_MEMORY, Job, Launcher, Result, World
from speechtrain.run_directory import CONFIG, rank_folder, read_result
from speechtrain.supervision.process_tree import siblings_of
from speechtrain.supervision.rendezvous import rendezvous_port
from speechtrain.supervision.supervise import supervise

RENDEZVOUS = "rendezvous.json"
"""File in the run directory: what rank 0 passes to the other ranks of this start."""

_PASSED = ("MASTER_ADDR", "MASTER_PORT", RANK_MEMORY)
"""The variables that rank 0 passes on. Another one in the file is of somebody who can write there."""
_POLL_SECONDS = 0.1
_WAIT_SECONDS = 600.0
# variables that differ between two starts, if the starter sets them
_STARTS = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "PMIX_NAMESPACE", "TORCHELASTIC_RUN_ID")


@dataclass
class ExternalLaunch(Launcher):
    """Ranks that run already: the launcher of rank 0, for whose file in ``run_dir`` the others wait."""

    world: World
    run_dir: Path
    files = (RENDEZVOUS,)
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
        self._tell({"environment": {n: v for n, v in environment.items() if n in _PASSED}})
        own = replace(job, environment=environment)
        return Result(supervise(own.on_host(own.command, _sharing(self.world)), own.environ()))

    def render(self, job: Job) -> str:
        return f"# {self.world.size} processes were started together; each runs\n" + " ".join(job.command)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """A context in which rank 0 works: if it starts no rank in it, the others learn its exit code."""
        (self.run_dir / RENDEZVOUS).unlink(missing_ok=True)
        code = 1
        try:
            yield
            code = 0
        except SpeechtrainError as error:
            code = error.exit_code
            raise
        finally:
            if not self.told:
                with suppress(OSError):
                    self._tell({"code": code})

    def _tell(self, content: dict[str, Any]) -> None:
        self.told = True
        write_json(self.run_dir / RENDEZVOUS, {"start": _start(self.world), **content})

    def join(self) -> int:
        """Run a rank other than 0: wait for rank 0's file, train, and return the exit code."""
        content = self._heard()
        if "code" in content:
            return int(content["code"])
        size, environment = self.world.size, content["environment"]
        if unknown := {*environment} - {*_PASSED}:
            path = self.run_dir / RENDEZVOUS
            raise RunError(f"{path} sets {min(unknown)}, which rank 0 never does: somebody else writes there")
        job = Job(self.run_dir / CONFIG, self.run_dir, world_size=size, environment=environment)
        code = supervise(job.on_host(job.command, _sharing(self.world)), job.environ())
        result = read_result(rank_folder(self.run_dir, self.world.rank))
        return Preempted.exit_code if result and result.status == "preempted" else code

    def _heard(self) -> dict[str, Any]:
        begun, path = time.monotonic(), self.run_dir / RENDEZVOUS
        while time.monotonic() - begun < _WAIT_SECONDS:
            content = read_json(path)
            if content.get("start") == _start(self.world):
                return content
            time.sleep(_POLL_SECONDS)
        raise MachineError(
            f"rank {self.world.rank} ({socket.gethostname()}, {sys.executable}) found no {path} of rank 0 "
            f"within {_WAIT_SECONDS:.0f} s; set run_dir to a folder that all hosts share"
        )


def started_together(run_dir: Path | None) -> ExternalLaunch | None:
    """The ranks that were started together with this process; None if it is alone.

    Raises ConfigError if there are several and the command line does not name the run directory.
    """
    world = World.from_environment(os.environ)
    if world.size == 1:
        return None
    if run_dir is None:
        raise ConfigError(
            f"run_dir is not set, and this is rank {world.rank} of {world.size} processes that were started "
            "together; set run_dir=, so that all use the same run directory"
        )
    return ExternalLaunch(world, run_dir)


def _sharing(world: World) -> int:
    """The ranks of this host that share this process's CPUs: a starter may bind each rank to its own."""
    peers = []
    with suppress(MachineError, OSError, AttributeError):  # the last where there is no affinity
        for pid, environment in siblings_of(os.getpid()).items():
            if World.from_environment(environment).size > 1:
                peers.append(bool(os.sched_getaffinity(pid) & os.sched_getaffinity(0)))
    is_known = len(peers) == world.local_size - 1  # all were started by one process, and none has ended
    return 1 + sum(peers) if is_known else world.local_size


def _start(world: World) -> list[str]:
    """Values that all processes of this start share, and processes of another start do not."""
    known = [os.environ.get(name, "") for name in _STARTS]
    if world.local_size == world.size:
        known.append(str(os.getppid()))  # MPICH sets none of these variables
    return [*known, str(world.size)]
