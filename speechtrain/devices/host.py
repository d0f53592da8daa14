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
    """Return the number of CPUs whose time this process may use, at least 1.

    Without a quota the number is ``sys.maxsize``.
    """
    quotas = []
    for quota, *period_words in _limits("cpu.max", "cpu.cfs_quota_us"):
        # cpu.max holds the quota and its period. cpu.cfs_quota_us holds the quota only.
        period = period_words[0] if period_words else _PERIOD
        quotas.append(int(quota) // int(period))
    return max(1, min(quotas, default=sys.maxsize))


def threads(processes: int) -> int:
    """Return the number of threads for each of ``processes`` ranks on an accelerator's host, at least 1.

    The ranks share the cores of the host.
    """
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
        unit = "CPU" if cpus == 1 else "CPUs"
        reason = f"{processes} ranks would share {cpus} {unit}"
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
        is_v1 = controllers != ""  # The line of cgroup v2 is "0::PATH", without controllers.
        name = file_v1 if is_v1 else file
        group = _GROUPS / controllers / path.lstrip("/")
        # The limits of parent groups count, too. In a container, ``path`` may be a path of the host. Then its
        # folders do not exist here, and the container's group is the root.
        limits += [read_small_file(folder / name).split() for folder in (group, *group.parents)]
    return [words for words in limits if words and words[0].isdigit()]
