"""Restoring of the newest checkpoint, as a rank does it."""

from __future__ import annotations

from collections.abc import Mapping

from speechtrain.checkpoint.checkpointer import Checkpointer, Stateful


def restore(checkpointer: Checkpointer, states: Mapping[str, Stateful]) -> int | None:
    """Load the newest undamaged checkpoint and return its step, or None if there is no such checkpoint."""
    step = checkpointer.newest()
    if step is not None:
        checkpointer.restore(step, states)
    return step
