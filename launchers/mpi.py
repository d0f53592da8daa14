"""Launcher for ranks with mpirun: Open MPI, MPICH or Intel MPI."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from functools import cached_property

from speechtrain.errors import ConfigError
from speechtrain.launcher import AGENT, PARENT, Job, Launcher, LaunchResult, forwarded_environment, host_lines
from speechtrain.supervision.rendezvous import port_error, rendezvous_port
from speechtrain.supervision.supervise import supervise

# Each pattern matches the output of `mpirun --version`. Intel MPI is built on Hydra, so its output has HYDRA.
_VERSION_PATTERNS = {
    "openmpi": r"Open ?MPI|OpenRTE|open-mpi",
    "intel": r"Intel\(R\) MPI",
    "mpich": r"HYDRA|MPICH",
}
# A rank uses several cores, so mpirun must not bind it to one core. The device binds it. Intel MPI binds
# before it starts `env`, so a variable that `env` sets would come too late.
_OPTIONS = {"openmpi": "--bind-to none", "intel": "-genv I_MPI_PIN 0", "mpich": "-bind-to none"}
_PROGRAMS = {"openmpi": "mpirun.openmpi", "intel": "mpirun", "mpich": "mpirun.mpich"}
_HOSTS = {"openmpi": "--hostfile", "intel": "-f", "mpich": "-f"}


@dataclass(eq=False)
class Mpi(Launcher):
    """Start ``world_size`` ranks with mpirun. The ranks communicate through torch, not through MPI.

    ``engine`` is ``auto`` (the engine of ``mpirun``), ``openmpi``, ``mpich`` or ``intel``. ``program`` is the
    mpirun to call, by name or path. ``hostfile`` is passed on in the engine's format. The ranks meet
    on its first host, or without a hostfile on this machine, at ``port`` (default: derived from the run
    directory). ``options`` are further options for mpirun.
    """

    engine: str = "auto"
    program: str | None = None
    hostfile: str | None = None
    port: int | None = None
    options: list[str] | None = None
    forward: list[str] | None = None

    def __post_init__(self) -> None:
        if self.engine not in ("auto", *_VERSION_PATTERNS):
            raise ValueError(f"engine={self.engine}: it must be auto, {', '.join(_VERSION_PATTERNS)}")

    @cached_property
    def mpirun(self) -> str:
        """The mpirun to call, or its usual name if there is none on this machine."""
        names = [_PROGRAMS.get(self.engine, "mpirun"), "mpirun"]
        return self.program or next(filter(shutil.which, names), names[0])

    @cached_property
    def detected_engine(self) -> str:
        """The engine of ``mpirun``. It is empty if the engine is unknown or the program is not here."""
        if shutil.which(self.mpirun) is None:
            return ""
        command = [self.mpirun, "--version"]
        version = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        for engine, pattern in _VERSION_PATTERNS.items():
            if re.search(pattern, version.stdout + version.stderr):
                return engine
        return ""

    def check(self, job: Job) -> None:
        self._hosts()

    def host_count(self) -> int:
        return len(set(self._hosts()))

    def missing_program(self, job: Job) -> str:
        program, engine = self.mpirun, self.detected_engine
        if shutil.which(program) is None:
            fix = "Install Open MPI, MPICH or Intel MPI, or set launcher.program"
            return f"launcher=mpi: there is no {program} on this machine. {fix}"
        if not engine or self.engine not in ("auto", engine):
            fault = f"{program} is {engine or 'an unknown MPI'}, not engine={self.engine}"
            return f"launcher=mpi: {fault}. Set launcher.engine or launcher.program"
        is_allowed = "--allow-run-as-root" in (self.options or ()) or "OMPI_ALLOW_RUN_AS_ROOT" in os.environ
        if engine == "openmpi" and not os.geteuid() and not is_allowed:
            return (
                "launcher=mpi: Open MPI refuses to run as root; use another account, or in a container set "
                "launcher.options=[--allow-run-as-root]"
            )
        return ""

    def launch(self, job: Job) -> LaunchResult:
        return LaunchResult(supervise(self._command(job), job.environ(), job.run_dir / AGENT, is_deep=True))

    def render(self, job: Job) -> str:
        return shlex.join(self._command(job))

    def _command(self, job: Job) -> list[str]:
        environment = {
            **forwarded_environment(job, self.forward),
            "MASTER_ADDR": self._hosts()[0],
            "MASTER_PORT": str(self._port(job)),
        }
        engine = self.detected_engine or self.engine
        if engine == "auto":  # Without an mpirun here, a dry run shows the command of Open MPI.
            engine = "openmpi"
        hosts, unset = [], []
        if self.hostfile:
            hosts = [_HOSTS[engine], self.hostfile]
            # Hydra's proxies pass this machine's whole environment to all ranks, also on other hosts.
            unset = ["-u", PARENT]
        # `env` is used because the engines' own options cut values at commas, line breaks or equals signs.
        assignments = [f"{name}={value}" for name, value in environment.items()]
        return [
            *(self.mpirun, "-n", str(job.world_size), *hosts, *_OPTIONS[engine].split()),
            *(*(self.options or ()), "env", *unset, *assignments, *job.on_host(job.command)),
        ]

    def _hosts(self) -> list[str]:
        if self.hostfile is None:
            return ["127.0.0.1"]
        lines = host_lines(self.hostfile)
        if not lines:
            raise ConfigError(f"launcher.hostfile={self.hostfile} names no host. Add at least one")
        return [re.split(r"[\s:]", line)[0] for line in lines]  # Hydra's format is host:ranks

    def _port(self, job: Job) -> int:
        """Return a free port if the ranks meet on this machine.

        On another host it is the port that is derived from the run directory. It may be in use there.
        """
        if self.port is not None:
            return self.port
        port = rendezvous_port(job.run_dir)
        while self.hostfile is None and port_error("127.0.0.1", port):
            port += 1
        return port
