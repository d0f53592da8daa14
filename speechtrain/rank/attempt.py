"""The outcome of one rank process, which can be written at any time, also after a failure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from speechtrain.checkpoint.checkpointer import Checkpointer, validation_metrics
from speechtrain.distributed.group import Group, SingleProcess
from speechtrain.files import with_finite_numbers
from speechtrain.tracking.base import Tracker
from speechtrain.training.run_state import Progress


@dataclass
class Attempt:
    """One process of one rank, from its start to its end.

    Training sets the fields one by one, as soon as their values exist. If the process fails, ``result`` uses
    the values so far.
    """

    status: str = "failed"  # the status in ``result.json``. Training replaces it if it ends normally
    progress: Progress = field(default_factory=Progress)
    metric: str = "loss"  # ``Task.metric``
    metric_mode: str = ""  # ``Task.metric_mode``
    checkpointer: Checkpointer | None = None
    tracker: Tracker | None = None
    group: Group = field(default_factory=SingleProcess)
    unwatch: Callable[[], None] = lambda: None
    """Stops the watchdog. If the watchdog has begun to end the process, this call does not return."""
    peak_memory: Callable[[], int] | None = None  # returns the highest memory of the device in bytes
    content: Mapping[str, str | float] = field(default_factory=dict)  # DataModule.content of the training set
    limits: Any = None  # the ``trainer`` node of the config
    computes: str = ""  # ``DeviceRecord.computes``

    def result(self) -> dict[str, Any]:
        """Return the content of ``result.json``.

        ``metrics`` belong to the best checkpoint, or to the last validation if no checkpoint is the best.
        """
        last_metrics: dict[str, Any] = with_finite_numbers(self.progress.metrics)
        metrics, best_folder = last_metrics, None
        memory_mib = None
        if self.peak_memory is not None:
            memory_mib = round(self.peak_memory() / 2**20, 1)
        if self.checkpointer is not None:
            best_folder, best_value = self.checkpointer.best()
            if best_folder is not None:
                metrics = validation_metrics(best_folder) or {self.metric: best_value}
        return {
            "status": self.status,
            "metric": metrics.get(self.metric),
            "metric_mode": self.metric_mode,
            "metrics": metrics,
            "checkpoint": best_folder and best_folder.name,
            "last_metrics": last_metrics,
            "steps": self.progress.step,
            "wall_s": round(self.progress.wall_s, 3),
            "skipped_updates": self.progress.skipped_updates,
            "scale_skips": self.progress.scale_skips,
            "speed": self.progress.speed(),
            "data": dict(self.content),
            "memory_mib": memory_mib,
            "computes": self.computes,
        }

    def end(self, result: dict[str, Any]) -> None:
        """Report the result to the trackers and close them."""
        if self.tracker is not None:
            self.tracker.log("end", result)
            self.tracker.close()
