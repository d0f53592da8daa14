"""Job, Result and the Launcher interface: how one command becomes processes. Imports no torch."""

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
"""The program that runs first on a host whose ranks a command of another host may have started."""
AGENT = "agent.log"
"""File in the run directory: the stderr of an agent that starts the ranks."""

PARENT = "SPEECHTRAIN_PARENT"
"""Environment variable: the pid of the command on this host; a rank stops when that process has ended."""

RANK_MEMORY = "SPEECHTRAIN_RANK_MEMORY"
"""Environment variable: the bytes of a rank's weights, gradients, optimizer state, average (0: unknown)."""

NETWORK_VARIABLES = "SPEECHTRAIN_NETWORK_VARIABLES"
"""Environment variable: the names of those by which the device's collectives choose a network interface."""

_SECRET = re.compile(
    r"(?i)TOKEN(?!IZER)|KEY|PASSW|PASSPHRASE|SECRET|CREDENTIAL|BEARER|JWT|COOKIE|DATABASE_URL"
    r"|(?:^|_)(?:PAT|AUTH|DSN)(?![A-Z])|_PWD(?![A-Z])"
)
# a key with a value that is neither null nor an interpolation, in YAML, JSON or KEY=VALUE
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
    forwarded: tuple[str, ...] = ()
    """Patterns of the device's own variables, which ranks on other hosts get from this process."""

    @property
    def command(self) -> list[str]:
        """The worker command of one process, which imports nothing from the current folder (``-P``)."""
        return [sys.executable, "-P", "-m", WORKER, str(self.config)]

    def on_host(self, command: list[str], ranks: int = 0, python: str = sys.executable) -> list[str]:
        """``command`` with the device's variables of the host where it runs, for ``ranks`` ranks there.

        0 ranks: as many as the variables of the program that starts it say.
        """
        return [python, "-P", "-m", ON_HOST, str(self.config), str(ranks), *command]

    def environ(self) -> dict[str, str]:
        """This process's environment plus the job's. A variable that the user has set wins."""
        return {**self.environment, **os.environ}

    def ranks_per_node(self, nodes: int) -> int:
        """The number of ranks on each of ``nodes`` nodes. Raises ConfigError if they cannot be equal."""
        ranks, left = divmod(self.world_size, nodes)
        if left or not ranks:
            cause = f"world_size={self.world_size} must be a multiple of {nodes}, the number of hosts"
            raise ConfigError(f"{cause}; change it or launcher.nodes")
        return ranks


@dataclass(frozen=True)
class Result:
    """The end of the processes. The outcome of the run is in its ``result.json``."""

    returncode: int
    submitted: str = ""
    """A line for the user if the processes run without this command: how to stop them."""
    cause: str = ""
    """A line about what ended the processes from outside, such as a lost host."""
    log: str = AGENT
    """The file in the run directory that says how the processes ended."""


class Launcher(ABC):
    """A way to start a job's processes."""

    files: tuple[str, ...] = (AGENT, "agent-*.log")
    """Patterns of the files that it writes into the run directory, whether or not a rank starts."""
    programs: tuple[str, ...] = ()
    """The programs of this machine that ``launch`` needs. ``render`` needs none."""

    @property
    def choice(self) -> str:
        """Its name in messages: the usual choice of the group ``launcher``."""
        return type(self).__name__.lower()

    def check_minimum(self, lowest: int, *names: str) -> None:
        """Raise ValueError if one of the settings ``names`` is below ``lowest``. null passes."""
        for name in names:
            if (value := getattr(self, name)) is not None and value < lowest:
                raise ValueError(f"{name}={value}: it must be at least {lowest}")

    def check(self, job: Job) -> None:  # noqa: B027 - nothing is a sensible default
        """Raise ConfigError if this launcher cannot start ``job``."""

    def lacking(self, job: Job) -> str:
        """The reason why this machine cannot start ``job``, with the fix, or an empty string."""
        missing = next((name for name in self.programs if shutil.which(name) is None), "")
        start = f"launcher={self.choice}: there is no {missing} on this machine"
        return f"{start}; install it, or run the command where it is" if missing else ""

    def is_here(self, job: Job) -> bool:
        """Whether all processes run on this host. The command then prepares and checks the device itself."""
        return False

    def host_count(self) -> int:
        """Return the number of hosts that share the ranks. Raises ConfigError for a list without hosts."""
        return int(getattr(self, "nodes", 1))

    @abstractmethod
    def launch(self, job: Job) -> Result:
        """Start the processes, pass signals on to them, and wait for their end."""

    @abstractmethod
    def render(self, job: Job) -> str:
        """The text of exactly what ``launch`` would run."""


def host_lines(path: str) -> list[str]:
    """Return the lines of a list of hosts without comments. Raises ConfigError if it cannot be read."""
    try:
        lines = read_bytes(path, follow=True).decode().splitlines()
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", error)
        raise ConfigError(
            f"launcher.hostfile={path}: {cause}; name a file with an address per line"
        ) from None
    return [text for line in lines if (text := line.partition("#")[0].strip())]


def is_secret(name: str) -> bool:
    """Whether, by its name, a variable's value must not appear in a command line or a log."""
    return _SECRET.search(name) is not None


def holds_secret(text: str) -> bool:
    """Whether a text of keys and values has a value of a secret's name, or a URL with a password."""
    return any(map(is_secret, _VALUE.findall(text))) or _PASSWORD_IN_URL.search(text) is not None


def forwarded_environment(job: Job, patterns: Iterable[str] | None) -> dict[str, str]:
    """The environment of a job's processes on other machines.

    It holds the job's variables, with the values that the user has set, and this process's variables
    whose names match one of ``patterns`` (``HF_*``) or of the device's own. Secrets are left out.
    """
    wanted = (*(patterns or ()), *job.forwarded)
    mine = {n: v for n, v in os.environ.items() if any(fnmatchcase(n, pattern) for pattern in wanted)}
    joined = {**{n: os.environ.get(n, v) for n, v in job.environment.items()}, **mine}
    return {n: v for n, v in sorted(joined.items()) if n != PARENT and not is_secret(n)}


def shell_line(command: list[str], environment: Mapping[str, str]) -> str:
    """A line that a POSIX shell runs as given: ``NAME=value … command``, quoted, without secrets."""
    assignments = [
        f"{name}={shlex.quote(value)}" for name, value in sorted(environment.items()) if not is_secret(name)
    ]
    return " ".join([*assignments, shlex.join(command)])


def here_document(command: list[str], text: str) -> str:
    """Return shell code that runs ``command`` with ``text`` as its standard input."""
    end = "END_OF_TEXT"
    while end in text:
        end += "_"
    return f"{shlex.join(command)} <<'{end}'\n{text}{end}\n"


def escape_for_torchrun(words: Iterable[str]) -> list[str]:
    """Arguments escaped for torchrun, which expands macros and turns ``$$`` into ``$``."""
    return [word.replace("$", "$$") for word in words]


@dataclass(frozen=True)
class World:
    """This process's rank among its peers, read once from the environment."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> World:
        """Read the variables of the program that started this process; without them it is a single process.

        Torchrun's come first (an agent may itself run under Slurm or MPI), then those of Open MPI, of
        Slurm's steps, and of MPICH and Intel MPI. Raises MachineError naming the variable if only some
        are set, one is not a number, or the rank is none of the group's.
        """
        for names in _STARTERS:
            known = [name in environ for name in names[:2]]
            if all(known) or (any(known) and names is _STARTERS[0]):
                fallbacks = (None, None, "0", "1")
                values = [_number(environ, n, f) for n, f in zip(names, fallbacks, strict=True)]
                if values[0] >= max(values[1], 1):
                    told = f"environment variable {names[0]} is {values[0]}, and {names[1]} is {values[1]}"
                    raise MachineError(f"{told}; ranks are counted from 0")
                return cls(*values)
        return cls()

    def variables(self) -> dict[str, str]:
        """The same under torchrun's names, which torch and vendors' libraries read."""
        values = (self.rank, self.size, self.local_rank, self.local_size)
        return {name: str(value) for name, value in zip(_STARTERS[0], values, strict=True)}


# Rank, number of ranks, rank on this host, ranks on this host. Slurm's batch script has SLURM_PROCID, too,
# but it numbers processes only in a step, which srun starts.
_STARTERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    (
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
# Slurm's "2(x3),1": two on three nodes, one on another
_TASKS_OF_NODES = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,6})\))?(?:,|$)")


def is_number(text: str) -> bool:
    """Whether ``text`` is a number of ranks or processes; ``isdigit`` admits ``²`` and 5,000 digits."""
    return re.fullmatch(r"[0-9]{1,9}", text) is not None


def _number(environ: Mapping[str, str], name: str, fallback: str | None) -> int:
    text = environ.get(name, fallback)
    if name.endswith("TASKS_PER_NODE"):
        nodes = [n for n, times in _TASKS_OF_NODES.findall(text or "") for _ in range(int(times or 1))]
        text = dict(enumerate(nodes)).get(_number(environ, "SLURM_NODEID", "0"), text)
    if text is None or not is_number(text):
        found = "not set" if text is None else repr(text)
        raise MachineError(f"environment variable {name} is {found}; the launcher must set it to a number")
    return int(text)
