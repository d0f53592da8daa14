"""Evaluation: one code path for training, ``speechtrain-evaluate`` and the report."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from speechtrain.batch import Batch
from speechtrain.compute_policy import ComputePolicy
from speechtrain.counter_rng import key_of, seed_at
from speechtrain.devices.base import Device
from speechtrain.distributed.group import Group
from speechtrain.metrics import MetricSums, word_errors
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
    contradiction: str = ""  # of loss and texts: what it is, and what to try


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
                kept += result.examples
                if task.writes_text:
                    sums.add({_LENGTH: _lengths(result.examples)})
                if examples is not None:
                    kept = worst(kept, examples)
            sums.reduce(group.sum)
            metrics, totals = sums.means(), sums.totals()
            length, _ = metrics.pop(_LENGTH, math.inf), totals.pop(_LENGTH, None)
            metrics |= delays.medians(group.sum) if task.writes_text else {}
            told, seconds = _contradiction(task, totals, length), time.perf_counter() - begun
            outcomes[name] = Outcome(metrics, totals, tuple(kept), seconds, told)
    finally:
        task.train(training)
    return outcomes


def worst(examples: Iterable[Example], count: int) -> list[Example]:
    """The utterances with the most word errors, the first of equals first."""
    return heapq.nlargest(count, examples, key=lambda one: word_errors(one.reference, one.hypothesis)[0])


_LENGTH = "length"
# the loss of an utterance with n characters is -log of their probability: at 0.35 nats a character, the model
# gives each of them 0.7 and more. So few are missing in its likeliest text, and a search that leaves out a
# fifth has not found it
_MOST_NATS, _LEAST_LENGTH = 0.35, 0.8


def _lengths(examples: Iterable[Example]) -> tuple[Tensor, Tensor]:
    """The characters of hypotheses and of references, () float64."""
    pairs = [(len("".join(e.hypothesis.split())), len("".join(e.reference.split()))) for e in examples]
    written, said = torch.tensor(pairs, dtype=torch.float64).reshape(-1, 2).sum(0)
    return written, said


def _contradiction(task: Task, totals: Mapping[str, tuple[float, float]], length: float) -> str:
    """Says that the texts are shorter than the loss allows, where a search of sums over paths may help."""
    loss, characters = totals.get("loss", (math.inf, 0))[0], totals.get("cer", (0, 0))[1]
    if not task.beam or task.decoder.sums_paths or not characters:
        return ""
    nats = loss / characters
    if not (nats <= _MOST_NATS and length <= _LEAST_LENGTH):
        return ""
    return (
        f"loss and error rate contradict each other: the model gives a character of the references a "
        f"probability of {math.exp(-nats):.2f}, but the hypotheses have {length:.0%} of the characters. "
        f"The search stops too early; try decoder={task.beam}"
    )
