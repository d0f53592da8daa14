"""Checkpoints in training: restoring, writing, handling failed writes, and saving after an error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from speechtrain.checkpoint.best_metric import metric_value
from speechtrain.checkpoint.checkpointer import Checkpointer
from speechtrain.distributed.group import Group
from speechtrain.errors import Diverged, MachineError, RunError
from speechtrain.tracking.base import Tracker
from speechtrain.training.run_state import Parts


def choose_checkpoint(group: Group, checkpointer: Checkpointer, resume: str = "auto") -> int | None:
    """Return the step of the checkpoint from which a run continues, or None if it starts at step 0.

    Rank 0 chooses for all ranks, because a network file system may show other files to other hosts. Damaged
    checkpoints are set aside. ``resume`` is ``auto`` (continue if a usable checkpoint exists), ``never`` or
    ``must``. Raises RunError if it is ``must`` and no usable checkpoint exists.
    """
    step = None
    if group.world.rank == 0:
        step = None if resume == "never" else checkpointer.newest()
        if step is None and resume == "must":
            raise RunError(f"resume=must, but {checkpointer.root} holds no usable checkpoint")
    shared_step: int | None = group.from_rank_0(step)
    return shared_step


@dataclass
class Saving:
    """Restores and saves the parts of a run. All ranks must call its methods in the same order.

    A checkpoint is written before the validation of its step, so an error in the validation loses no update.
    """

    group: Group
    checkpointer: Checkpointer
    tracker: Tracker
    on_save_error: str  # ``trainer.on_save_error``: ``stop`` or ``continue``
    _attempted_step: int = field(init=False, default=0)  # the step of the last save, failed or not
    _saved_step: int | None = field(init=False, default=None)  # the step of the last save that succeeded
    # The state of the data after the last complete update. It is None during an update.
    _data_state: dict[str, Any] | None = field(init=False, default=None)
    # The task's buffers that a checkpoint contains, such as BatchNorm's statistics. If this rank cannot save
    # after an error, the list is empty.
    _stored_buffers: list[Tensor] = field(init=False, default_factory=list)
    # During an update, these buffers with their values before it, because its forward passes change them.
    _earlier_buffers: list[tuple[Tensor, Tensor]] = field(init=False, default_factory=list)

    def restore(self, parts: Parts, step: int) -> None:
        """Continue from the checkpoint of ``step``, which ``choose_checkpoint`` has returned.

        Raises RunError if the checkpoint does not fit the run, or if this rank cannot read it.
        """
        rank = self.group.world.rank
        if rank:  # Rank 0 has verified the checkpoint already.
            try:
                self.checkpointer.verify(self.checkpointer.folder(step))
            except RunError as error:
                problem = f"rank {rank} cannot continue from the checkpoint of rank 0: {error}"
                raise RunError(f"{problem}. All hosts must see the same run_dir") from error
        self.checkpointer.restore(step, parts.states)
        self._attempted_step = self._saved_step = step
        # The validation of a checkpoint comes after the save. So it has a file of its own.
        validation = self.checkpointer.read_validation(step)
        if validation:
            parts.progress.load_state_dict({**validation, "validated": step})
        self.tracker.log("resume", {"step": step})

    def save(self, parts: Parts, is_last: bool = False) -> None:
        """Save a checkpoint of this step, unless one is saved already.

        A failed save is a warning if ``on_save_error`` is ``continue``. Otherwise, and with ``is_last`` at
        the end of the run, it raises MachineError.
        """
        step = parts.progress.step
        self.group.rank_status.begin_phase(step, "checkpoint")
        self._attempted_step = step
        is_writer = self.group.world.rank == 0 or self.checkpointer.needs_all_ranks
        if is_writer and self._saved_step != step:
            with handle_failed_write(self.tracker, self.on_save_error, is_last):
                self._write(parts)
        self.group.barrier()

    def add_validation(self, parts: Parts, is_last: bool = False) -> None:
        """Add the validation of this step to its checkpoint, if the checkpoint was saved."""
        progress = parts.progress
        if self.group.world.rank == 0 and self._saved_step == progress.step == progress.validated:
            metric = metric_value(parts.task, progress.metrics)
            with handle_failed_write(self.tracker, self.on_save_error, is_last):
                self.checkpointer.add_validation(
                    progress.step, metric, progress.metrics, progress.wall_s, parts.task.metric_mode
                )

    @contextlib.contextmanager
    def save_after_error(self, parts: Parts) -> Iterator[None]:
        """Return a context that saves the last complete update, if possible, after errors except Diverged.

        If all ranks must write, nothing is saved, because the other ranks may have ended.
        """
        can_save = self.group.world.rank == 0 and not self.checkpointer.needs_all_ranks
        if can_save:
            stored_names = parts.task.state_dict().keys()
            buffers = parts.task.named_buffers()
            self._stored_buffers = [buffer for name, buffer in buffers if name in stored_names]
        try:
            yield
        except Diverged:
            # Weights that have diverged must not replace an older checkpoint.
            raise
        except Exception:
            if can_save:
                self._save_complete_update(parts)
            raise

    def begin_update(self) -> None:
        """Copy the buffers that the forward passes of an update change."""
        self._earlier_buffers = [(buffer, buffer.clone()) for buffer in self._stored_buffers]

    @contextlib.contextmanager
    def without_save_after_error(self, parts: Parts) -> Iterator[None]:
        """Return a context for an update. After an error in it nothing is saved, as weights may be mixed."""
        self._data_state = None
        yield
        self._data_state = parts.data.state_dict()
        self._earlier_buffers = []

    def _save_complete_update(self, parts: Parts) -> None:
        """Save the last complete update after an error, if a save of it was not attempted before."""
        if self._data_state is None or parts.progress.step <= self._attempted_step:
            return
        # A continued run reads the micro-batches of the unfinished update again.
        parts.data.load_state_dict(self._data_state)
        with torch.no_grad():
            for buffer, earlier in self._earlier_buffers:
                buffer.copy_(earlier)
        try:
            self._write(parts)
        except Exception as error:
            self.tracker.log("warning", {"message": f"not saved after an error: {error}"})

    def _write(self, parts: Parts) -> None:
        step, averaged_weights = parts.progress.step, parts.average.averaged_state_dict(parts.task)
        path = self.checkpointer.save(step, parts.states, averaged_weights)
        self._saved_step = step
        self.tracker.log("checkpoint", {"step": step, "path": str(path)})


@contextlib.contextmanager
def handle_failed_write(tracker: Tracker, on_save_error: str, is_last: bool = False) -> Iterator[None]:
    """Return a context in which a failed write is a warning, because training goes on.

    It raises MachineError with ``is_last`` at the end of a run, or if ``on_save_error`` is ``stop``.
    """
    try:
        yield
    except OSError as error:
        if is_last or on_save_error == "stop":
            advice = "The last good checkpoint is intact, and the same command continues from it"
            raise MachineError(f"{error}. {advice}") from error
        message = f"{error}; training goes on, trainer.on_save_error=continue"
        tracker.log("warning", {"message": message})
