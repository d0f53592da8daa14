"""The interface of a tracker. It receives a run's events and can never stop training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

PROGRESS = (
    *("step", "steps", "epoch", "loss", "lr", "grad_norm", "utterances_per_s", "audio_s_per_s"),
    *("data_wait", "memory_mib", "eta_s"),
)
"""The fields of a ``train`` event that every task has."""


def metrics_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the task's own metrics in a ``train`` or ``valid`` event, by name.

    >>> metrics_of({"step": 8, "set": "test", "seconds": 2.0, "wer": 0.03})
    {'wer': 0.03}
    """
    shared_names = {*PROGRESS, "event", "time", "set", "seconds"}
    # Only ``valid`` events have a set. Their loss is a metric of the task. A ``train`` event has its loss in
    # PROGRESS.
    if "set" in values:
        shared_names.remove("loss")
    return {name: value for name, value in values.items() if name not in shared_names}


def scalars(event: str, values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a ``train`` or ``valid`` event by tag, without its step.

    >>> scalars("valid", {"step": 8, "set": "test", "seconds": 2.0, "wer": 0.03})
    {'valid/test/wer': 0.03}
    """
    folder = event if event == "train" else f"{event}/{values['set']}"
    numbers = {}
    for name, value in values.items():
        if isinstance(value, int | float) and name not in ("step", "steps", "seconds"):
            numbers[f"{folder}/{name}"] = value
    return numbers


class Tracker(ABC):
    """Receives a run's events as plain mappings, on rank 0 only.

    A constructor opens no file, because the run directory may not exist yet. ``log`` opens the file.

    The list below has the events and their values. An unknown value may be absent or None, and a float
    may be non-finite. Times are in seconds unless the name has a unit. Shares and error rates are fractions.

    ``environment``
        first, once per process, as texts: ``host``, variables, ``threads`` and ``cpus`` (their number).
    ``data``
        before ``start``: ``train_samples`` and ``eval_samples`` (recordings), ``hours``, ``speakers`` if all
        are known, ``updates_per_epoch``, ``report`` (``DataModule.report``), and the parameters of the front
        end and the augmentation under their names in the config.
    ``start``
        once per process: ``model`` (the class), ``parameters``, ``steps`` (planned in all), and other entries
        about the run.
    ``device``
        once per process: ``device``, ``chip``, ``precision``, ``policy``, ``computes`` (the precision that is
        computed), and the ``milliseconds`` of each policy that was timed.
    ``warm_up``
        on a device that compiles graphs, before the first update: their counts, ``seconds``.
    ``plan``
        in a run that is planned by time, with each plan: ``step``, ``steps``, ``hours``, ``validate_every``,
        ``s_per_update``, ``s_per_validation``.
    ``resume``
        after ``start`` if a checkpoint was restored: ``step``, the updates already done. Later
        steps of earlier attempts are void.
    ``train``
        at every log interval: ``step``, ``steps``, ``epoch`` (a float), ``loss``, ``lr``,
        ``grad_norm``, ``seconds`` (since the line before), ``utterances_per_s``, ``audio_s_per_s``,
        ``data_wait`` (share of the time spent waiting for batches), ``memory_mib``, ``eta_s``. Any
        other number is a metric of the task, under its own name (``PROGRESS`` lists the names above).
    ``epoch``
        after each epoch of ``updates_per_epoch`` updates and before its validation: ``step``, ``epoch`` (its
        number, from 1), ``seconds`` (of its updates), ``utterances_per_s``.
    ``valid``
        one per validation set: ``step``, ``set``, ``seconds``. Any other number is a metric
        (``loss``, ``wer``, ...).
    ``examples``
        after a ``valid`` of a task that recognises speech: ``step``, ``set``, ``rows`` (mappings of
        ``id``, ``reference``, ``hypothesis``, ``errors`` in words), the worst of rank 0's share first.
    ``checkpoint``
        ``step``, ``path``.
    ``warning``
        ``message`` (one line), ``step`` if the warning has one.
    ``end``
        the content of ``result.json``: ``status``, ``steps``, ``metrics`` (by name), ``wall_s``,
        ``speed``. A tracker that is not in the background also gets ``tracker_seconds`` and ``dropped``
        (see ``Trackers``).
    """

    enabled: bool = True
    """A tracker that is not enabled receives no events and opens no files."""

    background: bool = True
    """Whether ``Trackers`` calls ``log`` and ``close`` in a separate thread, with copies of the values."""

    visible: bool = False
    """Whether a person sees its warnings at once. Without a visible tracker, warnings go to stderr."""

    @abstractmethod
    def log(self, event: str, values: Mapping[str, Any]) -> None:
        """Record one event. An unknown event is not an error. ``Trackers`` reports every exception."""

    def close(self) -> None:  # noqa: B027 - nothing is a sensible default
        """Flush and release files."""
