"""Launcher for several child processes on this machine, with torchrun."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

from speechtrain.launch.launcher import AGENT, Job, Launcher, LaunchResult, escape_for_torchrun, shell_line
from speechtrain.launch.rendezvous import agent_command
from speechtrain.launch.supervise import supervise


@dataclass(eq=False)
class Torchrun(Launcher):
    """Start ``world_size`` ranks under torchrun's agent, which ends all of them when one fails.

    The ranks meet at a free port of the loopback address. So several runs can use the same host, and other
    hosts cannot reach their processes.

    After a failure, the other ranks have ``shutdown_seconds``, at most 30, to end before they are killed. The
    agent then starts all ranks again, up to ``max_restarts`` times, and they continue from the last
    checkpoint.
    """

    is_here = True
    max_restarts: int = 0
    shutdown_seconds: int = 10

    def __post_init__(self) -> None:
        self.check_minimum(0, "max_restarts", "shutdown_seconds")

    def launch(self, job: Job) -> LaunchResult:
        job = self._with_timeout(job)
        code = supervise(
            self._command(job),
            job.environ(),
            agent_log=job.run_dir / AGENT,
            grace=float(self.shutdown_seconds),
        )
        return LaunchResult(code)

    def render(self, job: Job) -> str:
        job = self._with_timeout(job)
        return shell_line(self._command(job), job.environment)

    def _with_timeout(self, job: Job) -> Job:
        """Return ``job`` with torchrun's environment variable for the time that ranks have to shut down."""
        # Releases of torch without this setting ignore the variable. They would refuse an unknown option.
        timeout = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(self.shutdown_seconds)}
        return replace(job, environment={**job.environment, **timeout})

    def _command(self, job: Job) -> list[str]:
        agent = agent_command(sys.executable, job.world_size, nodes=1, restarts=self.max_restarts)
        python, *arguments = job.command
        return [*agent, python, *escape_for_torchrun(arguments)]
