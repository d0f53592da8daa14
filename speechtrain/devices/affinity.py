"""Assigns the cores of a host to its ranks, from the topology alone.

The formulas are those of Intel's AIDK launcher: with C physical cores per rank, of which the first W are
reserved for communication, rank p computes on cores p·C + W to (p + 1)·C - 1.
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
        """The CPU that computes; the others are its hyperthreads."""
        return self.cpus[0]


def topology(root: Path = _SYS) -> list[Core]:
    """This host's cores, as Linux lists them below ``root``; if it lists none, every CPU is a core."""
    nodes: dict[int, int] = {}
    for folder in root.glob("node/node[0-9]*"):
        for cpu in cpus_of(read(folder / "cpulist")):
            nodes[cpu] = int(folder.name.removeprefix("node"))
    found: set[Core] = set()
    for folder in root.glob("cpu/cpu[0-9]*"):
        siblings = cpus_of(read(folder / "topology" / "thread_siblings_list"))
        if siblings:  # absent if the CPU is offline
            found.add(Core(tuple(siblings), nodes.get(siblings[0], 0)))
    ordered = sorted(found, key=lambda core: (core.node, core.first))
    return ordered or [Core((cpu,)) for cpu in range(os.cpu_count() or 1)]


def read(path: Path) -> str:
    """The text of a small file; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def cpus_of(text: str) -> list[int]:
    """Parse a list of numbers in the kernel's syntax: ``0-2,8`` is 0, 1, 2, 8."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def usable(cores: Sequence[Core], cpus: Collection[int]) -> list[Core]:
    """The part of ``cores`` that a process limited to ``cpus`` may use."""
    kept = [Core(tuple(cpu for cpu in core.cpus if cpu in cpus), core.node) for core in cores]
    return [core for core in kept if core.cpus]


def share(cores: Sequence[Core], processes: int, rank: int, reserved: int = 0) -> list[Core]:
    """The cores of rank ``rank`` if ``processes`` ranks divide ``cores`` evenly, less its first ``reserved``.

    Raises MachineError if a rank would have none.
    """
    each = len(cores) // processes
    if each <= reserved:
        raise MachineError(
            f"{len(cores)} usable cores are too few for {processes} ranks with {reserved} reserved in each; "
            "lower world_size or device.comm_cores, or set device.pin=none"
        )
    return list(cores[rank * each + reserved : (rank + 1) * each])


def reserved_cpus(cores: Sequence[Core], processes: int, reserved: int) -> list[int]:
    """The CPUs of all ranks that are reserved for communication."""
    each = len(cores) // processes
    return [core.first for p in range(processes) for core in cores[p * each : p * each + reserved]]


def on_node(cores: Sequence[Core], processes: int, rank: int) -> list[Core]:
    """All cores of the memory node of rank ``rank``; ranks fill the nodes in order.

    If there are more nodes than ranks, a rank has several.
    """
    nodes = sorted({core.node for core in cores})
    first = rank * len(nodes) // processes
    last = max(first + 1, (rank + 1) * len(nodes) // processes)
    return [core for core in cores if core.node in nodes[first:last]]


def mask(cores: Iterable[Core]) -> str:
    """The bit mask of the cores' first CPUs: cores 1 and 2 are ``0x6``."""
    return hex(sum(1 << core.first for core in cores))


def pin_domains(cores: Sequence[Core], processes: int, reserved: int) -> str:
    """The masks of all ranks in the syntax of ``I_MPI_PIN_DOMAIN``: ``[0x3,0xc,]``."""
    masks = (mask(share(cores, processes, rank, reserved=reserved)) for rank in range(processes))
    return "[" + "".join(f"{each}," for each in masks) + "]"


def pin(cpus: Collection[int]) -> None:
    """Bind every thread of this process to ``cpus``; memory first touched later is on their node."""
    for name in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(int(name), cpus)
