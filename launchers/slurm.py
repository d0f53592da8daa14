"""Launcher for a Slurm batch job: renders and submits it, and waits for it."""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from string import Template

from speechtrain.errors import ConfigError
from speechtrain.files import open_append, write_text, writing
from speechtrain.launcher import Job, Launcher, LaunchResult, here_document, is_secret
from speechtrain.supervision.client import ask_client, call_client
from speechtrain.supervision.node_agent import MODULE
from speechtrain.supervision.rendezvous import rendezvous_port
from speechtrain.supervision.supervise import wait_for_job

SCRIPT = "slurm.sh"
LOG = "slurm.log"
"""Files in the run directory: the submitted script, and the output of the script and of rank 0."""

_TEMPLATE = Path(__file__).parent / "templates" / "slurm.sh"
# Explicit, because the user's SQUEUE_STATES replaces squeue's default.
_UNFINISHED = "PENDING,RUNNING,SUSPENDED,COMPLETING"
_TIME = re.compile(r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}|infinite|unlimited", re.IGNORECASE)
_WORD = re.compile(r"[^\s\x00-\x1f]+")
# the options of sbatch, each with the parameter that holds its value
_SETTINGS = {"job-name": "name", **{key: key for key in ("nodes", "time", "partition", "account")}}
_SETTINGS |= {"cpus-per-task": "cpus_per_rank", "gpus-per-node": "gpus_per_node"}


@dataclass(eq=False)
class Slurm(Launcher):
    """Submit a job in which srun starts ``world_size`` ranks on ``nodes`` nodes.

    ``warn_seconds`` before its ``time`` ends (and when it is preempted) the ranks are asked to save.
    With ``requeue`` the job then goes back into the queue and continues the same run. If a site does not
    allow that, ``segments`` submits an array of that many jobs, which run one after the other.
    ``wait`` waits until the run is over. The first signal then makes the ranks save and exit, and the
    second cancels the job. ``options`` are further options of sbatch.
    """

    files = (SCRIPT, LOG)
    programs = ("sbatch", "squeue", "scancel", "scontrol")
    nodes: int = 1
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    cpus_per_rank: int | None = None
    gpus_per_node: int | None = None
    name: str = "speechtrain"
    warn_seconds: int = 120
    requeue: bool = True
    segments: int = 1
    wait: bool = True
    poll_seconds: float = 5.0
    options: list[str] | None = None

    def __post_init__(self) -> None:
        self.check_minimum(1, "nodes", "segments", "warn_seconds")
        if self.poll_seconds <= 0:
            raise ValueError(f"poll_seconds={self.poll_seconds}: it must be above 0")
        if self.time is not None and not _TIME.fullmatch(self.time):
            raise ValueError(f"time={self.time}: write it as minutes, HH:MM:SS or D-HH:MM:SS")
        for key in _SETTINGS.values():
            setting = getattr(self, key)
            if setting is not None and not _WORD.fullmatch(str(setting)):
                raise ValueError(f"{key}={setting!r}: it must be a word without spaces or line breaks")

    def check(self, job: Job) -> None:
        job.ranks_per_node(self.nodes)
        if "\n" in str(job.run_dir):
            raise ConfigError(f"run_dir={str(job.run_dir)!r}: remove the line break for launcher=slurm")

    def launch(self, job: Job) -> LaunchResult:
        script = self.script(job)
        with writing(job.run_dir / LOG, "remove it or set another run_dir"):  # Slurm follows links.
            write_text(job.run_dir / SCRIPT, script)
            open_append(job.run_dir / LOG).close()
        output = call_client(self._submission(job), "launcher=slurm: sbatch", script)
        number = output.strip().partition(";")[0]
        log = shlex.join(["tail", "-F", str(job.run_dir / LOG)])
        print(f"submitted Slurm job {number}; to follow its log: {log}", flush=True)
        if not self.wait:
            stop = f"scancel --signal=TERM {number}"
            return LaunchResult(0, f"`{stop}` saves the run and ends the job; the same command continues")
        code = wait_for_job(partial(_exit_code, number), partial(_stop, number), self.poll_seconds)
        return LaunchResult(code, log=LOG)

    def render(self, job: Job) -> str:
        return here_document(self._submission(job), self.script(job))

    def script(self, job: Job) -> str:
        # Slurm itself passes the user's variables to the job.
        exports = []
        for name in sorted(job.environment):
            if name not in os.environ and not is_secret(name):
                exports.append(f"export {name}={shlex.quote(job.environment[name])}")
        return Template(_TEMPLATE.read_text()).substitute(
            directives="\n".join(self._directives(job)),
            environment="\n".join(exports),
            folder=shlex.quote(str(Path.cwd())),
            port=rendezvous_port(job.run_dir),
            command=shlex.join(job.on_host(job.command)),
            outcome=shlex.join([sys.executable, "-P", "-m", MODULE, "outcome", str(job.run_dir)]),
        )

    def _directives(self, job: Job) -> list[str]:
        options = {
            **{option: getattr(self, key) for option, key in _SETTINGS.items()},
            "ntasks-per-node": job.ranks_per_node(self.nodes),
            "signal": f"TERM@{self.warn_seconds}",  # to the ranks, not to the batch script
        }
        lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
        requeue = "requeue" if self.requeue else "no-requeue"
        lines += [f"#SBATCH --{requeue}", "#SBATCH --open-mode=append"]
        if self.segments > 1:
            lines.append(f"#SBATCH --array=0-{self.segments - 1}%1")
        return lines

    def _submission(self, job: Job) -> list[str]:
        log = str(job.run_dir / LOG).replace("%", "%%")  # Sbatch replaces patterns such as %j.
        return ["sbatch", "--parsable", f"--output={log}", *(self.options or [])]


def _states(number: str) -> list[str]:
    """Return the states of a job's unfinished parts, or ``UNKNOWN`` while the controller does not answer."""
    squeue = ["squeue", "--noheader", "--format=%T"]
    states = ask_client([*squeue, f"--jobs={number}", f"--states={_UNFINISHED}"])
    if states is None:  # The controller has forgotten the job, or does not answer.
        states = "UNKNOWN" if ask_client(squeue) is None else ""
    return states.split()


def _exit_code(number: str) -> int | None:
    """Return 0 once a job has left the queue. The outcome of the run is in its ``result.json``."""
    return None if _states(number) else 0


def _stop(number: str, signals: int) -> bool:
    """Make a running job save and end, or cancel a job that waits or has got a second signal."""
    if signals > 1 or "RUNNING" not in _states(number):
        ask_client(["scancel", number])
    else:
        ask_client(["scontrol", "update", f"JobId={number}", "Requeue=0"])
        ask_client(["scancel", "--signal=TERM", number])
    return True
