"""Evaluation: one code path for training, ``speechtrain evaluate`` and the report."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from speechtrain.batch import Batch
from speechtrain.compute_policy import ComputePolicy
from speechtrain.counter_rng import seed_at
from speechtrain.devices.base import Device
from speechtrain.distributed.group import Group
from speechtrain.metrics import MetricSums, error_rates
from speechtrain.task import Evaluation, Example, Sums, Task, worst_examples


class Interrupted(Exception):
    """An evaluation was stopped on request. It does not have metrics."""


Totals = Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class Outcome:
    """The evaluation of one set. A metric is a sum over the whole set that is divided once."""

    metrics: dict[str, float]  # the metrics by name, error rates as fractions
    totals: Totals  # the sum and the count of each metric
    examples: tuple[Example, ...]  # some utterances, or all of them
    seconds: float  # the time of the evaluation, with reading, loss and search
    audio_seconds: float  # the audio of all ranks
    contradiction: str = ""  # a contradiction of loss and texts, with a remedy

    @property
    def real_time_factor(self) -> float:
        """The seconds of the evaluation for each second of audio, or infinity without audio."""
        if not self.audio_seconds:
            return math.inf
        return self.seconds / self.audio_seconds

    def with_normaliser(self, normalise: Callable[[str], str]) -> Outcome:
        """Return the outcome with error rates of texts that ``normalise`` changes.

        It changes the hypotheses, and the references after the normaliser of the run. ``examples`` must have
        all utterances of the set, as in ``speechtrain evaluate``.
        """
        examples = []
        for example in self.examples:
            reference, hypothesis = normalise(example.reference), normalise(example.hypothesis)
            examples.append(Example(example.id, reference, hypothesis))
        sums = MetricSums()
        sums.add(error_rates((example.reference, example.hypothesis) for example in examples))
        return replace(
            self,
            metrics=self.metrics | sums.means(),
            totals={**self.totals, **sums.totals()},
            examples=tuple(examples),
        )


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

    The outcome has the ``examples`` utterances of this rank with the most word errors, or all utterances if
    ``examples`` is None.

    Sums are reduced over the group before they are divided. So the metrics depend neither on the batch size
    nor on the number of ranks. The task's training mode is restored. ``stop_requested`` is called before
    every batch and must return the same on all ranks. Raises Interrupted if it returns True.
    """
    is_training = task.training
    task.eval()
    outcomes = {}
    try:
        for name, batches in sets.items():
            evaluations = _evaluations(task, batches, device, policy, stop_requested)
            outcomes[name] = _collect(evaluations, task, group, examples)
    finally:
        task.train(is_training)
    return outcomes


def _evaluations(
    task: Task,
    batches: Iterable[Batch],
    device: Device,
    policy: ComputePolicy,
    stop_requested: Callable[[], bool],
) -> Iterator[tuple[Batch, Evaluation]]:
    """Yield each batch, prepared and on the host, with its evaluation. Raises Interrupted on request."""
    for batch in batches:
        if stop_requested():
            raise Interrupted
        batch = task.prepare(batch, seed_at(*batch.keys.tolist()))
        with torch.no_grad(), policy.autocast(device.name):
            evaluation = task.evaluate(device.move(batch))
        device.mark_step()
        yield batch, evaluation


def _collect(
    evaluations: Iterable[tuple[Batch, Evaluation]], task: Task, group: Group, examples: int | None
) -> Outcome:
    """Return the outcome of a set, whose metrics are reduced over the ranks of ``group``."""
    start = time.perf_counter()
    sums, lengths = MetricSums(), MetricSums()
    utterances: list[Example] = []
    for batch, evaluation in evaluations:
        sums.add(evaluation.metrics)
        lengths.add({"audio": (torch.tensor(batch.seconds, dtype=torch.float64), torch.tensor(1.0))})
        utterances += evaluation.examples
        if task.writes_text:
            lengths.add(_lengths(batch, evaluation.examples))
        if examples is not None:
            utterances = worst_examples(utterances, examples)
    sums.reduce(group.sum)
    lengths.reduce(group.sum)
    totals = sums.totals()
    length_totals = lengths.totals()
    contradiction = _contradiction(task, totals, length_totals)
    audio_seconds = length_totals.get("audio", (0.0, 0.0))[0]
    seconds = time.perf_counter() - start
    return Outcome(sums.means(), totals, tuple(utterances), seconds, audio_seconds, contradiction)


# exp(-loss per label) is the geometric mean of the probabilities of the references' labels. At 0.35 nats it
# is 0.7, so a label is more probable than all alternatives together, an early end included. A hypothesis that
# lacks a fifth of the characters then contradicts the model. If the labels are less probable, it may not.
_MOST_NATS, _LEAST_LENGTH = 0.35, 0.8


def _lengths(batch: Batch, examples: Iterable[Example]) -> Sums:
    """Return lengths of the rows that the loss counts, as () float64.

    ``length`` has the characters of the hypotheses and of the references, without white space. ``labels`` has
    the number of labels and of rows.
    """
    ids = {name for name, weight in zip(batch.ids, batch.weight.tolist(), strict=True) if weight}
    hypotheses, references = 0, 0
    for example in examples:
        if example.id in ids:
            hypotheses += _characters(example.hypothesis)
            references += _characters(example.reference)
    hypothesis_length, reference_length = torch.tensor([hypotheses, references], dtype=torch.float64)
    weight = batch.weight.double()
    labels = (batch.label_lengths * weight).sum()
    return {"length": (hypothesis_length, reference_length), "labels": (labels, weight.sum())}


def _characters(text: str) -> int:
    """Return the number of characters of a text, without white space."""
    return len("".join(text.split()))


def _contradiction(task: Task, totals: Totals, lengths: Totals) -> str:
    """Return a warning if the hypotheses are shorter than the loss suggests, else an empty string.

    A search that sums over the paths of a text may help. So the task must have one and not use it already.
    """
    has_both = "length" in lengths and "loss" in totals
    if not has_both or not task.beam or not task.decoder.searches or task.decoder.sums_paths:
        return ""
    loss, labels = totals["loss"][0], lengths["labels"][0]
    hypothesis_length, reference_length = lengths["length"]
    is_confident = labels > 0 and loss <= _MOST_NATS * labels
    if not is_confident or not reference_length or hypothesis_length > _LEAST_LENGTH * reference_length:
        return ""
    return (
        f"loss and error rate contradict each other: the model gives a label of the references a "
        f"probability of {math.exp(-loss / labels):.2f}, but the hypotheses have "
        f"{hypothesis_length / reference_length:.0%} of the characters. The search stops too early; "
        f"try decoder={task.beam}"
    )
