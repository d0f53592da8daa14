"""A torch profile of the steps A to B of a run: ``trainer.profile=A:B``."""

from __future__ import annotations

from pathlib import Path

import torch

from speechtrain.files import atomic
from speechtrain.trainer_config import profile_steps


class StepProfiler:
    """Records the steps of ``spec`` and writes a Chrome trace. An empty ``spec`` does nothing."""

    def __init__(self, spec: str, run_dir: Path) -> None:
        self.first_step, self.last_step = profile_steps(spec)
        self.path = run_dir / f"profile-{self.first_step}-{self.last_step}.json"
        self._profile: torch.profiler.profile | None = None

    def begin(self, step: int) -> None:
        """Start the profile if ``step`` is the first step of ``spec``."""
        if step == self.first_step:
            self._profile = torch.profiler.profile(record_shapes=True, with_stack=False)
            self._profile.start()

    def end(self, step: int, final: bool) -> None:
        """Write the profile after its last step, or after the final step of the run."""
        if self._profile is not None and (step >= self.last_step or final):
            self._profile.stop()
            with atomic(self.path, durable=False) as temporary:
                self._profile.export_chrome_trace(str(temporary))
            self._profile = None
