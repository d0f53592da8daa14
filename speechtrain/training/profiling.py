"""A torch profile of the steps A to B of a run: ``trainer.profile=A:B``."""

from __future__ import annotations

from pathlib import Path

import torch

from speechtrain.files import atomic


def start_profile() -> torch.profiler.profile:
    """Return a profile that records the operations from now on."""
    profile = torch.profiler.profile(record_shapes=True, with_stack=False)
    profile.start()
    return profile


def write_profile(profile: torch.profiler.profile, path: Path) -> None:
    """End the profile, and write a Chrome trace of it."""
    profile.stop()
    with atomic(path, durable=False) as temporary:
        profile.export_chrome_trace(str(temporary))
