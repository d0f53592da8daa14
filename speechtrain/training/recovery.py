"""Reactions to failing training: to updates that are not finite, and to a collapse that the task detects."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from speechtrain.checkpoint.state_file import write_state
from speechtrain.checkpoint.whole import UNWRITABLE
from speechtrain.errors import ConfigError, DataError, Diverged
from speechtrain.files import atomic
from speechtrain.task import Alarm
from speechtrain.tracking.base import Tracker
from speechtrain.trainer_config import TrainerConfig
from speechtrain.training.optimizer_step import UpdateResult
from speechtrain.training.run_state import Parts


def _details(parts: Parts) -> str:
    """Return the terms and the recordings of this rank whose loss is not finite, as the end of a message."""
    names: dict[str, None] = {}  # in the order of the batch, without repetitions
    for batch, (terms, rows) in zip(parts.micro_batches, parts.losses, strict=False):
        names |= {f"the term {name}": None for name, (total, _) in terms.items() if not total.isfinite()}
        finite_rows = [True] * len(batch.ids) if rows is None else rows.isfinite().tolist()
        for name, is_finite in zip(batch.ids, finite_rows, strict=True):
            if name and not is_finite:
                names[f"the loss of {name!r}"] = None
    if not names:
        return ""
    hidden_names = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f": {', '.join([*names][:3])}{hidden_names}"


@dataclass(frozen=True)
class Recovery:
    """Counts skipped updates, and handles alarms of the task. All ranks do this alike."""

    config: TrainerConfig
    tracker: Tracker
    seed: int
    run_dir: Path

    def count(self, results: list[UpdateResult], parts: Parts) -> None:
        """Count the skipped updates in ``results``, which are in the order of the updates.

        Raises Diverged after ``max_bad_updates`` non-finite updates in a row, and DataError if the last one
        had no usable recording.
        """
        for result in results:
            if result is UpdateResult.APPLIED:
                parts.progress.bad_updates = 0
            elif result is UpdateResult.SCALE_LOWERED:
                # The recipe is not at fault, so this does not count as a bad update.
                parts.progress.scale_skips += 1
            else:
                self._count_bad_update(parts)

    def _count_bad_update(self, parts: Parts) -> None:
        """Count a non-finite or empty update. After too many in a row, write a replay bundle and raise."""
        progress = parts.progress
        progress.bad_updates += 1
        progress.skipped_updates += 1
        cause = f"non-finite loss or gradient{_details(parts)}"
        emptiness = self._emptiness(parts)
        message = f"update {progress.step} skipped: {emptiness or cause}"
        self.tracker.log("warning", {"step": progress.step, "message": message})
        if progress.bad_updates < self.config.max_bad_updates:
            return
        if emptiness:
            updates = f"{progress.bad_updates} skipped updates in a row, {progress.step}"
            raise DataError(f"the last of {updates}, had {emptiness}")
        path = self._write_replay(parts)
        clip = " or trainer.clip" if self.config.clip else ""
        raise Diverged(
            f"{progress.bad_updates} non-finite updates in a row up to step {progress.step}: "
            f"lower optimizer.lr{clip}, or look at the batches in {path}"
        )

    def refuse_untrained(self, parts: Parts) -> None:
        """Raise Diverged or DataError for a run that has ended and has skipped each of its updates."""
        steps = parts.progress.step
        if not 0 < steps == parts.progress.skipped_updates:
            return
        if emptiness := self._emptiness(parts):
            raise DataError(f"nothing was learnt in {steps} updates. The last one had {emptiness}")
        raise Diverged(f"none of {steps} updates had a finite loss, so nothing was learnt")

    def _emptiness(self, parts: Parts) -> str:
        """Return a text with this rank's unusable recordings if the latest update had no other, or ""."""
        if parts.weight.cpu():
            return ""
        skips = [skip for batch in parts.micro_batches for skip in batch.skipped]
        examples = "; ".join(f"{skip.id!r} ({skip.reason}: {skip.detail})" for skip in skips[:3])
        return f"no usable recording{examples and f': {examples}'}. skipped.jsonl lists all"

    def _write_replay(self, parts: Parts) -> Path:
        """Write the micro-batches of the latest update. Return the path, even if the disk is full.

        The file is for a person who looks for the cause. Without it, the error is still reported.
        """
        batches = []
        for batch in parts.micro_batches:
            fields = dict(vars(batch))
            del fields["skipped"]  # No checkpoint stores objects of this class.
            batches.append(fields)
        bundle = {"step": parts.progress.step, "seed": self.seed, "batches": batches}
        path = self.run_dir / "replay.safetensors"
        with contextlib.suppress(*UNWRITABLE, ConfigError), atomic(path) as temporary:
            write_state(temporary, bundle)
        return path

    def handle_alarm(self, alarm: Alarm | None, step: int) -> None:
        """Log an alarm of the task's ``watch``. Raises Diverged if ``on_collapse`` is ``stop``."""
        if alarm is None:
            return
        self.tracker.log("warning", {"step": step, "message": alarm.message})
        if self.config.on_collapse == "stop":
            raise Diverged(f"{alarm.message} (seen since step {alarm.onset}, trainer.on_collapse=stop)")
