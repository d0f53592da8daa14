"""The metric that selects the best checkpoint, that ends a run at its target, and that a sweep minimises.

The task names the metric (``Task.metric``), and its first evaluation set gives the value. Lower is better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from speechtrain.run_directory import read_manifest
from speechtrain.task import Task

_HIGH_WER = 0.9


def metric_value(task: Task, metrics: Mapping[str, float]) -> float | None:
    """Return the value of the task's metric among ``metrics``, or None before the first validation."""
    return metrics.get(task.metric)


def reaches_target(task: Task, metrics: Mapping[str, float], target: float | None) -> bool:
    """Return whether the task's metric is at most ``trainer.target``."""
    value = metric_value(task, metrics)
    return target is not None and value is not None and value <= target


def selection_key(folder: Path) -> tuple[float, float, float]:
    """Return the key that orders checkpoints by their validation. The best checkpoint has the least key.

    The task's metric decides, then the loss. A WER above 90 % says little about a model, so among such
    checkpoints the CER decides, then the loss.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        return math.inf, math.inf, math.inf
    metrics = manifest.metrics or {}
    value, loss = _or_infinite(manifest.metric), _or_infinite(metrics.get("loss"))
    if value > _HIGH_WER and value == metrics.get("wer"):
        return _HIGH_WER, _or_infinite(metrics.get("cer")), loss
    return value, -math.inf, loss


def _or_infinite(value: float | None) -> float:
    """Return a stored value, or infinity for None, which stands for an unknown or infinite value."""
    return math.inf if value is None else value
