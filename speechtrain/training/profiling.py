"""A torch profile of some steps of a run: ``trainer.profile=A:B``."""

from __future__ import annotations

from pathlib import Path

import torch

from speechtrain.files import atomic
from speechtrain.trainer_config import profile_steps


class StepProfiler:
    """Records steps A to B of ``spec``, and writes a Chrome trace; an empty ``spec`` does nothing."""

    def __init__(self, spec: str, run_dir: Path) -> None:
        self.first, self.last = profile_steps(spec)
        self.path = run_dir / f"profile-{self.first}-{self.last}.json"
        self._profile: torch.profiler.profile | None = None

    def begin(self, step: int) -> None:
        if step == self.first:
            self._profile = torch.profiler.profile(record_shapes=True, with_stack=False)
            self._profile.start()

    def end(self, step: int, final: bool) -> None:
        """``final``: no other follows, so an open profile is written."""
        if self._profile is not None and (step >= self.last or final):
            self._profile.stop()
            with atomic(self.path, durable=False) as temporary:
                self._profile.export_chrome_trace(str(temporary))
            self._profile = None
