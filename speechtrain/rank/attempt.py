"""The outcome of one process of a run. It is complete at every moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from speechtrain.checkpoint.whole import Checkpointer, validation_metrics
from speechtrain.distributed.group import Group, SingleProcess
from speechtrain.distributed.watchdog import Watch
from speechtrain.files import with_finite_numbers
from speechtrain.tracking.base import Tracker
from speechtrain.training.run_state import Progress


@dataclass
class Attempt:
    """The part of one process in a run. It holds the progress even if the process fails."""

    status: str = "failed"
    progress: Progress = field(default_factory=Progress)
    metric: str = "loss"
    checkpointer: Checkpointer | None = None
    tracker: Tracker | None = None
    group: Group = field(default_factory=SingleProcess)
    watch: Watch | None = None
    peak_memory: Callable[[], int] | None = None  # of the device, in bytes
    content: Mapping[str, str | float] = field(default_factory=dict)  # of the training set

    def result(self) -> dict[str, Any]:
        """Return the content of ``result.json``, with the metrics of the best checkpoint if it exists."""
        last_metrics: dict[str, Any] = with_finite_numbers(self.progress.metrics)
        metrics, best = last_metrics, None
        memory_mib = None
        if self.peak_memory is not None:
            memory_mib = round(self.peak_memory() / 2**20, 1)
        if self.checkpointer is not None:
            best, best_value = self.checkpointer.best()
            if best is not None:
                metrics = validation_metrics(best) or {self.metric: best_value}
        return {
            "status": self.status,
            "metric": metrics.get(self.metric),
            "metrics": metrics,
            "checkpoint": best and best.name,
            "last_metrics": last_metrics,
            "steps": self.progress.step,
            "wall_s": round(self.progress.wall_s, 3),
            "skipped_updates": self.progress.skipped_updates,
            "scale_skips": self.progress.scale_skips,
            "speed": self.progress.speed(),
            "data": dict(self.content),
            "memory_mib": memory_mib,
        }

    def unwatch(self) -> None:
        """Stop the watchdog. If the watchdog is about to end the process, this does not return."""
        if self.watch is not None:
            self.watch.close()

    def end(self, result: dict[str, Any]) -> None:
        """Report the result to the trackers and close them."""
        if self.tracker is not None:
            self.tracker.log("end", result)
            self.tracker.close()
