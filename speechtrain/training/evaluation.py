"""Evaluation: one code path for training, ``speechtrain evaluate`` and the report."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from speechtrain.batch import Batch
from speechtrain.compute_policy import ComputePolicy
from speechtrain.counter_rng import seed_at
from speechtrain.devices.base import Device
from speechtrain.distributed.group import Group
from speechtrain.metrics import MetricSums
from speechtrain.task import Example, Sums, Task, worst_examples


class Interrupted(Exception):
    """An evaluation that was stopped on request; it has no metrics."""


Totals = Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class Outcome:
    """One evaluation set's metrics (corpus sums divided once), their sums and counts, some utterances."""

    metrics: dict[str, float]  # the metrics by name, error rates as fractions
    totals: Totals  # the sum and the count of each metric
    examples: tuple[Example, ...]  # some utterances, or all of them
    seconds: float  # the time of the evaluation
    contradiction: str = ""  # a contradiction of loss and texts, with a remedy


def evaluate(
    task: Task,
    sets: Mapping[str, Iterable[Batch]],
    device: Device,
    policy: ComputePolicy,
    group: Group,
    examples: int | None = 20,
    stop_requested: Callable[[], bool] = lambda: False,
) -> dict[str, Outcome]:
    """Evaluate ``task`` on each named set.

    ``examples`` are kept of this rank's utterances, those with the most word errors first; None keeps all.

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
            sums, expected = MetricSums(), MetricSums()
            kept: list[Example] = []
            for batch in batches:
                if stop_requested():
                    raise Interrupted(name)
                batch = task.prepare(batch, seed_at(*batch.keys.tolist()))
                with torch.no_grad(), policy.autocast(device.name):
                    result = task.evaluate(device.move(batch))
                device.mark_step()
                sums.add(result.metrics)
                kept += result.examples
                if task.writes_text:
                    expected.add(_expected(batch, result.examples))
                if examples is not None:
                    kept = worst_examples(kept, examples)
            sums.reduce(group.sum)
            expected.reduce(group.sum)
            metrics, totals = sums.means(), sums.totals()
            told = _contradiction(task, totals, expected.totals())
            seconds = time.perf_counter() - begun
            outcomes[name] = Outcome(metrics, totals, tuple(kept), seconds, told)
    finally:
        task.train(training)
    return outcomes


# exp(-loss per label) is the geometric mean of the probability of the references' labels: at 0.35 nats 0.7,
# so a label is likelier than all else, an early end included. A text that lacks a fifth of the characters is
# then not what the model believes; where labels are in doubt, it may be
_MOST_NATS, _LEAST_LENGTH = 0.35, 0.8


def _expected(batch: Batch, examples: Iterable[Example]) -> Sums:
    """Characters of hypotheses and references, and labels and rows, of what the loss counts; () float64."""
    counted = {name for name, weight in zip(batch.ids, batch.weight.tolist(), strict=True) if weight}
    texts = [(e.hypothesis, e.reference) for e in examples if e.id in counted]
    lengths = [[len("".join(text.split())) for text in pair] for pair in texts]
    written, said = torch.tensor(lengths, dtype=torch.float64).reshape(-1, 2).sum(0)
    weight = batch.weight.double()
    return {"length": (written, said), "labels": ((batch.label_lengths * weight).sum(), weight.sum())}


def _contradiction(task: Task, totals: Totals, expected: Totals) -> str:
    """Says that the texts are shorter than the loss allows, where a search of sums over paths may help."""
    if not (expected and "loss" in totals and task.beam and task.decoder.searches) or task.decoder.sums_paths:
        return ""
    loss, labels, (written, said) = totals["loss"][0], expected["labels"][0], expected["length"]
    is_sure = labels > 0 and loss <= _MOST_NATS * labels
    if not is_sure or not said or written > _LEAST_LENGTH * said:
        return ""
    return (
        f"loss and error rate contradict each other: the model gives a label of the references a "
        f"probability of {math.exp(-loss / labels):.2f}, but the hypotheses have {written / said:.0%} of the "
        f"characters. The search stops too early; try decoder={task.beam}"
    )
