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
from speechtrain.launch.launcher import (
    AGENT,
    PARENT,
    Job,
    Launcher,
    LaunchResult,
    forwarded_environment,
    host_lines,
)
from speechtrain.launch.rendezvous import port_error, rendezvous_port
from speechtrain.launch.supervise import supervise

# The output of `mpirun --version` matches the pattern of the engine. The order counts: Intel MPI is built on
# MPICH's process manager Hydra, so its output may also contain HYDRA.
_VERSION_PATTERNS = {
    "openmpi": r"Open ?MPI|OpenRTE|open-mpi",
    "intel": r"Intel\(R\) MPI",
    "mpich": r"HYDRA|MPICH",
}
# These options prevent that mpirun binds each rank to one core. A rank uses several cores, and the device
# binds it. On each host mpirun starts the program `env`, which sets most variables of a rank and then runs
# the rank (see ``_command``). Intel MPI binds the rank before it starts `env`, so I_MPI_PIN must be an option
# of mpirun.
_NO_BINDING = {"openmpi": "--bind-to none", "intel": "-genv I_MPI_PIN 0", "mpich": "-bind-to none"}
_PROGRAMS = {"openmpi": "mpirun.openmpi", "intel": "mpirun", "mpich": "mpirun.mpich"}
_HOSTFILE_OPTIONS = {"openmpi": "--hostfile", "intel": "-f", "mpich": "-f"}


@dataclass(eq=False)
class Mpi(Launcher):
    """Start ``world_size`` ranks with mpirun. The ranks communicate through torch, not through MPI.

    - ``engine`` is ``openmpi``, ``mpich``, ``intel``, or ``auto``: the engine to which ``mpirun`` belongs.
    - ``program`` is the mpirun to call, by name or path.
    - ``hostfile`` is a list of hosts in the engine's format. Without it, all ranks run on this machine.
    - ``port``: the ranks meet at this port of the first host (default: derived from the run directory).
    - ``options`` are further options for mpirun.
    - ``forward`` are patterns of names of environment variables that the ranks get from this machine.
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
        """The mpirun to call, or its usual name if this machine does not have it."""
        if self.program:
            return self.program
        usual_name = _PROGRAMS.get(self.engine, "mpirun")
        for name in (usual_name, "mpirun"):
            if shutil.which(name):
                return name
        return usual_name

    @cached_property
    def detected_engine(self) -> str:
        """The engine to which ``mpirun`` belongs, empty if it is unknown or the program is not installed."""
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

    def missing_program(self) -> str:
        """Return the reason why mpirun cannot start a job here, with the fix, or an empty text.

        All launchers have this method for missing programs. This launcher also reports an mpirun that does
        not belong to ``engine``, and one that refuses to run as root.
        """
        program, engine = self.mpirun, self.detected_engine
        if shutil.which(program) is None:
            fix = "Install Open MPI, MPICH or Intel MPI, or set launcher.program"
            return f"launcher=mpi: there is no {program} on this machine. {fix}"
        if not engine or self.engine not in ("auto", engine):
            fault = f"{program} is {engine or 'an unknown MPI'}, not engine={self.engine}"
            return f"launcher=mpi: {fault}. Set launcher.engine or launcher.program"
        is_root = os.geteuid() == 0
        may_be_root = "--allow-run-as-root" in (self.options or ()) or "OMPI_ALLOW_RUN_AS_ROOT" in os.environ
        if engine == "openmpi" and is_root and not may_be_root:
            return (
                "launcher=mpi: Open MPI refuses to run as root; use another account, or in a container set "
                "launcher.options=[--allow-run-as-root]"
            )
        return ""

    def launch(self, job: Job) -> LaunchResult:
        agent_log = job.run_dir / AGENT
        # The ranks are indirect: mpirun may start daemons that start the ranks, also on other hosts.
        code = supervise(self._command(job), job.environ(), agent_log=agent_log, has_indirect_ranks=True)
        return LaunchResult(code)

    def render(self, job: Job) -> str:
        return shlex.join(self._command(job))

    def _command(self, job: Job) -> list[str]:
        environment = {
            **forwarded_environment(job, self.forward),
            "MASTER_ADDR": self._hosts()[0],
            "MASTER_PORT": str(self._port(job)),
        }
        engine = self.detected_engine or self.engine
        if engine == "auto":  # This machine has no mpirun. A dry run shows the command of Open MPI.
            engine = "openmpi"
        mpirun = [self.mpirun, "-n", str(job.world_size)]
        # `env` is used because the engines' own options cut values at commas, line breaks or equals signs.
        env = ["env"]
        if self.hostfile:
            mpirun += [_HOSTFILE_OPTIONS[engine], self.hostfile]
            # Hydra, MPICH's process manager, passes this machine's environment to ranks on all hosts. The
            # variable PARENT has the pid of a process of this machine, so `env` removes it.
            env += ["-u", PARENT]
        mpirun += _NO_BINDING[engine].split()
        mpirun += self.options or ()
        env += [f"{name}={value}" for name, value in environment.items()]
        return [*mpirun, *env, *job.on_host(job.command)]

    def _hosts(self) -> list[str]:
        """Return the names of the hosts, the first of which is the meeting point of the ranks."""
        if self.hostfile is None:
            return ["127.0.0.1"]
        lines = host_lines(self.hostfile)
        if not lines:
            raise ConfigError(f"launcher.hostfile={self.hostfile} names no host. Add at least one")
        # A line is "host:ranks" for MPICH and Intel MPI, and "host slots=ranks" for Open MPI.
        return [re.split(r"[\s:]", line)[0] for line in lines]

    def _port(self, job: Job) -> int:
        """Return the port at which the ranks meet.

        If they meet on this machine, the port is free. On another host it may be in use.
        """
        if self.port is not None:
            return self.port
        port = rendezvous_port(job.run_dir)
        while self.hostfile is None and port_error("127.0.0.1", port):
            port += 1
        return port
