"""The launch of ranks that another program, such as mpirun, has started.

Each rank runs the same ``speechtrain train`` command. Rank 0 composes the config and writes a message into
the run directory. The other ranks wait for this message, and train with the config that rank 0 has written.
"""

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

from speechtrain.distributed.world import World
from speechtrain.errors import ConfigError, MachineError, Preempted, RunError, SpeechtrainError
from speechtrain.files import read_json, write_json
from speechtrain.launch.launcher import RANK_MEMORY, Job, Launcher, LaunchResult
from speechtrain.launch.process_tree import siblings_of
from speechtrain.launch.rendezvous import rendezvous_port
from speechtrain.launch.supervise import supervise
from speechtrain.run_directory import CONFIG, rank_folder, read_result

RENDEZVOUS = "rendezvous.json"
"""File in the run directory: the message of rank 0 to the other ranks of this start."""

_RENDEZVOUS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", RANK_MEMORY)
"""The variables that rank 0 sends to the other ranks. A file with another variable is not from rank 0."""
_POLL_SECONDS = 0.1
_WAIT_SECONDS = 600.0
# Variables by which the starting programs distinguish one start from another.
_START_VARIABLES = (
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_RESTART_COUNT",
    "PMIX_NAMESPACE",
    "TORCHELASTIC_RUN_ID",
)


@dataclass
class ExternalLaunch(Launcher):
    """The launcher of ranks that another program has started. Each rank has its own object.

    Rank 0 composes the config, sends its message and trains in ``launch``. The other ranks wait for the
    message and train in ``join``.
    """

    world: World  # the rank of this process, and the number of ranks
    run_dir: Path
    files = (RENDEZVOUS,)  # overrides the class attribute of Launcher: the files that a launch writes
    is_sent: bool = field(default=False, init=False)  # true: rank 0 has written its message

    def check(self, job: Job) -> None:
        if job.world_size != self.world.size:
            raise ConfigError(
                f"world_size={job.world_size}, but {self.world.size} processes were started together. Remove "
                "world_size, or start as many processes"
            )

    def launch(self, job: Job) -> LaunchResult:
        environment = dict(job.environment)
        if "MASTER_ADDR" not in os.environ:
            is_one_host = self.world.local_size == self.world.size
            environment["MASTER_ADDR"] = "127.0.0.1" if is_one_host else socket.gethostname()
        if "MASTER_PORT" not in os.environ:
            environment["MASTER_PORT"] = str(rendezvous_port(job.run_dir))
        variables = {name: environment[name] for name in _RENDEZVOUS_VARIABLES if name in environment}
        self._send({"environment": variables})
        return LaunchResult(self._train(replace(job, environment=environment)))

    def render(self, job: Job) -> str:
        return f"# {self.world.size} processes were started together. Each runs\n" + " ".join(job.command)

    def _train(self, job: Job) -> int:
        """Run the rank of this process in a child process and return its exit code."""
        # ``start.on_host`` sets the device's variables. The number of threads depends on the number of ranks.
        command = job.on_host(job.command, ranks=_ranks_on_these_cpus(self.world))
        return supervise(command, job.environ())

    @contextmanager
    def reporting_exit_code(self) -> Iterator[None]:
        """Return a context for rank 0. If it ends before rank 0 trains, the other ranks get the exit code."""
        (self.run_dir / RENDEZVOUS).unlink(missing_ok=True)
        code = 1
        try:
            yield
            code = 0
        except SpeechtrainError as error:
            code = error.exit_code
            raise
        finally:
            if not self.is_sent:
                with suppress(OSError):
                    self._send({"code": code})

    def _send(self, content: dict[str, Any]) -> None:
        """Write the message of rank 0 to the other ranks."""
        self.is_sent = True
        write_json(self.run_dir / RENDEZVOUS, {"start": _start_identity(self.world), **content})

    def join(self) -> int:
        """Wait for the message of rank 0, train this rank, which is not rank 0, and return its exit code.

        If rank 0 has failed before training, its exit code is returned.
        """
        message = self._receive()
        if "code" in message:
            return int(message["code"])
        environment = message["environment"]
        unknown = {*environment} - {*_RENDEZVOUS_VARIABLES}
        if unknown:
            path = self.run_dir / RENDEZVOUS
            raise RunError(f"{path} sets {min(unknown)}, which rank 0 never sets. Someone else writes there")
        job = Job(self.run_dir / CONFIG, self.run_dir, world_size=self.world.size, environment=environment)
        code = self._train(job)
        result = read_result(rank_folder(self.run_dir, self.world.rank))
        return Preempted.exit_code if result and result.status == "preempted" else code

    def _receive(self) -> dict[str, Any]:
        """Wait for the message that rank 0 of this start writes, and return it.

        Raises MachineError after ten minutes.
        """
        start_time = time.monotonic()
        path = self.run_dir / RENDEZVOUS
        while time.monotonic() - start_time < _WAIT_SECONDS:
            message = read_json(path)
            if message.get("start") == _start_identity(self.world):
                return message
            time.sleep(_POLL_SECONDS)
        raise MachineError(
            f"rank {self.world.rank} ({socket.gethostname()}, {sys.executable}) found no {path} of rank 0 "
            f"within {_WAIT_SECONDS:.0f} s. Set run_dir to a folder that all hosts share"
        )


def find_external_launch(run_dir: Path | None) -> ExternalLaunch | None:
    """Return the launcher if another program has started this process as one of several ranks, else None.

    Raises ConfigError if there are several ranks and ``run_dir`` is None. Each rank would otherwise choose a
    run directory.
    """
    world = World.from_environment(os.environ)
    if world.size == 1:
        return None
    if run_dir is None:
        raise ConfigError(
            f"run_dir is not set, and this is rank {world.rank} of {world.size} processes that were started "
            "together. Set run_dir=, so that all use the same run directory"
        )
    return ExternalLaunch(world, run_dir)


def _ranks_on_these_cpus(world: World) -> int:
    """Return the number of ranks on this host that share CPUs with this process, including this one.

    The starting program may bind each rank to different CPUs. If the other ranks of this host are not all
    visible as siblings of this process, all of them are assumed to share its CPUs.
    """
    visible_ranks = 0
    sharing_ranks = 0
    with suppress(MachineError, OSError, AttributeError):  # Some systems have no os.sched_getaffinity.
        for pid, environment in siblings_of(os.getpid()).items():
            if World.from_environment(environment).size > 1:
                common_cpus = os.sched_getaffinity(pid) & os.sched_getaffinity(0)
                visible_ranks += 1
                if common_cpus:
                    sharing_ranks += 1
    # A rank is not visible if another process has started it, or if it has ended.
    are_all_visible = visible_ranks == world.local_size - 1
    return 1 + sharing_ranks if are_all_visible else world.local_size


def _start_identity(world: World) -> list[str]:
    """Return values that are equal in all ranks of one start, and differ between two starts."""
    values = [os.environ.get(name, "") for name in _START_VARIABLES]
    if world.local_size == world.size:
        values.append(str(os.getppid()))  # MPICH sets none of these variables, but its ranks have one parent.
    return [*values, str(world.size)]
