"""The interface of a tracker: told what happens, never able to stop training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any


class Tracker(ABC):
    """Receives a run's events as plain mappings, on rank 0 only.

    Events: ``start`` (parameters, utterances, versions, planned steps), ``train`` (step, epoch,
    loss, lr, grad_norm, utterances_per_s, audio_s_per_s, data_wait as a share, memory_mib, eta_s),
    ``valid`` (step, set, metrics by name, seconds), ``examples`` (set, rows of id, reference,
    hypothesis), ``checkpoint`` (step, path), ``warning`` (message), ``end`` (status, metrics).
    """

    @abstractmethod
    def log(self, event: str, values: Mapping[str, Any]) -> None:
        """Record one event. ``step`` is in ``values`` where the event has one."""

    def close(self) -> None:  # noqa: B027 - nothing is a sensible default
        """Flush and release files."""
