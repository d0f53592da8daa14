"""A torch profile of some steps of a run: ``trainer.profile=A:B``."""

from __future__ import annotations

from pathlib import Path

import torch

from speechtrain.trainer_config import profile_steps


class StepProfiler:
    """Records steps ``first`` to ``last`` and writes a Chrome trace; an empty ``spec`` does nothing.

    Raises ConfigError where ``spec`` is not ``A:B`` with 1 ≤ A ≤ B.
    """

    def __init__(self, spec: str, run_dir: Path) -> None:
        self.first, self.last = profile_steps(spec)
        self.path = run_dir / f"profile-{self.first}-{self.last}.json"
        self._profile: torch.profiler.profile | None = None

    def begin(self, step: int) -> None:
        """Called before ``step``."""
        if step == self.first:
            self._profile = torch.profiler.profile(record_shapes=True, with_stack=False)
            self._profile.start()

    def end(self, step: int, final: bool) -> None:
        """Called after ``step``; ``final``: no other follows, so an open profile is written."""
        if self._profile is not None and (step >= self.last or final):
            self._profile.stop()
            self._profile.export_chrome_trace(str(self.path))
            self._profile = None
