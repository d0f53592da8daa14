"""Assign the cores of a host to its ranks, by the topology of the host.

The formula is the same as in Intel's AIDK launcher. With C physical cores per rank, of which the first W are
reserved for communication, rank p computes on the cores from p·C + W to (p + 1)·C - 1 (inclusive, all numbers
from 0).
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
    """One physical core."""

    cpus: tuple[int, ...]  # the numbers of its logical CPUs (hyperthreads)
    node: int = 0  # the number of its NUMA node

    @property
    def first(self) -> int:
        """The logical CPU that computes. The other hyperthreads of the core are for data workers."""
        return self.cpus[0]


def topology(root: Path = _SYS) -> list[Core]:
    """Return this host's cores in the order of nodes, as Linux lists them below ``root``.

    If Linux lists none, every logical CPU counts as a core.
    """
    node_of_cpu: dict[int, int] = {}
    for folder in root.glob("node/node[0-9]*"):
        for cpu in cpus_of(read_small_file(folder / "cpulist")):
            node_of_cpu[cpu] = int(folder.name.removeprefix("node"))
    cores: set[Core] = set()
    for folder in root.glob("cpu/cpu[0-9]*"):
        siblings = cpus_of(read_small_file(folder / "topology" / "thread_siblings_list"))
        if siblings:  # The list is empty if the CPU is offline.
            node = node_of_cpu.get(siblings[0], 0)
            cores.add(Core(tuple(siblings), node))
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
    """Return the numbers in a list of CPUs in the kernel's syntax: ``0-2,8`` is 0, 1, 2, 8."""
    cpus: list[int] = []
    for part in text.split(","):
        if part:
            low, _, high = part.partition("-")
            cpus += range(int(low), int(high or low) + 1)
    return cpus


def cores_within(cores: Sequence[Core], cpus: Collection[int]) -> list[Core]:
    """Return the cores that a process limited to the logical CPUs ``cpus`` may use.

    The returned cores have only those logical CPUs.
    """
    usable_cores = []
    for core in cores:
        usable_cpus = tuple(cpu for cpu in core.cpus if cpu in cpus)
        if usable_cpus:
            usable_cores.append(Core(usable_cpus, core.node))
    return usable_cores


def cores_of_rank(cores: Sequence[Core], processes: int, rank: int, reserved: int = 0) -> list[Core]:
    """Return the cores on which a rank computes if ``processes`` ranks divide ``cores`` evenly.

    ``rank`` counts from 0. The first ``reserved`` cores of each rank are left out, for communication. Raises
    MachineError if a rank would have no core.
    """
    cores_per_rank = len(cores) // processes
    if cores_per_rank <= reserved:
        raise MachineError(
            f"{len(cores)} usable cores are too few for {processes} ranks with {reserved} reserved in each. "
            "Lower world_size or device.comm_cores, or set device.pin=none"
        )
    start = rank * cores_per_rank
    end = start + cores_per_rank
    return list(cores[start + reserved : end])


def reserved_cpus(cores: Sequence[Core], processes: int, reserved: int) -> list[int]:
    """Return the logical CPUs of all ranks that are reserved for communication, one for each core."""
    cores_per_rank = len(cores) // processes
    cpus = []
    for rank in range(processes):
        start = rank * cores_per_rank
        cpus += [core.first for core in cores[start : start + reserved]]
    return cpus


def cores_of_numa_nodes(cores: Sequence[Core], processes: int, rank: int) -> list[Core]:
    """Return all cores of the NUMA nodes of rank ``rank``. ``processes`` ranks fill the nodes in order.

    With more ranks than nodes, several ranks have the same node. With more nodes than ranks, a rank has
    several nodes.
    """
    nodes = sorted({core.node for core in cores})
    start = rank * len(nodes) // processes
    end = (rank + 1) * len(nodes) // processes
    end = max(end, start + 1)
    return [core for core in cores if core.node in nodes[start:end]]


def core_mask(cores: Iterable[Core]) -> str:
    """Return the bit mask of the first logical CPU of each core: CPUs 1 and 2 are ``0x6``."""
    mask = 0
    for core in cores:
        mask |= 1 << core.first
    return hex(mask)


def pin_domains(cores: Sequence[Core], processes: int, reserved: int) -> str:
    """Return the core masks of all ranks in the syntax of ``I_MPI_PIN_DOMAIN``: ``[0x3,0xc,]``."""
    domains = ""
    for rank in range(processes):
        mask = core_mask(cores_of_rank(cores, processes, rank, reserved=reserved))
        domains += f"{mask},"
    return f"[{domains}]"


def pin(cpus: Collection[int]) -> None:
    """Bind every thread of this process to the logical CPUs ``cpus``.

    Linux then places new memory on the NUMA node of these CPUs.
    """
    for thread_id in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # The thread has ended.
            os.sched_setaffinity(int(thread_id), cpus)
