"""The CPUs and the memory that this host has for its ranks, as affinity and control groups limit them."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import psutil

from speechtrain.compute_policy import usable_cpus
from speechtrain.devices.affinity import read, topology, usable

_GROUPS = Path("/sys/fs/cgroup")
_PERIOD = "100000"  # microseconds, of every quota that Docker, Kubernetes and systemd set


def cpu_quota() -> int:
    """The number of CPUs whose time this process may use, at least 1; a very large one without a quota."""
    quotas = [int(words[0]) // int([*words, _PERIOD][1]) for words in _limits("cpu.max", "cpu.cfs_quota_us")]
    return max(1, min(quotas, default=sys.maxsize))


def threads(processes: int) -> int:
    """The cores of each of ``processes`` ranks: what an accelerator's host computes with, at least 1."""
    return max(1, min(len(usable(topology(), usable_cpus())), cpu_quota()) // processes)


def free_memory() -> int:
    """The bytes that new processes may use here."""
    limits = [int(words[0]) for words in _limits("memory.max", "memory.limit_in_bytes")]
    return min(psutil.virtual_memory().available, *limits, sys.maxsize)


def oversubscription(processes: int, memory: int) -> str:
    """Why ``processes`` ranks of ``memory`` bytes each do not fit here, and the fix; empty if they do."""
    cpus = min(len(usable_cpus()), cpu_quota())
    free = free_memory()
    if processes > cpus:
        reason = f"{processes} ranks would share {cpus} CPU{'s' * (cpus > 1)}"
    elif processes * memory > free:
        each = f"{memory / 2**30:.1f} GiB each (weights, gradients, optimizer state, average)"
        reason = f"{processes} x {each} do not fit into {free / 2**30:.1f} GiB of free memory"
    else:
        return ""
    return f"{platform.node()}: {reason}; lower world_size, or set device.oversubscribe=true"


def _limits(file: str, older: str) -> list[list[str]]:
    """The words of ``file`` (cgroup v2) or ``older`` (v1) in this process's groups, where a limit is set."""
    found = []
    for line in read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        own, name = _GROUPS / controllers / path.lstrip("/"), older if controllers else file
        # all above it: a container may see its own group as the root, under the path that the host sees
        found += [read(folder / name).split() for folder in (own, *own.parents)]
    return [words for words in found if words and words[0].isdigit()]
