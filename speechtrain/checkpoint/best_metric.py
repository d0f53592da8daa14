"""The task's metric: it selects the best checkpoint, ends a run at its target, and is optimised by a sweep.

``Task.metric`` is its name. Its value is that on the first evaluation set. Lower is better unless
``Task.metric_mode`` is ``max``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from speechtrain.run_directory import read_manifest
from speechtrain.task import Task

_HIGH_WER = 0.9
"""Above this word error rate, a comparison by WER says little, and checkpoints are compared by CER."""


def metric_value(task: Task, metrics: Mapping[str, float]) -> float | None:
    """Return the value of the task's metric among ``metrics``, or None before the first validation."""
    return metrics.get(task.metric)


def reaches_target(task: Task, metrics: Mapping[str, float], target: float | None) -> bool:
    """Return whether the task's metric is at least as good as ``trainer.target``."""
    value = metric_value(task, metrics)
    if target is None or value is None:
        return False
    return signed(value, task.metric_mode) <= signed(target, task.metric_mode)


def signed(value: float, mode: str) -> float:
    """Return a value that is lower for a better metric. ``mode`` is ``Task.metric_mode``."""
    return -value if mode == "max" else value


def selection_key(folder: Path) -> tuple[float, float, float]:
    """Return the sort key of the checkpoint in ``folder``. One without a validation is the worst."""
    manifest = read_manifest(folder)
    if manifest is None:
        return math.inf, math.inf, math.inf
    return sort_key(manifest.metric, manifest.metrics or {}, manifest.metric_mode)


def sort_key(
    metric: float | None, metrics: Mapping[str, float | None], mode: str = ""
) -> tuple[float, float, float]:
    """Return a sort key for the ``metrics`` of a validation. The best validation has the smallest key.

    ``metric`` is the value of the task's metric, and ``mode`` its ``metric_mode``. Validations are compared
    by this metric, then by the loss. If the metric is a WER above 90 %, they are compared by the CER, then by
    the loss.
    """
    value, loss = _or_infinite(metric), _or_infinite(metrics.get("loss"))
    if value > _HIGH_WER and value == metrics.get("wer"):
        return _HIGH_WER, _or_infinite(metrics.get("cer")), loss
    if metric is not None:
        value = signed(metric, mode)
    return value, -math.inf, loss  # Without a comparison by CER, -inf is a constant in its position.


def _or_infinite(value: float | None) -> float:
    """Return a stored value. None, which is stored for unknown and infinite values, becomes infinity."""
    return math.inf if value is None else value
