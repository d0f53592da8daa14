"""The log lines of a rank: its warnings, its environment, its data and its start."""

from __future__ import annotations

import logging
import platform
import sys
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from speechtrain.compute_policy import usable_cpus
from speechtrain.config.build import build
from speechtrain.config.resolved import resolve
from speechtrain.data.base import DataModule
from speechtrain.devices.base import Device
from speechtrain.launcher import Job, World, forwarded_environment
from speechtrain.optim.schedules import Schedule
from speechtrain.run_directory import CONFIG, note_environment, rank_folder
from speechtrain.task import Task
from speechtrain.tracking.base import Tracker
from speechtrain.tracking.console import TextLog
from speechtrain.tracking.group import Trackers

_LOG = logging.getLogger(__name__)
_MAX_EARLY_WARNINGS = 1000  # They are kept until the trackers exist.
_ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT", "LD_PRELOAD", "OMP_*", "KMP_*", "CCL_*", "I_MPI_PIN*")
"""Patterns of the variables that are logged with the device's own."""


class _Warnings(logging.Handler):
    """Sends warnings of the parts (a skipped recording, a lost worker) to the trackers."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__(logging.WARNING)
        self.tracker = tracker

    def emit(self, record: logging.LogRecord) -> None:
        self.tracker.log("warning", {"message": record.getMessage()})


def log_environment(run_dir: Path, world: World, device: Device, tracker: Tracker) -> None:
    """Log this rank's environment without secrets. The first rank of a host stores it."""
    job = Job(run_dir / CONFIG, run_dir, forwarded_variables=device.facts.forwarded_variables)
    environment = {
        **forwarded_environment(job, (*_ENVIRONMENT, *device.facts.network_variables)),
        "threads": str(torch.get_num_threads()),
        "cpus": str(len(usable_cpus())),
    }
    if not world.local_rank:
        note_environment(rank_folder(run_dir, world.rank), platform.node(), environment)
    tracker.log("environment", {"host": platform.node(), **environment})


def log_start(config: DictConfig, task: Task, data: DataModule, tracker: Tracker, facts: Any) -> None:
    """Log the data pipeline with the number of its recordings, and the start with its ``facts``."""
    nodes = resolve(config)
    features = {"sample_rate": task.sample_rate, **nodes["encoder"].get("features", {})}
    pipeline_keys = features | nodes["augment"]
    del pipeline_keys["_target_"]
    updates_per_epoch = data.micro_batches_per_epoch / (facts["ranks"] * facts["accumulate"])
    counts = {**data.counts(), "updates_per_epoch": max(1, round(updates_per_epoch))}
    tracker.log("data", counts | pipeline_keys)
    model_facts = {"parameters": sum(p.numel() for p in task.parameters()), "shapes": data.shapes()}
    tracker.log("start", facts | model_facts | data.report())


def keep_log_lines() -> MemoryHandler:
    """Keep all log lines until the trackers exist."""
    early = MemoryHandler(_MAX_EARLY_WARNINGS, flushLevel=sys.maxsize)
    logging.getLogger("speechtrain").handlers[:] = [early]
    # lhotse gives the root logger a handler, which would print each line again.
    logging.getLogger("speechtrain").propagate = False
    return early


def first_facts(config: DictConfig, schedule: Schedule) -> dict[str, Any]:
    """Return the facts that only the start line of a new run has."""
    facts: dict[str, Any] = {"warm-up steps": schedule.warmup, "from data": config.from_data}
    return {name: value for name, value in facts.items() if value}


def open_tracker(config: DictConfig, world: World, early: MemoryHandler) -> Tracker:
    """Return rank 0's trackers, with the warnings so far and all later ones. Other ranks have log files."""
    tracker = Trackers()
    if not world.rank:
        part: Tracker = build(config, "tracking")
        tracker = part if isinstance(part, Trackers) else Trackers({"tracking": part})
        tracker.add("output.log", TextLog(config.run_dir))
    logging.getLogger("speechtrain").handlers[:] = [_Warnings(tracker)]
    early.setTarget(_Warnings(tracker))
    early.close()
    return tracker


def warn_of_crowded_labels(data: DataModule, task: Task) -> None:
    """Warn if many transcripts have more labels than the encoder has frames."""
    encoder = getattr(task, "encoder", None)
    line = data.crowded_transcripts(encoder.frames) if encoder else ""
    if line:
        _LOG.warning(line)
