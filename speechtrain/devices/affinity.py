"""Assigns the cores of a host to its ranks, from the topology alone.

The formulas are the same as in Intel's AIDK launcher: with C physical cores per rank, of which the first W
are reserved for communication, rank p computes on cores p·C + W to (p + 1)·C - 1.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from speechtrain.errors import MachineError

_SYS = Path("/sys/devices/system")


@dataclass(frozen=True)
class Core:
    """One physical core: the numbers of its logical CPUs, and its memory node."""

    cpus: tuple[int, ...]
    node: int = 0

    @property
    def first(self) -> int:
        """The CPU that computes. The other CPUs of the core are its hyperthreads."""
        return self.cpus[0]


def topology(root: Path = _SYS) -> list[Core]:
    """Return this host's cores, as Linux lists them below ``root``. If it lists none, every CPU is a core."""
    nodes: dict[int, int] = {}
    for folder in root.glob("node/node[0-9]*"):
        for cpu in cpus_of(read_small_file(folder / "cpulist")):
            nodes[cpu] = int(folder.name.removeprefix("node"))
    cores: set[Core] = set()
    for folder in root.glob("cpu/cpu[0-9]*"):
        siblings = cpus_of(read_small_file(folder / "topology" / "thread_siblings_list"))
        if siblings:  # absent if the CPU is offline
            cores.add(Core(tuple(siblings), nodes.get(siblings[0], 0)))
    if not cores:
        return [Core((cpu,)) for cpu in range(os.cpu_count() or 1)]
    return sorted(cores, key=lambda core: (core.node, core.first))


def read_small_file(path: Path) -> str:
    """Return the text of a small file, or an empty text if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def cpus_of(text: str) -> list[int]:
    """Parse a list of numbers in the kernel's syntax: ``0-2,8`` is 0, 1, 2, 8."""
    cpus: list[int] = []
    for part in filter(None, text.split(",")):
        start, _, end = part.partition("-")
        cpus += range(int(start), int(end or start) + 1)
    return cpus


def cores_within(cores: Sequence[Core], cpus: Collection[int]) -> list[Core]:
    """Return the part of ``cores`` that a process limited to ``cpus`` may use."""
    usable_cores = []
    for core in cores:
        usable_cpus = tuple(cpu for cpu in core.cpus if cpu in cpus)
        if usable_cpus:
            usable_cores.append(Core(usable_cpus, core.node))
    return usable_cores


def cores_of_rank(cores: Sequence[Core], processes: int, rank: int, reserved: int = 0) -> list[Core]:
    """Return the cores that rank ``rank`` computes on if ``processes`` ranks divide ``cores`` evenly.

    The first ``reserved`` cores of its share are left out. Raises MachineError if a rank would have no core.
    """
    cores_per_rank = len(cores) // processes
    if cores_per_rank <= reserved:
        raise MachineError(
            f"{len(cores)} usable cores are too few for {processes} ranks with {reserved} reserved in each. "
            "Lower world_size or device.comm_cores, or set device.pin=none"
        )
    return list(cores[rank * cores_per_rank + reserved : (rank + 1) * cores_per_rank])


def reserved_cpus(cores: Sequence[Core], processes: int, reserved: int) -> list[int]:
    """Return the CPUs of all ranks that are reserved for communication."""
    cores_per_rank = len(cores) // processes
    cpus = []
    for rank in range(processes):
        start = rank * cores_per_rank
        cpus += [core.first for core in cores[start : start + reserved]]
    return cpus


def cores_of_node(cores: Sequence[Core], processes: int, rank: int) -> list[Core]:
    """Return all cores of the memory node of rank ``rank``. Ranks fill the nodes in order.

    If there are more nodes than ranks, a rank has several nodes.
    """
    nodes = sorted({core.node for core in cores})
    start = rank * len(nodes) // processes
    end = max(start + 1, (rank + 1) * len(nodes) // processes)
    return [core for core in cores if core.node in nodes[start:end]]


def core_mask(cores: Iterable[Core]) -> str:
    """Return the bit mask of the cores' first CPUs: cores 1 and 2 are ``0x6``."""
    return hex(sum(1 << core.first for core in cores))


def pin_domains(cores: Sequence[Core], processes: int, reserved: int) -> str:
    """Return the masks of all ranks in the syntax of ``I_MPI_PIN_DOMAIN``: ``[0x3,0xc,]``."""
    masks = ""
    for rank in range(processes):
        masks += core_mask(cores_of_rank(cores, processes, rank, reserved=reserved)) + ","
    return f"[{masks}]"


def pin(cpus: Collection[int]) -> None:
    """Bind every thread of this process to ``cpus``. Memory that is first touched later is on their node."""
    for name in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(int(name), cpus)
