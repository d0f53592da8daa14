"""The Launcher interface, by which one command starts the ranks of a run, with its Job and LaunchResult."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from speechtrain.errors import ConfigError
from speechtrain.files import is_secret, read_bytes

WORKER = "speechtrain.rank"
"""The program of a rank."""
ON_HOST = "speechtrain.start.on_host"
"""The program that runs first on each host of a run. It sets the environment variables of the device."""
AGENT = "agent.log"
"""Name of a file in the run directory: the stderr of the process that starts the ranks, such as torchrun."""

PARENT = "SPEECHTRAIN_PARENT"
"""Environment variable with the pid of the command on this host. A rank stops when that process has ended."""

RANK_MEMORY = "SPEECHTRAIN_RANK_MEMORY"
"""Environment variable with the bytes of a rank's weights, gradients, optimizer state and weight average.
0 means unknown."""

SHUTDOWN_SECONDS = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Environment variable with the seconds after which torchrun kills a rank that must end."""

NETWORK_VARIABLES = "SPEECHTRAIN_NETWORK_VARIABLES"
"""Environment variable with the names of variables that choose a network interface for the collectives."""


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
    is_here: bool = False
    """Whether all processes of each job run on this host."""

    @property
    def choice(self) -> str:
        """Return the choice of the config group ``launcher`` that builds this class, for messages."""
        return type(self).__name__.lower()

    def check_minimum(self, lowest: float, *names: str) -> None:
        """Raise ValueError if an attribute in ``names`` is below ``lowest``. None is accepted."""
        for name in names:
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise ValueError(f"{name}={value}: it must be at least {lowest}")

    def check(self, job: Job) -> None:  # noqa: B027 - nothing is a sensible default
        """Raise ConfigError if this launcher cannot start ``job``."""

    def missing_program(self) -> str:
        """Return the reason why this machine cannot start a job, with the fix, or an empty text."""
        for name in self.programs:
            if shutil.which(name) is None:
                problem = f"launcher={self.choice}: there is no {name} on this machine"
                return f"{problem}. Install it, or run the command where it is"
        return ""

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


def here_document(command: str, text: str) -> str:
    """Return shell code that runs the shell ``command`` with ``text`` as its standard input."""
    delimiter = "END_OF_TEXT"
    while delimiter in text:
        delimiter += "_"
    return f"{command} <<'{delimiter}'\n{text}{delimiter}\n"


def escape_for_torchrun(words: Iterable[str]) -> list[str]:
    """Return arguments escaped for torchrun, which expands macros and turns ``$$`` into ``$``."""
    return [word.replace("$", "$$") for word in words]
