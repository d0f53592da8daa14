"""The CPUs and the memory that this host has for its ranks, as affinity and control groups limit them."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import psutil

from speechtrain.compute_policy import usable_cpus
from speechtrain.devices.affinity import cores_within, read_small_file, topology

_GROUPS = Path("/sys/fs/cgroup")
_PERIOD = "100000"  # microseconds, the period of every quota that Docker, Kubernetes and systemd set


def cpu_quota() -> int:
    """Return the number of CPUs whose time this process may use, at least 1, or a very large one."""
    quotas = []
    for quota, *words in _limits("cpu.max", "cpu.cfs_quota_us"):
        period = words[0] if words else _PERIOD
        quotas.append(int(quota) // int(period))
    return max(1, min(quotas, default=sys.maxsize))


def threads(processes: int) -> int:
    """Return the number of cores for each of ``processes`` ranks on an accelerator's host, at least 1."""
    cores = min(len(cores_within(topology(), usable_cpus())), cpu_quota())
    return max(1, cores // processes)


def free_memory() -> int:
    """Return the bytes that new processes may use here."""
    limits = [int(words[0]) for words in _limits("memory.max", "memory.limit_in_bytes")]
    return min(psutil.virtual_memory().available, *limits, sys.maxsize)


def oversubscription(processes: int, memory: int) -> str:
    """Return why ``processes`` ranks of ``memory`` bytes each do not fit here, and the fix.

    The text is empty if they fit.
    """
    cpus = min(len(usable_cpus()), cpu_quota())
    free = free_memory()
    if processes > cpus:
        reason = f"{processes} ranks would share {cpus} CPU{'s' * (cpus > 1)}"
    elif processes * memory > free:
        per_rank = f"{memory / 2**30:.1f} GiB each (weights, gradients, optimizer state, average)"
        reason = f"{processes} x {per_rank} do not fit into {free / 2**30:.1f} GiB of free memory"
    else:
        return ""
    return f"{platform.node()}: {reason}. Lower world_size, or set device.oversubscribe=true"


def _limits(file: str, file_v1: str) -> list[list[str]]:
    """Return the words of each limit that is set for this process.

    ``file`` holds the limit in cgroup v2, ``file_v1`` in cgroup v1.
    """
    limits = []
    for line in read_small_file(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        group = _GROUPS / controllers / path.lstrip("/")
        name = file_v1 if controllers else file
        # The parents limit it as well. A container may see its group as the root, under the host's path.
        limits += [read_small_file(folder / name).split() for folder in (group, *group.parents)]
    return [words for words in limits if words and words[0].isdigit()]
