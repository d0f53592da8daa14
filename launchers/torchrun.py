"""Launcher for several child processes on this machine, with torchrun."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

from speechtrain.launcher import AGENT, Job, Launcher, Result, escape_for_torchrun, shell_line
from speechtrain.supervision.rendezvous import RESTARTABLE
from speechtrain.supervision.supervise import supervise


@dataclass(eq=False)
class Torchrun(Launcher):
    """Start ``world_size`` ranks under torchrun's agent, which ends all of them when one fails.

    The ranks meet at a free port of this host, so that runs on the same host do not collide. The agent
    starts all ranks again up to ``max_restarts`` times, and they continue from the last checkpoint.
    After a failure, the other ranks have ``shutdown_seconds`` to end before they are killed; the agent
    itself waits at most 30 s.
    """

    max_restarts: int = 0
    shutdown_seconds: int = 10

    def __post_init__(self) -> None:
        self.check_minimum(0, "max_restarts", "shutdown_seconds")

    def is_here(self, job: Job) -> bool:
        return True

    def launch(self, job: Job) -> Result:
        job = self._prepared(job)
        grace = float(self.shutdown_seconds)
        return Result(supervise(self._command(job), job.environ(), job.run_dir / AGENT, grace=grace))

    def render(self, job: Job) -> str:
        job = self._prepared(job)
        return shell_line(self._command(job), job.environment)

    def _prepared(self, job: Job) -> Job:
        # a variable, not an option: torch releases that do not know it ignore it
        variables = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(self.shutdown_seconds)}
        variables |= RESTARTABLE if self.max_restarts else {}
        return replace(job, environment={**job.environment, **variables})

    def _command(self, job: Job) -> list[str]:
        return [
            # by address: a host whose own name does not resolve would wait for its ranks without a word
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"),
            *(f"--nproc-per-node={job.world_size}", f"--max-restarts={self.max_restarts}"),
            # the same worker command as with every launcher
            *("--no-python", job.command[0], *escape_for_torchrun(job.command[1:])),
        ]
