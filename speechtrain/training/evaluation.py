"""Evaluation: one code path for training, ``speechtrain-evaluate`` and the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from speechtrain.batch import Batch
from speechtrain.compute_policy import ComputePolicy
from speechtrain.counter_rng import key_of, seed_at
from speechtrain.devices.base import Device
from speechtrain.distributed.group import Group
from speechtrain.metrics import MetricSums
from speechtrain.task import Example, Task
from speechtrain.training.word_delays import WordDelays


class Interrupted(Exception):
    """An evaluation that was stopped on request; it has no metrics."""


@dataclass(frozen=True)
class Outcome:
    """One evaluation set's metrics (corpus sums divided once), their sums and counts, some utterances."""

    metrics: dict[str, float]
    totals: dict[str, tuple[float, float]]
    examples: tuple[Example, ...]
    seconds: float


def evaluate(
    task: Task,
    sets: Mapping[str, Iterable[Batch]],
    device: Device,
    policy: ComputePolicy,
    group: Group,
    examples: int | None = 20,
    stop_requested: Callable[[], bool] = lambda: False,
) -> dict[str, Outcome]:
    """Evaluate ``task`` on each named set; ``examples`` None keeps every decoded utterance.

    Sums are reduced over the group before they are divided, so the figures depend neither on the
    batch size nor on the number of ranks. The task's training mode is restored. ``stop_requested``, called
    before every batch, must return the same on all ranks. Raises Interrupted where it returns True.
    """
    training = task.training
    task.eval()
    outcomes = {}
    try:
        for name, batches in sets.items():
            begun = time.perf_counter()
            sums, delays = MetricSums(), WordDelays()
            kept: list[Example] = []
            for batch in batches:
                if stop_requested():
                    raise Interrupted(name)
                batch = task.prepare(batch, seed_at(*(key_of(utterance) for utterance in batch.ids)))
                with torch.no_grad(), policy.autocast(device.name):
                    result = task.evaluate(device.move(batch))
                device.mark_step()
                sums.add(result.metrics)
                delays.add(batch, result.examples, task.sample_rate)
                kept.extend(result.examples[: None if examples is None else max(0, examples - len(kept))])
            sums.reduce(group.sum)
            late = delays.medians(group.sum) if task.writes_text else {}
            outcomes[name] = Outcome(
                sums.means() | late, sums.totals(), tuple(kept), time.perf_counter() - begun
            )
    finally:
        task.train(training)
    return outcomes
