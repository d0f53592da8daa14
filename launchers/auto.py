"""The default launcher: it passes a job on to another launcher, chosen by the number of ranks."""

from __future__ import annotations

from speechtrain.launch.launcher import Job, Launcher, LaunchResult


class Auto(Launcher):
    """Start a job of one rank with ``one``, and any other job with ``more``. Both start it on this host."""

    is_here = True

    def __init__(self, one: Launcher, more: Launcher) -> None:
        self.one = one
        self.more = more

    def _launcher_for(self, job: Job) -> Launcher:
        return self.one if job.world_size == 1 else self.more

    def launch(self, job: Job) -> LaunchResult:
        return self._launcher_for(job).launch(job)

    def render(self, job: Job) -> str:
        return self._launcher_for(job).render(job)
