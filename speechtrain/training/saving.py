"""Checkpoints in training: when one is written, what a failed one means, and what an error saves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from speechtrain.checkpoint.best_metric import metric_value
from speechtrain.checkpoint.whole import Checkpointer
from speechtrain.distributed.group import Group
from speechtrain.errors import Diverged, MachineError, RunError
from speechtrain.tracking.base import Tracker
from speechtrain.training.run_state import Parts


@dataclass
class Saving:
    """Saves the parts of a run; all ranks call it alike.

    A checkpoint is written before the validation of its step, so what goes wrong there loses no update.
    """

    group: Group
    checkpointer: Checkpointer
    tracker: Tracker
    on_save_error: str
    _tried: int = field(init=False, default=0)  # the step of the last save
    _written: int | None = field(init=False, default=None)  # the step of the last save that succeeded
    # the data's state; None while the rest is not whole
    _data: dict[str, Any] | None = field(init=False, default=None)

    def restore(self, parts: Parts, resume: str) -> None:
        """Continue from the newest usable checkpoint, as ``resume`` says. Raises RunError."""
        found = None
        if resume != "never":
            with self.group.main_process_first():  # it sets damaged ones aside
                found = self.checkpointer.restore(parts.states)
        if found is not None:
            self._tried, self._written = found, found
            if noted := self.checkpointer.noted(found):
                parts.progress.load_state_dict({**noted, "validated": found})
            self.tracker.log("resume", {"step": found})
        elif resume == "must":
            raise RunError(f"resume=must, but {self.checkpointer.root} holds no usable checkpoint")

    def save(self, parts: Parts, is_last: bool = False) -> None:
        """Save, once for each step; only while training goes on may a failure be a mere warning."""
        step = parts.progress.step
        self.group.rank_status.at(step, "checkpoint")
        self._tried = step
        if (self.group.world.rank == 0 or self.checkpointer.needs_all) and self._written != step:
            with self._or_warn(is_last):
                self._write(parts)
        self.group.barrier()

    def note(self, parts: Parts, is_last: bool = False) -> None:
        """Add the validation of this step to its checkpoint."""
        progress = parts.progress
        if self.group.world.rank == 0 and self._written == progress.step == progress.validated:
            metric = metric_value(parts.task, progress.metrics)
            with self._or_warn(is_last):
                self.checkpointer.note(progress.step, metric, progress.metrics, progress.wall_s)

    @contextlib.contextmanager
    def rescued(self, parts: Parts) -> Iterator[None]:
        """A context in which any error but Diverged first saves the last whole update, where it can."""
        try:
            yield
        except Diverged:  # these weights are not worth the place of older ones
            raise
        except Exception:
            # the others may have gone, so only a rank that saves alone can
            is_able = self.group.world.rank == 0 and not self.checkpointer.needs_all
            if self._data is not None and parts.progress.step > self._tried and is_able:
                parts.data.load_state_dict(self._data)  # micro-batches of the unfinished update come again
                try:
                    self._write(parts)
                except Exception as error:
                    self.tracker.log("warning", {"message": f"not saved after an error: {error}"})
            raise

    @contextlib.contextmanager
    def updating(self, parts: Parts) -> Iterator[None]:
        """A context of an update: while it is not whole, nothing can be saved."""
        self._data = None
        yield
        self._data = parts.data.state_dict()

    def _write(self, parts: Parts) -> None:
        step, weights = parts.progress.step, parts.average.averaged_state_dict(parts.task)
        path = self.checkpointer.save(step, parts.states, weights)
        self._written = step
        self.tracker.log("checkpoint", {"step": step, "path": str(path)})

    @contextlib.contextmanager
    def _or_warn(self, is_last: bool) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if is_last or self.on_save_error == "stop":
                then = "the last good checkpoint is intact, and the same command continues from it"
                raise MachineError(f"{error}; {then}") from error
            message = f"{error}; training goes on, trainer.on_save_error=continue"
            self.tracker.log("warning", {"message": message})
