"""Launcher for several child processes on this machine, with torchrun."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from speechtrain.launch.launcher import (
    AGENT,
    SHUTDOWN_SECONDS,
    Job,
    Launcher,
    LaunchResult,
    escape_for_torchrun,
    shell_line,
)
from speechtrain.launch.rendezvous import agent_command
from speechtrain.launch.supervise import supervise


@dataclass(eq=False)
class Torchrun(Launcher):
    """Start ``world_size`` ranks under torchrun's agent, which ends all of them when one fails.

    The ranks meet at a free port of the loopback address. So several runs can use the same host, and other
    hosts cannot reach their processes.

    After a failure, the other ranks have ``shutdown_seconds`` to end before they are killed. The agent then
    starts all ranks again, up to ``max_restarts`` times, and they continue from the last checkpoint.
    """

    is_here = True
    max_restarts: int = 0
    shutdown_seconds: int = 10

    def __post_init__(self) -> None:
        self.check_minimum(0, "max_restarts", "shutdown_seconds")

    def launch(self, job: Job) -> LaunchResult:
        environment = {**self._limit, **job.environ()}
        return LaunchResult(supervise(self._command(job), environment, agent_log=job.run_dir / AGENT))

    def render(self, job: Job) -> str:
        return shell_line(self._command(job), {**self._limit, **job.environment})

    @property
    def _limit(self) -> dict[str, str]:
        return {SHUTDOWN_SECONDS: str(self.shutdown_seconds)}

    def _command(self, job: Job) -> list[str]:
        agent = agent_command(sys.executable, job.world_size, nodes=1, restarts=self.max_restarts)
        python, *arguments = job.command
        return [*agent, python, *escape_for_torchrun(arguments)]
