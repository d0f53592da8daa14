"""The CPU: plain PyTorch, oneDNN underneath."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import torch

from speechtrain.batch import Batch
from speechtrain.devices.base import Device
from speechtrain.errors import MachineError


def usable_cores() -> int:
    """Cores that this process may use (affinity and cgroup masks respected)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class CPU(Device):
    """Threads, matmul form and bf16 support of a CPU.

    ``threads`` 0 shares the usable cores evenly among the ranks of a host. ``matmul`` ``medium``
    lets fp32 products run through oneDNN, 1.6 to 2.3 times faster on an AVX512-BF16 machine with
    unchanged error, but rounded to bf16 where the chip has AMX; ``highest`` never rounds.
    """

    name = "cpu"
    collectives = "gloo"

    def __init__(self, threads: int = 0, matmul: str = "highest") -> None:
        if matmul not in ("highest", "high", "medium"):
            raise ValueError(f"device.matmul is {matmul!r}; it is one of highest, high, medium")
        self.threads = threads
        self.matmul = matmul

    def environment(self, processes: int) -> dict[str, str]:
        threads = self.threads or max(1, usable_cores() // processes)
        # without it torchrun sets one thread, ruinous here; oneDNN otherwise keeps 1024 primitives,
        # which variable lengths fill with memory that is never used again
        variables = {"OMP_NUM_THREADS": str(threads), "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
        # libgomp's threads otherwise spin 300,000 times for the next parallel region. Where others use the
        # cores too, two threads on two busy cores took 819 ms of CPU and 2.1 s for a step (an LSTM and small
        # products) that takes 164 ms and 0.66 s so (2026-11-21, load 9); a free machine was not to be had
        variables["GOMP_SPINCOUNT"] = "1000"
        return variables

    def open(self, local_rank: int) -> None:
        threads = self.threads or int(os.environ.get("OMP_NUM_THREADS", "0") or 0)
        if threads > 0:
            torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(self.matmul)

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.float32, torch.bfloat16)

    def move(self, batch: Batch) -> Batch:
        return batch

    def memory(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def available_memory() -> int:
    """Bytes that may still be used on this host. Raises MachineError where the kernel does not say."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise MachineError("/proc/meminfo names no MemAvailable")
