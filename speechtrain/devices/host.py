"""The CPUs and the memory of this host that its ranks may use, as affinity and control groups limit them."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import psutil

from speechtrain.compute_policy import usable_cpus
from speechtrain.devices.affinity import cores_within, read_small_file, topology

_CGROUPS = Path("/sys/fs/cgroup")
_PERIOD = "100000"  # microseconds, the period of every quota that Docker, Kubernetes and systemd set


def cpu_quota() -> int:
    """Return the number of CPUs whose time this process may use, at least 1.

    A control group limits the time by a quota: microseconds of CPU time in each period. Without a quota,
    return ``sys.maxsize``.
    """
    cpu_counts = []
    for words in _limits("cpu.max", "cpu.cfs_quota_us").values():
        # The file cpu.max contains the quota and its period, cpu.cfs_quota_us the quota only.
        quota = words[0]
        period = words[1] if len(words) > 1 else _PERIOD
        cpu_counts.append(int(quota) // int(period))
    return max(1, min(cpu_counts, default=sys.maxsize))


def threads(processes: int) -> int:
    """Return the number of threads for each of ``processes`` ranks on an accelerator's host, at least 1.

    The ranks divide the usable physical cores of the host.
    """
    usable_cores = cores_within(topology(), usable_cpus())
    core_count = min(len(usable_cores), cpu_quota())
    return max(1, core_count // processes)


def free_memory() -> int:
    """Return the number of bytes that new processes on this host may use."""
    free_bytes = [psutil.virtual_memory().available]
    for file, words in _limits("memory.max", "memory.limit_in_bytes").items():
        free_bytes.append(max(0, int(words[0]) - _used_memory(file.parent)))
    return min(free_bytes)


def _used_memory(group: Path) -> int:
    """Return the bytes that a control group uses. File pages that the kernel can drop do not count."""
    used = read_small_file(group / "memory.current") or read_small_file(group / "memory.usage_in_bytes")
    counts = dict(line.split() for line in read_small_file(group / "memory.stat").splitlines())
    droppable = counts.get("total_inactive_file") or counts.get("inactive_file", "0")  # cgroup v1, or v2
    return int(used or 0) - int(droppable)


def oversubscription(processes: int, memory: int) -> str:
    """Return why ``processes`` ranks of ``memory`` bytes each do not fit here, and the fix.

    The text is empty if they fit.
    """
    cpu_count = min(len(usable_cpus()), cpu_quota())
    free_bytes = free_memory()
    if processes > cpu_count:
        unit = "CPU" if cpu_count == 1 else "CPUs"
        reason = f"{processes} ranks would share {cpu_count} {unit}"
    elif processes * memory > free_bytes:
        per_rank = f"{memory / 2**30:.1f} GiB each (weights, gradients, optimizer state, average)"
        reason = f"{processes} x {per_rank} do not fit into {free_bytes / 2**30:.1f} GiB of free memory"
    else:
        return ""
    return f"{platform.node()}: {reason}. Lower world_size, or set device.oversubscribe=true"


def _limits(file_v2: str, file_v1: str) -> dict[Path, list[str]]:
    """Return each file with a limit that is set for this process, with its words.

    ``file_v2`` is the name of the file in cgroup v2, and ``file_v1`` in cgroup v1.
    """
    limits = {}
    for line in read_small_file(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        is_v1 = controllers != ""  # The line of cgroup v2 is "0::PATH", without controllers.
        file = file_v1 if is_v1 else file_v2
        group = _CGROUPS / controllers / path.lstrip("/")
        # The limits of parent groups also count. In a container, ``path`` may be a path of the host, whose
        # folders do not exist here. Then the container's own group is the root.
        for folder in (group, *group.parents):
            words = read_small_file(folder / file).split()
            if words and words[0].isdigit():  # Without a limit, the word is "max" or -1.
                limits[folder / file] = words
    return limits
