"""Validation in training: when it is due, on the averaged weights, and what it decides."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from speechtrain.batch import Batch
from speechtrain.checkpoint.best_metric import reaches_target
from speechtrain.compute_policy import ComputePolicy
from speechtrain.devices.base import Device
from speechtrain.distributed.group import Group
from speechtrain.tracking.base import Tracker
from speechtrain.training.evaluation import Interrupted, Outcome, evaluate
from speechtrain.training.run_state import Parts


@dataclass(frozen=True)
class Validation:
    """Evaluates the averaged weights on every named set and keeps the metrics in the progress."""

    device: Device
    policy: ComputePolicy
    group: Group
    tracker: Tracker
    target: float | None
    stop_requested: Callable[[], bool]
    _told: set[str] = field(default_factory=set)  # the sets of which a contradiction was told

    def is_due(self, parts: Parts, status: str, is_validation_step: bool) -> bool:
        """True where the weights must be evaluated before anything else.

        A stop does not wait for it: a preempted run is saved, and evaluated when it continues.
        """
        is_due = bool(status) or is_validation_step
        return is_due and status != "preempted" and parts.progress.step > parts.progress.validated

    def run(self, parts: Parts, status: str = "") -> str:
        """Evaluate; ``target`` where the target is reached, ``preempted`` where a stop request came first.

        With a ``status`` that ends the run, or the target, the final decoder evaluates the sets once more.
        """
        task, progress = parts.task, parts.progress
        try:
            outcomes = self._of_all_sets(parts)
            named = list(outcomes.items())
            for name, outcome in list(outcomes.items())[:1]:
                progress.metrics = {**outcome.metrics}  # they select checkpoints, and a sweep reads them
                _note_decoding(parts, name, outcome.seconds)
            found = "target" if self.is_target_reached(parts) else ""
            if (status or found) and task.final_decoder is not None and task.final_decoder.searches:
                usual, task.decoder = task.decoder, task.final_decoder
                try:
                    named += [(f"final/{name}", o) for name, o in self._of_all_sets(parts).items()]
                finally:
                    task.decoder = usual
        except Interrupted:
            return "preempted"
        self._report(dict(named), progress.step)
        progress.metrics |= {f"{name}/{key}": value for name, o in named for key, value in o.metrics.items()}
        progress.validated = progress.step
        return found

    def _of_all_sets(self, parts: Parts) -> dict[str, Outcome]:
        group = self.group

        def stop() -> bool:  # before every batch
            group.rank_status.at(parts.progress.step, "validation")
            return group.any(self.stop_requested())

        sets = parts.data.valid(group.world.rank, group.world.size)
        return self.evaluate(parts, {name: _noting(batches, parts) for name, batches in sets.items()}, stop)

    def is_target_reached(self, parts: Parts) -> bool:
        """Return whether the latest validation reached ``trainer.target``."""
        return reaches_target(parts.task, parts.progress.metrics, self.target)

    def evaluate(
        self, parts: Parts, sets: dict[str, Iterable[Batch]], stop: Callable[[], bool] = lambda: False
    ) -> dict[str, Outcome]:
        """Evaluate with the averaged weights, in graphs of their own: an update's stays as it was."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.device.mark_step)
            stack.enter_context(parts.average.swapped(parts.task))
            self.device.mark_step()
            task, group = parts.task, self.group
            return evaluate(task, sets, self.device, policy=self.policy, group=group, stop_requested=stop)

    def _report(self, outcomes: dict[str, Outcome], step: int) -> None:
        for name, outcome in outcomes.items():
            values = {"step": step, "set": name, "seconds": outcome.seconds, **outcome.metrics}
            self.tracker.log("valid", values)
            rows = [example.row() for example in outcome.examples]
            self.tracker.log("examples", {"step": step, "set": name, "rows": rows})
            if outcome.contradiction and name not in self._told:
                self._told.add(name)
                self.tracker.log("warning", {"step": step, "message": f"{name}: {outcome.contradiction}"})


def _note_decoding(parts: Parts, name: str, seconds: float) -> None:
    """Keep how long the evaluation of a set took for each second of its audio, of a task that decodes."""
    audio_s = getattr(parts.data.valid(0, 1)[name], "seconds", 0.0) or math.inf
    parts.progress.decode_ms_per_audio_s = 1000 * seconds / audio_s * parts.task.writes_text


def _noting(batches: Iterable[Batch], parts: Parts) -> Iterator[Batch]:
    """``batches``, each kept as the latest."""
    for batch in batches:
        parts.latest = batch
        yield batch
