"""The log lines of a rank: its warnings, its environment, its data and its start."""

from __future__ import annotations

import logging
import platform
import sys
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

import torch

from speechtrain.compute_policy import usable_cpus
from speechtrain.data.base import DataModule
from speechtrain.devices.base import Device
from speechtrain.distributed.world import World
from speechtrain.launch.launcher import Job, forwarded_environment
from speechtrain.run_directory import CONFIG, note_environment, rank_folder
from speechtrain.start.run_config import RunConfig
from speechtrain.task import Task
from speechtrain.tracking.base import Tracker
from speechtrain.tracking.console import TextLog
from speechtrain.tracking.group import Trackers

_MAX_EARLY_LINES = 1000  # log lines that are stored until the trackers exist
_LOGGED_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "LD_PRELOAD", "OMP_*", "KMP_*", "CCL_*", "I_MPI_PIN*")
"""Patterns of environment variables that are logged, in addition to the device's variables."""


class _TrackerHandler(logging.Handler):
    """Sends warnings of Python's logging, such as a skipped recording or a lost worker, to the trackers."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__(logging.WARNING)
        self.tracker = tracker

    def emit(self, record: logging.LogRecord) -> None:
        self.tracker.log("warning", {"message": record.getMessage()})


def log_environment(run_dir: Path, world: World, device: Device, tracker: Tracker) -> None:
    """Log this rank's environment without secrets. The first rank of a host also stores it in run.json."""
    job = Job(run_dir / CONFIG, run_dir, forwarded_variables=device.facts.forwarded_variables)
    environment = {
        **forwarded_environment(job, (*_LOGGED_VARIABLES, *device.facts.network_variables)),
        "threads": str(torch.get_num_threads()),
        "cpus": str(len(usable_cpus())),
    }
    if not world.local_rank:
        note_environment(rank_folder(run_dir, world.rank), platform.node(), environment)
    tracker.log("environment", {"host": platform.node(), **environment})


def log_start(run: RunConfig, task: Task, data: DataModule, tracker: Tracker, entries: Any) -> None:
    """Log two events: ``data``, with the size of the data, its report and its preparation, and ``start``.

    ``entries`` are entries of the event ``start``. They must contain ``ranks`` and ``accumulate``.
    """
    updates_per_epoch = data.micro_batches_per_epoch / (entries["ranks"] * entries["accumulate"])
    content = data.content()
    sizes: dict[str, Any] = {name: content[name] for name in ("hours", "speakers") if name in content}
    sizes |= {**data.counts(), "updates_per_epoch": max(1, round(updates_per_epoch))}
    preparation = {"sample_rate": task.sample_rate, **run.preparation()}
    tracker.log("data", {**sizes, "report": data.report(), **preparation})
    parameters = sum(p.numel() for p in task.parameters())
    network_entries = {"model": type(task).__name__, "parameters": parameters, "shapes": data.shapes()}
    frozen = task.frozen()
    if frozen:
        network_entries["frozen"] = frozen
    tracker.log("start", entries | network_entries)


def buffer_log_lines() -> MemoryHandler:
    """Store all log lines in the returned handler. ``open_tracker`` sends them to the trackers."""
    buffer = MemoryHandler(_MAX_EARLY_LINES, flushLevel=sys.maxsize)
    logging.getLogger("speechtrain").handlers[:] = [buffer]
    # lhotse gives the root logger a handler, which would print each line again.
    logging.getLogger("speechtrain").propagate = False
    return buffer


def open_tracker(run: RunConfig, world: World, early_lines: MemoryHandler) -> Tracker:
    """Return the tracker of this rank, and send all warnings to it, including ``early_lines``.

    Rank 0 has the configured trackers and ``output.log``. The tracker of another rank ignores all events.
    """
    tracker = Trackers()
    if not world.rank:
        configured = run.tracking.build()
        tracker = configured if isinstance(configured, Trackers) else Trackers({"tracking": configured})
        tracker.add("output.log", TextLog(str(run.run_dir)))
    logging.getLogger("speechtrain").handlers[:] = [_TrackerHandler(tracker)]
    early_lines.setTarget(_TrackerHandler(tracker))
    early_lines.close()  # This sends the lines to the target.
    return tracker
