"""Evaluation: one code path for training, ``speechtrain evaluate`` and the report."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from speechtrain.batch import FAULTS, Batch, Skip
from speechtrain.compute_policy import ComputePolicy
from speechtrain.counter_rng import seed_at
from speechtrain.devices.base import Device
from speechtrain.distributed.group import Group
from speechtrain.errors import DataError
from speechtrain.metrics import MetricSums, delay_of_90_percent, error_rates
from speechtrain.run_directory import without_streams
from speechtrain.task import Evaluation, Example, Sums, Task, worst_examples


class Interrupted(Exception):
    """An evaluation was stopped on request, before its metrics were complete."""


Totals = Mapping[str, tuple[float, float]]
"""The sum and the count of each metric. The metric is their quotient."""


@dataclass(frozen=True)
class Outcome:
    """The evaluation of one set."""

    # The metrics of all ranks by name. Error rates are fractions. ``dropped`` is the number of recordings
    # that cannot be used, if there are any.
    metrics: dict[str, float]
    totals: Totals  # the totals of all ranks
    examples: tuple[Example, ...]  # the worst utterances of this rank, or all of them
    seconds: float  # the time of this rank's evaluation, with reading, loss and search
    audio_seconds: float  # the audio of all ranks
    # Warnings by kind: ``dropped``, each of FAULTS, ``contradiction``: a low loss, but texts too short, and
    # ``trained``: the run was trained on some of the recordings
    warnings: dict[str, str] = field(default_factory=dict)

    @property
    def real_time_factor(self) -> float:
        """The seconds of the evaluation for each second of audio, or infinity without audio."""
        if not self.audio_seconds:
            return math.inf
        return self.seconds / self.audio_seconds

    def with_normaliser(self, normalise: Callable[[str], str]) -> Outcome:
        """Return the outcome with other texts and their error rates, without the metrics of streams.

        ``normalise`` changes the hypotheses and the references, which the normaliser of the run has changed
        already. ``examples`` must have all utterances of the set, as in ``speechtrain evaluate``.
        """
        examples = []
        for example in self.examples:
            reference, hypothesis = normalise(example.reference), normalise(example.hypothesis)
            examples.append(Example(example.id, reference, hypothesis))
        sums = MetricSums()
        sums.add(error_rates((example.reference, example.hypothesis) for example in examples))
        return replace(
            self,
            metrics=without_streams(self.metrics) | sums.means(),
            totals=without_streams(self.totals) | sums.totals(),
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
    decoder: Any = None,
) -> dict[str, Outcome]:
    """Return the outcome of ``task`` on each set, by the name of the set.

    ``decoder`` writes the texts. None is the decoder of the task.

    ``examples`` is the number of utterances of this rank to return, which have the most word errors. None
    returns all utterances.

    Sums are reduced over the group before they are divided. So the metrics depend neither on the batch size
    nor on the number of ranks. Afterwards the task is in the mode, training or evaluation, that it was in.
    Raises DataError if no recording of a set can be used.

    ``stop_requested`` is called before every batch and must return the same on all ranks. Raises Interrupted
    if it returns True.
    """
    is_training = task.training
    task.eval()
    decoder = decoder or task.decoder
    outcomes = {}
    try:
        for name, batches in sets.items():
            evaluations = _evaluations(task, batches, device, policy, decoder, stop_requested)
            outcomes[name] = _collect(evaluations, task, group, decoder, examples)
    finally:
        task.train(is_training)
    return outcomes


def _evaluations(
    task: Task,
    batches: Iterable[Batch],
    device: Device,
    policy: ComputePolicy,
    decoder: Any,
    stop_requested: Callable[[], bool],
) -> Iterator[tuple[Batch, Evaluation]]:
    """Yield each batch, as prepared on the host, with its evaluation.

    Raises Interrupted if a stop is requested.
    """
    for batch in batches:
        if stop_requested():
            raise Interrupted
        batch = task.prepare(batch, seed_at(*batch.keys.tolist()))
        with torch.no_grad(), policy.autocast(device.name):
            evaluation = task.evaluate(device.move(batch), decoder)
        device.mark_step()
        yield batch, evaluation


def _collect(
    evaluations: Iterable[tuple[Batch, Evaluation]],
    task: Task,
    group: Group,
    decoder: Any,
    examples: int | None,
) -> Outcome:
    """Return the outcome of a set, whose metrics are reduced over the ranks of ``group``."""
    start = time.perf_counter()
    sums = MetricSums()  # of the metrics
    lengths = MetricSums()  # of audio and texts, which the metrics of the set do not contain
    delays: dict[str, torch.Tensor] = {}  # ``Evaluation.delays`` of all batches
    utterances: list[Example] = []
    skips: dict[str, Skip] = {}  # a skip of this rank for each reason
    for batch, evaluation in evaluations:
        sums.add(evaluation.metrics)
        for name, counts in evaluation.delays.items():
            delays[name] = delays.get(name, 0) + counts
        lengths.add({"audio": (torch.tensor(batch.seconds, dtype=torch.float64), torch.tensor(1.0))})
        lengths.add(_counts(batch))
        skips |= {_kind(skip): skip for skip in batch.skipped}
        utterances += evaluation.examples
        if task.writes_text:
            lengths.add(_lengths(batch, evaluation.examples))
        if examples is not None:
            utterances = worst_examples(utterances, examples)
    sums.reduce(group.sum)
    lengths.reduce(group.sum)
    totals = sums.totals()
    length_totals = lengths.totals()
    warnings = _warnings(length_totals, skips)
    contradiction = _contradiction(task, decoder, totals, length_totals)
    if contradiction:
        warnings["contradiction"] = contradiction
    metrics = sums.means()
    for name, counts in delays.items():
        metrics[name] = delay_of_90_percent(group.sum(counts))
    dropped, recordings = length_totals.get("dropped", (0.0, 0.0))
    if dropped:
        metrics["dropped"] = dropped
    if dropped == recordings > 0:
        raise DataError(f"no recording of the set can be used: {warnings['dropped']}")
    audio_seconds, _ = length_totals.get("audio", (0.0, 0.0))
    seconds = time.perf_counter() - start
    return Outcome(metrics, totals, tuple(utterances), seconds, audio_seconds, warnings)


def _kind(skip: Skip) -> str:
    """Return the fault of a recording that is used, or ``dropped``."""
    return skip.reason if skip.reason in FAULTS else "dropped"


def _counts(batch: Batch) -> Sums:
    """Return the number of dropped recordings of a batch, and of those with each of FAULTS.

    The count of each pair is the number of all recordings.
    """
    kinds = [_kind(skip) for skip in batch.skipped]
    recordings = torch.tensor(batch.utterances + kinds.count("dropped"), dtype=torch.float64)
    counts = {}
    for kind in ("dropped", *FAULTS):
        counts[kind] = (torch.tensor(kinds.count(kind), dtype=torch.float64), recordings)
    return counts


def _warnings(totals: Totals, skips: Mapping[str, Skip]) -> dict[str, str]:
    """Return a warning for each kind of ``_counts`` that occurs, with this rank's example from ``skips``."""
    warnings = {}
    for kind in ("dropped", *sorted(FAULTS)):
        count, recordings = totals.get(kind, (0.0, 0.0))
        if count:
            text = f"{count:.0f} of {recordings:.0f} recordings have the fault {kind}, and are used"
            if kind == "dropped":
                text = f"{count:.0f} of {recordings:.0f} recordings are unusable, and are in no figure"
            if kind in skips:
                text += f", such as {skips[kind].id!r} ({skips[kind].reason}: {skips[kind].detail})"
            warnings[kind] = text
    return warnings


# Loss and hypotheses contradict each other if the loss is at most 0.35 nats per label of the references, and
# the hypotheses have at most 0.8 of the characters of the references. At 0.35 nats, the geometric mean of the
# labels' probabilities is exp(-0.35) = 0.7. So the next label is more probable than all its alternatives
# together. One alternative is that the text ends before this label, so a short text is improbable. With a
# higher loss, short hypotheses can be right for the model.
_MOST_NATS, _LEAST_LENGTH = 0.35, 0.8


def _lengths(batch: Batch, examples: Iterable[Example]) -> Sums:
    """Return the lengths of the texts of a batch as two sums, whose values are () float64.

    - ``length`` has the characters of the hypotheses and of the references, without white space.
    - ``labels`` has the number of labels of the references and the number of rows.

    A metric's pair is a sum and a count. The pair of ``length`` is two lengths instead, because only the sums
    over batches and ranks are needed. Only rows with a loss count, which have a weight above 0.
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


def _contradiction(task: Task, decoder: Any, totals: Totals, lengths: Totals) -> str:
    """Return a warning if the hypotheses are shorter than the loss suggests, else an empty string.

    The remedy is a search that sums over the paths of a text. So the string is also empty if the task does
    not have such a search (``task.beam``), or already uses one.
    """
    has_totals = "length" in lengths and "loss" in totals
    could_use_beam = bool(task.beam) and decoder.searches and not decoder.sums_paths
    if not has_totals or not could_use_beam:
        return ""
    (loss, _), (labels, _) = totals["loss"], lengths["labels"]
    hypothesis_length, reference_length = lengths["length"]
    is_confident = labels > 0 and loss <= _MOST_NATS * labels
    is_too_short = reference_length > 0 and hypothesis_length <= _LEAST_LENGTH * reference_length
    if not is_confident or not is_too_short:
        return ""
    return (
        f"loss and error rate contradict each other: the model gives a label of the references a "
        f"probability of {math.exp(-loss / labels):.2f}, but the hypotheses have "
        f"{hypothesis_length / reference_length:.0%} of the characters. The search stops too early; "
        f"try decoder={task.beam}"
    )
