"""The Launcher interface, by which one command starts the ranks of a run, with its Job and LaunchResult.

``World`` reads the rank of a process from its environment. This module imports no torch.
"""

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
"""The program of a rank."""
ON_HOST = "speechtrain.runs.on_host"
"""The program that runs first on each host of a run. It sets the environment variables of the device."""
AGENT = "agent.log"
"""Name of a file in the run directory: the stderr of the process that starts the ranks, such as torchrun."""

PARENT = "SPEECHTRAIN_PARENT"
"""Environment variable with the pid of the command on this host. A rank stops when that process has ended."""

RANK_MEMORY = "SPEECHTRAIN_RANK_MEMORY"
"""Environment variable with the bytes of a rank's weights, gradients, optimizer state and weight average.
0 means unknown."""

NETWORK_VARIABLES = "SPEECHTRAIN_NETWORK_VARIABLES"
"""Environment variable with the names of variables that choose a network interface for the collectives."""

# Names of variables and keys whose values are secrets. TOKEN must not match TOKENIZER.
_SECRET_NAME = re.compile(
    r"(?i)TOKEN(?!IZER)|KEY|PASSW|PASSPHRASE|SECRET|CREDENTIAL|BEARER|JWT|COOKIE|DATABASE_URL"
    r"|(?:^|_)(?:PAT|AUTH|DSN)(?![A-Z])|_PWD(?![A-Z])"
)
# The group is a key in YAML, JSON or KEY=VALUE, whose value is neither null nor an interpolation.
# The lookbehind and the possessive ``++`` make the search linear in the length of a word.
_KEY_WITH_VALUE = re.compile(r"(?<!\w)(\w++)[\"']?[ \t]*[:=][ \t]*(?!null\b|[\"']?\$\{)(?=[^\s,}[{])")
_PASSWORD_IN_URL = re.compile(r"://[^/\s:@]*:[^/\s@]+@")


@dataclass(frozen=True)
class Job:
    """The ranks that a launcher starts: ``world_size`` processes with the same command."""

    config: Path  # the config.yaml of the run
    run_dir: Path
    world_size: int = 1  # the number of ranks on all hosts
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the ranks. If the user has set such a variable, the user's value is used."""
    forwarded_variables: tuple[str, ...] = ()
    """Patterns of the device's variables. Their values in this process are copied to ranks on other hosts."""

    @property
    def command(self) -> list[str]:
        """Return the command of one rank. ``-P`` prevents imports from the current folder."""
        return [sys.executable, "-P", "-m", WORKER, str(self.config)]

    def on_host(self, command: list[str], ranks: int = 0, python: str = sys.executable) -> list[str]:
        """Return a command that runs ``ON_HOST``, which sets the device's variables and runs ``command``.

        ``ranks`` is the number of ranks on the host. If it is 0, the number is in the environment variables
        of the program that starts the command.
        """
        return [python, "-P", "-m", ON_HOST, str(self.config), str(ranks), *command]

    def environ(self) -> dict[str, str]:
        """Return the variables of the job and of this process, whose values have precedence."""
        return {**self.environment, **os.environ}

    def ranks_per_node(self, nodes: int) -> int:
        """Return the number of ranks on each of ``nodes`` hosts.

        Raises ConfigError if ``nodes`` does not divide the number of ranks.
        """
        ranks, remainder = divmod(self.world_size, nodes)
        if remainder or not ranks:
            cause = f"world_size={self.world_size} must be a multiple of {nodes}, the number of hosts"
            raise ConfigError(f"{cause}. Change it or launcher.nodes")
        return ranks


@dataclass(frozen=True)
class LaunchResult:
    """How the processes of a launch ended. The outcome of the training is in the run's ``result.json``."""

    returncode: int
    """The exit code of the processes, or the negative number of the signal that ended them."""
    stop_hint: str = ""
    """If the processes run without this command: a line that says how to stop them."""
    cause: str = ""
    """If the processes were ended from outside: the cause, such as a lost host."""
    log: str = AGENT
    """Name of the file in the run directory that says how the processes ended."""


class Launcher(ABC):
    """A way to start a job's processes."""

    files: tuple[str, ...] = (AGENT, "agent-*.log")
    """Patterns of the files that the launcher writes into the run directory, even if no rank starts."""
    programs: tuple[str, ...] = ()
    """The programs that ``launch`` needs on this machine."""

    @property
    def choice(self) -> str:
        """Return the choice of the config group ``launcher`` that builds this class, for messages."""
        return type(self).__name__.lower()

    def check_minimum(self, lowest: int, *names: str) -> None:
        """Raise ValueError if an attribute in ``names`` is below ``lowest``. None is accepted."""
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
        """Return whether all processes of ``job`` run on this host."""
        return False

    def host_count(self) -> int:
        """Return the number of hosts on which ranks run. Raises ConfigError for a list without hosts."""
        return int(getattr(self, "nodes", 1))

    @abstractmethod
    def launch(self, job: Job) -> LaunchResult:
        """Start the processes, pass signals on to them, and wait for their end."""

    @abstractmethod
    def render(self, job: Job) -> str:
        """Return the shell lines that start the same processes as ``launch``."""


def host_lines(path: str) -> list[str]:
    """Return the lines of the file of hosts at ``path``, without comments and empty lines.

    Raises ConfigError if the file cannot be read.
    """
    try:
        lines = read_bytes(path, follow=True).decode().splitlines()
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", error)
        problem = f"launcher.hostfile={path}: {cause}"
        raise ConfigError(f"{problem}. Name a file with an address per line") from None
    texts = [line.partition("#")[0].strip() for line in lines]
    return [text for text in texts if text]


def is_secret(name: str) -> bool:
    """Return whether a variable with this name has a value that must not appear in a command line or log."""
    return _SECRET_NAME.search(name) is not None


def holds_secret(text: str) -> bool:
    """Return whether ``text`` contains a key with a secret name and a value, or a URL with a password."""
    has_secret_key = any(map(is_secret, _KEY_WITH_VALUE.findall(text)))
    return has_secret_key or _PASSWORD_IN_URL.search(text) is not None


def forwarded_environment(job: Job, patterns: Iterable[str] | None) -> dict[str, str]:
    """Return the environment variables for a job's processes on other machines, sorted by name.

    These are the job's variables, and the variables of this process whose names match ``patterns``, such as
    ``HF_*``, or ``job.forwarded_variables``. Secrets are excluded, and so is the pid of this command.
    """
    patterns = (*(patterns or ()), *job.forwarded_variables)
    # A value that the user has set has precedence.
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
    delimiter = "END_OF_TEXT"
    while delimiter in text:
        delimiter += "_"
    return f"{shlex.join(command)} <<'{delimiter}'\n{text}{delimiter}\n"


def escape_for_torchrun(words: Iterable[str]) -> list[str]:
    """Return arguments escaped for torchrun, which expands macros and turns ``$$`` into ``$``."""
    return [word.replace("$", "$$") for word in words]


@dataclass(frozen=True)
class World:
    """The rank of a process among all ranks, and among the ranks of its host. Ranks are counted from 0."""

    rank: int = 0
    size: int = 1  # the number of all ranks
    local_rank: int = 0
    local_size: int = 1  # the number of ranks on this host

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> World:
        """Return the world that the variables in ``environ`` describe, or one rank without such variables.

        The variables of torchrun have precedence, because torchrun may run under Slurm or MPI. The variables
        of Open MPI, of Slurm's steps, and of MPICH or Intel MPI follow. Raises MachineError if torchrun's
        variables are incomplete, if a variable is not a number, or if the rank is not below the number of
        ranks.
        """
        for names in _STARTERS:
            has_rank, has_size = names.rank in environ, names.size in environ
            is_incomplete_torchrun = names is _TORCHRUN and has_rank != has_size
            if (has_rank and has_size) or is_incomplete_torchrun:
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
    size: str  # name of the variable with the number of all ranks
    local_rank: str
    local_size: str  # name of the variable with the number of ranks on this host


_TORCHRUN = _RankVariables("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPEN_MPI = _RankVariables(
    rank="OMPI_COMM_WORLD_RANK",
    size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
)
# SLURM_PROCID alone does not show that srun has started this process: a batch script also has this variable.
# SLURM_STEP_NUM_TASKS is set only in a step, which srun starts.
_SLURM = _RankVariables("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
_MPICH = _RankVariables("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_STARTERS = (_TORCHRUN, _OPEN_MPI, _SLURM, _MPICH)
# Slurm's "2(x3),1" means two tasks on each of three nodes, and one task on the fourth node.
_TASKS_OF_NODES = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,6})\))?(?:,|$)")


def is_number(text: str) -> bool:
    """Return whether ``text`` is a number of ranks. ``isdigit`` would accept ``²`` and 5,000 digits."""
    return re.fullmatch(r"[0-9]{1,9}", text) is not None


def _number(environ: Mapping[str, str], name: str, default: str | None = None) -> int:
    """Return the number in the variable ``name``, or ``default`` if it is not set.

    Raises MachineError if the variable is not a number, or is not set and has no default.
    """
    text = environ.get(name, default)
    if name == _SLURM.local_size and text is not None:
        text = _tasks_of_this_node(environ, text)
    if text is None or not is_number(text):
        state = "not set" if text is None else repr(text)
        raise MachineError(f"environment variable {name} is {state}. The launcher must set it to a number")
    return int(text)


def _tasks_of_this_node(environ: Mapping[str, str], text: str) -> str:
    """Return the number of tasks on this node from ``text``, Slurm's list for all nodes.

    If the list is shorter than the number of this node, return ``text``.
    """
    remaining_nodes = _number(environ, "SLURM_NODEID", "0")  # nodes in the list before this node
    for tasks, repetitions in _TASKS_OF_NODES.findall(text):
        remaining_nodes -= int(repetitions or 1)
        if remaining_nodes < 0:
            return str(tasks)
    return text
