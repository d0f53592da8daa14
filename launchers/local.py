"""Launcher for one child process on this machine."""

from __future__ import annotations

import importlib

from speechtrain.errors import ConfigError
from speechtrain.launch.launcher import WORKER, Job, Launcher, LaunchResult, shell_line
from speechtrain.launch.supervise import supervise


class Local(Launcher):
    """Start the only rank as a child process, with the device's variables set before Python starts.

    ``inline`` runs the rank in this process instead, for a debugger. Environment variables that are read only
    when Python starts (for threads and allocators) then have no effect.
    """

    is_here = True

    def __init__(self, inline: bool = False) -> None:
        self.inline = inline

    def check(self, job: Job) -> None:
        if job.world_size != 1:
            raise ConfigError(
                f"world_size={job.world_size}: launcher=local starts one process. "
                "Use launcher=torchrun, or set world_size=1"
            )

    def launch(self, job: Job) -> LaunchResult:
        if self.inline:
            worker = importlib.import_module(f"{WORKER}.main")
            return LaunchResult(worker.main([str(job.config)]))
        return LaunchResult(supervise(job.command, job.environ()))

    def render(self, job: Job) -> str:
        return shell_line(job.command, job.environment)
