"""The interface of a tracker: told what happens, never able to stop training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any


class Tracker(ABC):
    """Receives a run's events as plain mappings, on rank 0 only.

    The events and their values; a value that is unknown may be left out, and a float may be
    non-finite. Seconds unless the name says otherwise, shares and error rates as fractions.

    ``start``
        once per process, before the first step: ``step`` (updates done already: 0, or where a
        resumed run goes on; later steps of an earlier attempt are void), ``steps`` (planned in
        all), ``parameters``, ``utterances`` (of one epoch), ``device``, ``precision``,
        ``world_size``, ``versions``.
    ``train``
        when a log line is due: ``step``, ``epoch``, ``loss``, ``lr``, ``grad_norm``,
        ``utterances_per_s``, ``audio_s_per_s``, ``data_wait`` (share of the time spent waiting for
        batches), ``memory_mib``, ``eta_s``, and ``metrics`` (further figures of the task, by name).
    ``valid``
        one per validation set: ``step``, ``set``, ``metrics`` (by name: ``loss``, ``wer``, ...),
        ``seconds``.
    ``examples``
        after a ``valid`` of a task that recognises speech: ``step``, ``set``, ``rows`` (mappings of
        ``id``, ``reference``, ``hypothesis``).
    ``checkpoint``
        ``step``, ``path``.
    ``warning``
        ``message`` (one line), ``step`` where it has one.
    ``end``
        ``status`` (as in ``result.json``), ``step``, ``metrics``, ``wall_s``.
    """

    enabled: bool = True
    """A tracker that is not enabled is told nothing, and touches nothing."""

    visible: bool = False
    """Whether a person sees its warnings at once; if none of a run's trackers is, stderr shows them."""

    @abstractmethod
    def log(self, event: str, values: Mapping[str, Any]) -> None:
        """Record one event; an unknown one is not an error. Whatever it raises, ``Trackers`` reports."""

    def close(self) -> None:  # noqa: B027 - nothing is a sensible default
        """Flush and release files."""
