"""Training that goes wrong: updates that are not finite, and a collapse that the task has seen."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import torch

from speechtrain.errors import Diverged
from speechtrain.files import atomic
from speechtrain.task import Alarm
from speechtrain.tracking.base import Tracker
from speechtrain.trainer_config import TrainerConfig
from speechtrain.training.optimizer_step import StepOutcome
from speechtrain.training.run_state import Parts


@dataclass(frozen=True)
class Recovery:
    """Counts skipped updates and acts on alarms; all ranks alike."""

    config: TrainerConfig
    tracker: Tracker
    seed: int
    run_dir: Path

    def count(self, outcomes: list[StepOutcome], parts: Parts) -> None:
        """Count updates that were skipped. Raises Diverged after too many non-finite ones in a row."""
        for outcome in outcomes:
            if outcome is StepOutcome.TAKEN:
                parts.progress.bad_updates = 0
            elif outcome is StepOutcome.SCALED:  # not a fault of the recipe
                parts.progress.scale_skips += 1
            else:
                self._refuse(parts)

    def _refuse(self, parts: Parts) -> None:
        """Count a non-finite update; raise Diverged, with a replay bundle, when there were too many."""
        progress = parts.progress
        progress.bad_updates += 1
        progress.skipped_updates += 1
        ids = [name for batch in parts.micro_batches for name in batch.ids if name]
        message = f"update {progress.step} skipped: non-finite loss or gradient (first cut {ids[:1]})"
        self.tracker.log("warning", {"step": progress.step, "message": message})
        if progress.bad_updates < self.config.max_bad_updates:
            return
        batches = [{k: v for k, v in vars(b).items() if k != "skipped"} for b in parts.micro_batches]
        replay = self.run_dir / "replay.pt"
        # RuntimeError: torch's for a full disk
        with contextlib.suppress(OSError, RuntimeError), atomic(replay) as temporary:
            held = {"step": progress.step, "seed": self.seed, "batches": batches}
            torch.save(held, temporary, pickle_protocol=2)
        clip = " or trainer.clip" if self.config.clip else ""
        raise Diverged(
            f"{progress.bad_updates} non-finite updates in a row up to step {progress.step}; "
            f"lower optimizer.lr{clip}, or look at the batches in {replay}"
        )

    def act_on(self, alarm: Alarm | None, step: int) -> None:
        """Warn of what the task's ``watch`` has seen; raise Diverged where ``on_collapse`` is ``stop``."""
        if alarm is None:
            return
        self.tracker.log("warning", {"step": step, "message": alarm.message})
        if self.config.on_collapse == "stop":
            raise Diverged(f"{alarm.message} (seen since step {alarm.onset}; trainer.on_collapse=stop)")
