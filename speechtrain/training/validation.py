"""Validation in training: when it is due, and how its metrics change the status of the run.

``trainer.py`` explains the status.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from speechtrain.batch import Batch
from speechtrain.checkpoint.best_metric import reaches_target
from speechtrain.compute_policy import ComputePolicy
from speechtrain.devices.base import Device
from speechtrain.distributed.group import Group
from speechtrain.run_directory import Status
from speechtrain.tracking.base import Tracker
from speechtrain.training.evaluation import Interrupted, Outcome, evaluate
from speechtrain.training.run_state import Parts


@dataclass(frozen=True)
class Validation:
    """Evaluates the averaged weights on every validation set, and stores the metrics in the progress."""

    device: Device
    policy: ComputePolicy
    group: Group
    tracker: Tracker
    target: float | None  # ``trainer.target``, a value of the task's best metric, or None
    stop_requested: Callable[[], bool]
    record_latest: Callable[[Iterable[Batch]], Iterable[Batch]]  # yields batches, and stores the latest one
    _warned: set[tuple[str, str]] = field(default_factory=set)  # names of sets, and kinds of warnings

    def is_due(self, parts: Parts, status: Status | None, is_validation_step: bool) -> bool:
        """Return whether the present weights must be evaluated before training goes on or ends.

        A stop does not wait for a validation: a preempted run is saved, and validated when it continues.
        """
        if status is Status.PREEMPTED:
            return False
        is_new_step = parts.progress.step > parts.progress.validated
        return is_new_step and (status is not None or is_validation_step)

    def run(self, parts: Parts, status: Status | None = None) -> Status | None:
        """Evaluate and report all sets. Return the status that follows from the validation.

        The status is TARGET if the target is reached, PREEMPTED if a stop was requested before the end of the
        validation, and otherwise None. If the run ends by ``status`` or by the target, the final
        decoder evaluates the sets once more.
        """
        progress = parts.progress
        new_status = None
        try:
            outcomes = self._evaluate_sets(parts)
            _record_metrics(outcomes, parts)
            if self.is_target_reached(parts):
                new_status = Status.TARGET
            if status is not None or new_status is not None:
                outcomes |= self._evaluate_with_final_decoder(parts)
        except Interrupted:
            return Status.PREEMPTED
        self._report(outcomes, progress.step)
        for name, outcome in outcomes.items():
            for metric, mean in outcome.metrics.items():
                progress.metrics[f"{name}/{metric}"] = mean
        progress.validated = progress.step
        return new_status

    def _evaluate_sets(self, parts: Parts, decoder: Any = None) -> dict[str, Outcome]:
        """Return the outcomes of all validation sets with ``decoder``. None is the decoder of the task."""
        group = self.group

        def is_stop_requested() -> bool:
            """Return whether any rank must stop. The evaluation calls this before every batch."""
            group.rank_status.begin_phase(parts.progress.step, "validation")
            return group.any(self.stop_requested())

        sets: dict[str, Iterable[Batch]] = {}
        for name, batches in parts.data.valid(group.world.rank, group.world.size).items():
            sets[name] = self.record_latest(batches)
        return self.evaluate(parts, sets, is_stop_requested, decoder)

    def _evaluate_with_final_decoder(self, parts: Parts) -> dict[str, Outcome]:
        """Return the outcomes of the final decoder, or {} if that decoder does not search."""
        decoder = parts.task.final_decoder
        if decoder is None or not decoder.searches:
            return {}
        outcomes = self._evaluate_sets(parts, decoder)
        return {f"final/{name}": outcome for name, outcome in outcomes.items()}

    def is_target_reached(self, parts: Parts) -> bool:
        """Return whether the latest validation reached ``trainer.target``."""
        return reaches_target(parts.task, parts.progress.metrics, self.target)

    def evaluate(
        self,
        parts: Parts,
        sets: dict[str, Iterable[Batch]],
        is_stop_requested: Callable[[], bool] = lambda: False,
        decoder: Any = None,
    ) -> dict[str, Outcome]:
        """Return the outcomes of ``sets`` with the averaged weights and ``decoder``. None is the task's.

        The step is marked after the change to the averaged weights and after the change back. Otherwise a
        lazy device would add these changes to the graph of an update.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(self.device.mark_step)
            stack.enter_context(parts.average.use_average(parts.task))
            self.device.mark_step()
            return evaluate(
                parts.task,
                sets,
                self.device,
                policy=self.policy,
                group=self.group,
                stop_requested=is_stop_requested,
                decoder=decoder,
            )

    def _report(self, outcomes: dict[str, Outcome], step: int) -> None:
        """Log the metrics and examples of each set, and a warning of each kind once for each set."""
        for name, outcome in outcomes.items():
            values = {"step": step, "set": name, "seconds": outcome.seconds, **outcome.metrics}
            self.tracker.log("valid", values)
            rows = [example.row() for example in outcome.examples]
            self.tracker.log("examples", {"step": step, "set": name, "rows": rows})
            for kind, warning in outcome.warnings.items():
                if (name, kind) not in self._warned:
                    self._warned.add((name, kind))
                    self.tracker.log("warning", {"step": step, "message": f"{name}: {warning}"})


def _record_metrics(outcomes: dict[str, Outcome], parts: Parts) -> None:
    """Store the metrics of the first set and its speed of evaluation in the progress.

    These metrics select the best checkpoints, and a sweep reads them.
    """
    if not outcomes:
        return
    progress = parts.progress
    outcome = next(iter(outcomes.values()))
    progress.metrics = {**outcome.metrics}
    progress.decode_ms_per_audio_s = 0.0
    if parts.task.writes_text and outcome.audio_seconds:
        progress.decode_ms_per_audio_s = 1000 * outcome.real_time_factor
