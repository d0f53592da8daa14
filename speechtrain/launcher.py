"""Job, Result and the Launcher interface, by which one command starts processes. Imports no torch."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from speechtrain.errors import ConfigError, MachineError
from speechtrain.files import read_bytes

WORKER = "speechtrain.train_rank"
ON_HOST = "speechtrain.runs.on_host"
"""The program that runs first on a host of a run. It sets the variables of the device there."""
AGENT = "agent.log"
"""File in the run directory: the stderr of an agent that starts the ranks."""

PARENT = "SPEECHTRAIN_PARENT"
"""Environment variable: the pid of the command on this host. A rank stops when that process has ended."""

RANK_MEMORY = "SPEECHTRAIN_RANK_MEMORY"
"""Environment variable: bytes of a rank's weights, gradients, optimizer state and average (0: unknown)."""

NETWORK_VARIABLES = "SPEECHTRAIN_NETWORK_VARIABLES"
"""Environment variable: names of the variables that choose a network interface for the collectives."""

_SECRET = re.compile(
    r"(?i)TOKEN(?!IZER)|KEY|PASSW|PASSPHRASE|SECRET|CREDENTIAL|BEARER|JWT|COOKIE|DATABASE_URL"
    r"|(?:^|_)(?:PAT|AUTH|DSN)(?![A-Z])|_PWD(?![A-Z])"
)
# A key in YAML, JSON or KEY=VALUE, whose value is neither null nor an interpolation.
# The lookbehind and the possessive ``++`` keep the search linear in a word of a million letters.
_VALUE = re.compile(r"(?<!\w)(\w++)[\"']?[ \t]*[:=][ \t]*(?!null\b|[\"']?\$\{)(?=[^\s,}[{])")
_PASSWORD_IN_URL = re.compile(r"://[^/\s:@]*:[^/\s@]+@")


@dataclass(frozen=True)
class Job:
    """The work of a launcher: the same worker command, ``world_size`` times."""

    config: Path
    run_dir: Path
    world_size: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    forwarded_variables: tuple[str, ...] = ()
    """Patterns of the device's own variables, which ranks on other hosts get from this process."""

    @property
    def command(self) -> list[str]:
        """Return the command of one rank. ``-P`` prevents imports from the current folder."""
        return [sys.executable, "-P", "-m", WORKER, str(self.config)]

    def on_host(self, command: list[str], ranks: int = 0, python: str = sys.executable) -> list[str]:
        """Return ``command`` after ``ON_HOST``, which sets the device's variables on the host of the command.

        ``ranks`` is the number of ranks on that host. If it is 0, the starting program's variables have it.
        """
        return [python, "-P", "-m", ON_HOST, str(self.config), str(ranks), *command]

    def environ(self) -> dict[str, str]:
        """Return the environments of this process and of the job. A variable of this process wins."""
        return {**self.environment, **os.environ}

    def ranks_per_node(self, nodes: int) -> int:
        """Return the number of ranks on each of ``nodes`` nodes. Raises ConfigError if they differ."""
        ranks, remainder = divmod(self.world_size, nodes)
        if remainder or not ranks:
            cause = f"world_size={self.world_size} must be a multiple of {nodes}, the number of hosts"
            raise ConfigError(f"{cause}. Change it or launcher.nodes")
        return ranks


@dataclass(frozen=True)
class LaunchResult:
    """The end of the processes. The outcome of the run is in its ``result.json``."""

    returncode: int
    stop_hint: str = ""
    """A line that says how to stop the processes, if they run without this command."""
    cause: str = ""
    """The cause, such as a lost host, that has ended the processes from outside."""
    log: str = AGENT
    """The file in the run directory that says how the processes ended."""


class Launcher(ABC):
    """A way to start a job's processes."""

    files: tuple[str, ...] = (AGENT, "agent-*.log")
    """Patterns of the files that the launcher writes into the run directory, even if no rank starts."""
    programs: tuple[str, ...] = ()
    """The programs of this machine that ``launch`` needs. ``render`` needs none."""

    @property
    def choice(self) -> str:
        """Return the launcher's name in messages: the usual choice of the group ``launcher``."""
        return type(self).__name__.lower()

    def check_minimum(self, lowest: int, *names: str) -> None:
        """Raise ValueError if one of the settings ``names`` is below ``lowest``. null passes."""
        for name in names:
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise ValueError(f"{name}={value}: it must be at least {lowest}")

    def check(self, job: Job) -> None:  # noqa: B027 - nothing is a sensible default
        """Raise ConfigError if this launcher cannot start ``job``."""

    def missing_program(self, job: Job) -> str:
        """Return the reason why this machine cannot start ``job``, with the fix, or an empty text."""
        for name in self.programs:
            if shutil.which(name) is None:
                problem = f"launcher={self.choice}: there is no {name} on this machine"
                return f"{problem}. Install it, or run the command where it is"
        return ""

    def is_here(self, job: Job) -> bool:
        """Return whether all processes run on this host. If so, the command prepares the device."""
        return False

    def host_count(self) -> int:
        """Return the number of hosts that share the ranks. Raises ConfigError for a list without hosts."""
        return int(getattr(self, "nodes", 1))

    @abstractmethod
    def launch(self, job: Job) -> LaunchResult:
        """Start the processes, pass signals on to them, and wait for their end."""

    @abstractmethod
    def render(self, job: Job) -> str:
        """Return the shell lines that start the same processes as ``launch``."""


def host_lines(path: str) -> list[str]:
    """Return the lines of a list of hosts without comments. Raises ConfigError if it cannot be read."""
    try:
        lines = read_bytes(path, follow=True).decode().splitlines()
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", error)
        problem = f"launcher.hostfile={path}: {cause}"
        raise ConfigError(f"{problem}. Name a file with an address per line") from None
    texts = [line.partition("#")[0].strip() for line in lines]
    return [text for text in texts if text]


def is_secret(name: str) -> bool:
    """Return whether the name of a variable says that its value must not appear in a command line or log."""
    return _SECRET.search(name) is not None


def holds_secret(text: str) -> bool:
    """Return whether a text of keys and values has a secret, or a URL with a password."""
    return any(map(is_secret, _VALUE.findall(text))) or _PASSWORD_IN_URL.search(text) is not None


def forwarded_environment(job: Job, patterns: Iterable[str] | None) -> dict[str, str]:
    """Return the environment of a job's processes on other machines.

    It has the job's variables, with the values that the user has set, and the variables of this process whose
    names match one of ``patterns`` (``HF_*``) or of ``job.forwarded_variables``. Secrets are left out.
    """
    patterns = (*(patterns or ()), *job.forwarded_variables)
    variables = {name: os.environ.get(name, value) for name, value in job.environment.items()}
    for name, value in os.environ.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            variables[name] = value
    variables.pop(PARENT, None)
    return {name: value for name, value in sorted(variables.items()) if not is_secret(name)}


def shell_line(command: list[str], environment: Mapping[str, str]) -> str:
    """Return a line for a POSIX shell: ``NAME=value … command``, quoted, without secrets."""
    words = []
    for name, value in sorted(environment.items()):
        if not is_secret(name):
            words.append(f"{name}={shlex.quote(value)}")
    return " ".join([*words, shlex.join(command)])


def here_document(command: list[str], text: str) -> str:
    """Return shell code that runs ``command`` with ``text`` as its standard input."""
    end = "END_OF_TEXT"
    while end in text:
        end += "_"
    return f"{shlex.join(command)} <<'{end}'\n{text}{end}\n"


def escape_for_torchrun(words: Iterable[str]) -> list[str]:
    """Return arguments escaped for torchrun, which expands macros and turns ``$$`` into ``$``."""
    return [word.replace("$", "$$") for word in words]


@dataclass(frozen=True)
class World:
    """The rank of this process among all ranks and on its host, as the environment has it at the start."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> World:
        """Read the variables of the program that has started this process, if there are some.

        The variables of torchrun come first, because its agent may run under Slurm or MPI. The variables of
        Open MPI, of Slurm's steps, and of MPICH or Intel MPI follow. Raises MachineError if only some
        variables are set, if one is not a number, or if the rank is not below the number of ranks.
        """
        for names in _STARTERS:
            are_set = [name in environ for name in (names.rank, names.size)]
            if all(are_set) or (any(are_set) and names is _TORCHRUN):
                world = cls(
                    rank=_number(environ, names.rank),
                    size=_number(environ, names.size),
                    local_rank=_number(environ, names.local_rank, "0"),
                    local_size=_number(environ, names.local_size, "1"),
                )
                if world.rank >= max(world.size, 1):
                    problem = f"variable {names.rank} is {world.rank}, and {names.size} is {world.size}"
                    raise MachineError(f"environment {problem}. Ranks are counted from 0")
                return world
        return cls()

    def variables(self) -> dict[str, str]:
        """Return the variables of torchrun for this rank, which torch and vendors' libraries read."""
        return {
            _TORCHRUN.rank: str(self.rank),
            _TORCHRUN.size: str(self.size),
            _TORCHRUN.local_rank: str(self.local_rank),
            _TORCHRUN.local_size: str(self.local_size),
        }


@dataclass(frozen=True)
class _RankVariables:
    """The names of the environment variables by which a program numbers the ranks that it starts."""

    rank: str
    size: str  # of all ranks
    local_rank: str
    local_size: str  # ranks on this host


_TORCHRUN = _RankVariables("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPEN_MPI = _RankVariables(
    rank="OMPI_COMM_WORLD_RANK",
    size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
)
# Slurm's batch script has SLURM_PROCID, too, but it numbers processes only in a step, which srun starts.
_SLURM = _RankVariables("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
_MPICH = _RankVariables("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_STARTERS = (_TORCHRUN, _OPEN_MPI, _SLURM, _MPICH)
# Slurm's "2(x3),1" means two tasks on each of three nodes, and one on another node.
_TASKS_OF_NODES = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,6})\))?(?:,|$)")


def is_number(text: str) -> bool:
    """Return whether ``text`` is a number of ranks. ``isdigit`` would accept ``²`` and 5,000 digits."""
    return re.fullmatch(r"[0-9]{1,9}", text) is not None


def _number(environ: Mapping[str, str], name: str, default: str | None = None) -> int:
    """Return the number in a variable, or ``default`` without it. Raises MachineError for another text."""
    text = environ.get(name, default)
    if name == _SLURM.local_size and text is not None:
        text = _tasks_of_this_node(environ, text)
    if text is None or not is_number(text):
        state = "not set" if text is None else repr(text)
        raise MachineError(f"environment variable {name} is {state}. The launcher must set it to a number")
    return int(text)


def _tasks_of_this_node(environ: Mapping[str, str], text: str) -> str:
    """Return the tasks on this node from Slurm's list of all nodes, or ``text`` if the list lacks it."""
    node = _number(environ, "SLURM_NODEID", "0")
    for tasks, repetitions in _TASKS_OF_NODES.findall(text):
        node -= int(repetitions or 1)
        if node < 0:
            return str(tasks)
    return text
