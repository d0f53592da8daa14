"""The interface of a tracker: told what happens, never able to stop training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

PROGRESS = (
    *("step", "steps", "epoch", "loss", "lr", "grad_norm", "utterances_per_s", "audio_s_per_s"),
    *("data_wait", "memory_mib", "eta_s"),
)
"""What a ``train`` event says of every task."""


def metrics_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The task's own metrics in a ``train`` or ``valid`` event, by name.

    >>> metrics_of({"step": 8, "set": "test", "seconds": 2.0, "wer": 0.03})
    {'wer': 0.03}
    """
    ours = {*PROGRESS, "event", "time", "set", "seconds"} - ({"loss"} if "set" in values else set())
    return {name: value for name, value in values.items() if name not in ours}


class Tracker(ABC):
    """Receives a run's events as plain mappings, on rank 0 only.

    The events and their values; a value that is unknown may be left out or None, and a float may
    be non-finite. Seconds unless the name says otherwise, shares and error rates as fractions.

    ``start``
        once per process: ``parameters``, ``steps`` (planned in all), and what else is worth a note.
    ``resume``
        after ``start`` where a checkpoint was restored: ``step``, the updates done already. Later
        steps of earlier attempts are void.
    ``train``
        when a log line is due: ``step``, ``steps``, ``epoch`` (a float), ``loss``, ``lr``,
        ``grad_norm``, ``utterances_per_s``, ``audio_s_per_s``, ``data_wait`` (share of the time
        spent waiting for batches), ``memory_mib``, ``eta_s``; any other number is a metric of the
        task, under its own name (``PROGRESS`` lists the names above).
    ``valid``
        one per validation set: ``step``, ``set``, ``seconds``; any other number is a metric
        (``loss``, ``wer``, ...).
    ``examples``
        after a ``valid`` of a task that recognises speech: ``step``, ``set``, ``rows`` (mappings of
        ``id``, ``reference``, ``hypothesis``).
    ``checkpoint``
        ``step``, ``path``.
    ``warning``
        ``message`` (one line), ``step`` where it has one.
    ``end``
        what ``result.json`` says: ``status``, ``steps``, ``metrics`` (by name), ``wall_s``.
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
