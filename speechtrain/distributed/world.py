"""The rank of a process among all ranks, read from the environment. This module imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from speechtrain.errors import MachineError


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
