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
from speechtrain.files import is_secret, open_append, write_text, writing
from speechtrain.launch.client import ask_client, call_client
from speechtrain.launch.launcher import Job, Launcher, LaunchResult, here_document
from speechtrain.launch.node_agent import MODULE
from speechtrain.launch.rendezvous import rendezvous_port
from speechtrain.launch.supervise import wait_for_job

SCRIPT = "slurm.sh"
LOG = "slurm.log"
"""Files in the run directory: the submitted script, and the output of the script and of rank 0."""

_TEMPLATE = Path(__file__).parent / "templates" / "slurm.sh"
# Explicit, because the user's SQUEUE_STATES replaces squeue's default.
_UNFINISHED = "PENDING,RUNNING,SUSPENDED,COMPLETING"
_TIME = re.compile(r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}|infinite|unlimited", re.IGNORECASE)
_WORD = re.compile(r"[^\s\x00-\x1f]+")
# The options of sbatch, each with the parameter of ``Slurm`` that is its value.
_PARAMETERS = {
    "job-name": "name",
    "nodes": "nodes",
    "time": "time",
    "partition": "partition",
    "account": "account",
    "cpus-per-task": "cpus_per_rank",
    "gpus-per-node": "gpus_per_node",
}


@dataclass(eq=False)
class Slurm(Launcher):
    """Submit a job in which srun starts ``world_size`` ranks on ``nodes`` nodes.

    The ranks save ``warn_seconds`` before the job's ``time`` is over, and when the job is preempted. With
    ``requeue`` the job then goes back into the queue and continues the same run. If a site does not allow
    that, set ``segments``: an array of this number of jobs is submitted, which run one after the other.

    With ``wait`` the command waits until the run is over. The first signal to the command makes the ranks
    save and exit, and the second signal cancels the job. ``options`` are further options of sbatch.
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
        self.check_minimum(0.01, "poll_seconds")
        if self.time is not None and not _TIME.fullmatch(self.time):
            raise ValueError(f"time={self.time}: write it as minutes, HH:MM:SS or D-HH:MM:SS")
        for parameter in _PARAMETERS.values():
            setting = getattr(self, parameter)
            if setting is not None and not _WORD.fullmatch(str(setting)):
                raise ValueError(f"{parameter}={setting!r}: it must be a word without spaces or line breaks")

    def check(self, job: Job) -> None:
        job.ranks_per_node(self.nodes)
        if "\n" in str(job.run_dir):
            raise ConfigError(f"run_dir={str(job.run_dir)!r}: remove the line break for launcher=slurm")

    def launch(self, job: Job) -> LaunchResult:
        script = self.script(job)
        log = job.run_dir / LOG
        with writing(log, "remove it or set another run_dir"):
            write_text(job.run_dir / SCRIPT, script)
            # Slurm would follow a symbolic link at the log's path. Opening the log here refuses a link.
            open_append(log).close()
        output = call_client(self._submission(job), "launcher=slurm: sbatch", script)
        job_id, _, _ = output.strip().partition(";")  # The output is "ID" or "ID;CLUSTER".
        follow = shlex.join(["tail", "-F", str(log)])
        print(f"submitted Slurm job {job_id}; to follow its log: {follow}", flush=True)
        if not self.wait:
            stop = f"scancel --signal=TERM {job_id}"
            return LaunchResult(0, f"`{stop}` saves the run and ends the job; the same command continues")
        code = wait_for_job(partial(_exit_code, job_id), partial(_stop, job_id), self.poll_seconds)
        return LaunchResult(code, log=LOG)

    def render(self, job: Job) -> str:
        return here_document(shlex.join(self._submission(job)), self.script(job))

    def script(self, job: Job) -> str:
        """Return the batch script."""
        # Only variables that the user has not set are exported, because Slurm passes the user's to the job.
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
        """Return the script's lines that set options of sbatch."""
        options = {option: getattr(self, parameter) for option, parameter in _PARAMETERS.items()}
        options["ntasks-per-node"] = job.ranks_per_node(self.nodes)
        options["signal"] = f"TERM@{self.warn_seconds}"  # Slurm signals the ranks, not the batch script.
        lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
        requeue = "requeue" if self.requeue else "no-requeue"
        lines += [f"#SBATCH --{requeue}", "#SBATCH --open-mode=append"]
        if self.segments > 1:
            lines.append(f"#SBATCH --array=0-{self.segments - 1}%1")  # "%1" allows one job at a time.
        return lines

    def _submission(self, job: Job) -> list[str]:
        """Return the command that submits the script, which it reads on its standard input."""
        log = str(job.run_dir / LOG).replace("%", "%%")  # Sbatch replaces patterns such as %j.
        return ["sbatch", "--parsable", f"--output={log}", *(self.options or [])]


def _exit_code(job_id: str) -> int | None:
    """Return 0 once a job has left the queue, and None before.

    0 does not mean success: the result of the run is in its ``result.json``.
    """
    return None if _states(job_id) else 0


def _stop(job_id: str, signals: int) -> bool:
    """Make a running job save and end. Cancel a job that waits in the queue, or after the second signal.

    Return True, so that ``wait_for_job`` does not repeat the call for the same signal.
    """
    if signals > 1 or "RUNNING" not in _states(job_id):
        ask_client(["scancel", job_id])
    else:
        ask_client(["scontrol", "update", f"JobId={job_id}", "Requeue=0"])
        ask_client(["scancel", "--signal=TERM", job_id])
    return True


def _states(job_id: str) -> list[str]:
    """Return the state of the job, or the states of all jobs of an array, without finished jobs.

    Return ``["UNKNOWN"]`` while Slurm's controller does not answer.
    """
    squeue = ["squeue", "--noheader", "--format=%T"]
    output = ask_client([*squeue, f"--jobs={job_id}", f"--states={_UNFINISHED}"])
    if output is not None:
        return output.split()
    # squeue fails if the controller does not answer, and also if the controller has forgotten the job.
    controller_answers = ask_client(squeue) is not None
    return [] if controller_answers else ["UNKNOWN"]
