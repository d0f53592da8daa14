"""What several benchmarks share: contenders that take turns, the memory of a process, a line on the machine.

Contenders take turns (A B C A B C ...), since other work on the machine comes and goes. A ratio compares
processor times (user and kernel) of the same round. With one thread they equal the wall times of an idle
machine.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path


@dataclass
class Times:
    """The wall and processor seconds of a contender, one for each round."""

    wall: list[float]
    processor: list[float]


def in_turn(contenders: Mapping[str, Callable[[int], object]], rounds: int) -> dict[str, Times]:
    """Call each contender with the number of the round, and return the times.

    A round before these builds kernels and is not timed.
    """
    times = {name: Times([], []) for name in contenders}
    for contender in contenders.values():
        contender(0)
    for number in range(rounds):
        for name, contender in contenders.items():
            wall, processor = time.perf_counter(), time.process_time()
            contender(number)
            times[name].wall.append(time.perf_counter() - wall)
            times[name].processor.append(time.process_time() - processor)
    return times


def ratio(seconds: list[float], baseline: list[float]) -> str:
    """Return the median ratio of the rounds, with the lowest and the highest."""
    ratios = [a / b for a, b in zip(seconds, baseline, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def time_cells(times: Times, baseline: Times) -> str:
    """Return the cells ``median wall seconds | median processor seconds | ratio``."""
    medians = f"{statistics.median(times.wall):.2f} | {statistics.median(times.processor):.2f}"
    return f"{medians} | {ratio(times.processor, baseline.processor)}"


def reset_peak() -> None:
    """Set the peak memory of this process to its present memory."""
    Path("/proc/self/clear_refs").write_text("5")


def resident_bytes() -> int:
    return _status("VmRSS")


def peak_bytes() -> int:
    """Return the peak memory of this process since its last reset."""
    return _status("VmHWM")


def _status(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0]) * 1024


def machine() -> str:
    """Return the date, the processor, the release of torch and the load, for the line above a table."""
    import torch  # data_resume.py imports this module in processes whose imports it counts.

    from speechtrain.devices.cpu import chip

    name, _ = chip()
    load = os.getloadavg()[0]
    return f"{date.today()}, {name}, {os.cpu_count()} cores, torch {torch.__version__}, load {load:.1f}"
