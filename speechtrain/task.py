"""Task: one network with its objective. It turns a batch into a loss sum and the number it covers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from speechtrain.batch import Batch, Footprint

Sums = dict[str, tuple[Tensor, Tensor]]
"""Metrics as ``name: (sum, count)`` scalar tensors; whoever reports divides, after all reductions."""


@dataclass(frozen=True)
class Loss:
    """A summed loss and its weight. Only the trainer divides, by the global weight."""

    total: Tensor  # () fp32, sum over what ``weight`` counts
    weight: Tensor  # () fp32, for example the utterances or masked frames that ``total`` covers
    metrics: Sums = field(default_factory=dict)


@dataclass(frozen=True)
class Example:
    """One decoded utterance, for logs and the report."""

    id: str
    reference: str
    hypothesis: str


def examples_of(batch: Batch, hypotheses: Sequence[str]) -> tuple[Example, ...]:
    """The decoded utterances of a batch, filler rows left out."""
    rows = zip(batch.ids, batch.texts, hypotheses, strict=True)
    return tuple(Example(name, reference, text) for name, reference, text in rows if name)


@dataclass(frozen=True)
class Evaluation:
    """What ``Task.evaluate`` says of one batch."""

    metrics: Sums
    examples: tuple[Example, ...] = ()


@dataclass(frozen=True)
class Alarm:
    """Training that goes wrong although its loss is finite."""

    onset: int  # the update at which the first sign was seen
    message: str  # one line: what has happened, and what to change


class Task(nn.Module, ABC):
    """A network and its objective, trained by the shared trainer."""

    metric: str = "loss"
    """The name among the evaluation metrics that selects the best checkpoint; lower is better."""

    skips_parameters: bool = False
    """Whether some update's loss leaves out a trained parameter: several ranks must then look for it."""

    normalise_audio: bool = False
    """Whether each recording comes with zero mean and unit variance, before cropping and padding."""

    @abstractmethod
    def forward(self, batch: Batch) -> Loss:
        """Loss sum of one micro-batch; randomness comes from the seeded global generators only."""

    @abstractmethod
    def evaluate(self, batch: Batch) -> Evaluation:
        """Metrics of one evaluation batch, as sums. Called without gradients, in ``eval`` mode."""

    def transcribe(self, batch: Batch) -> list[str]:
        """Text of each row, for tasks that recognise speech."""
        raise TypeError(f"{type(self).__name__} does not transcribe speech")

    def advance(self, step: int, seed: int) -> None:
        """Told once before each update: ``step`` updates have been done (temperatures, freezing).

        ``seed`` addresses draws that all micro-batches of the update share, on all ranks.
        """

    def watch(self, step: int, means: Mapping[str, float]) -> Alarm | None:
        """Told the training metrics of every log line, on all ranks alike; an alarm ends or warns the run."""
        return None

    def prepare(self, batch: Batch, seed: int) -> Batch:
        """The batch with what this task draws or counts on the host, before it moves to the device.

        ``seed`` is the micro-batch's address in training, and follows from its utterances in
        evaluation. Results go into ``batch.extra``.
        """
        return batch

    def parameter_groups(self) -> Iterable[dict[str, Any]]:
        """Optimizer parameter groups; a group may carry ``lr_scale``."""
        return [{"params": [p for p in self.parameters() if p.requires_grad]}]

    def footprint(self) -> Footprint:
        """Predicted memory of a step, for packing by memory and for out-of-memory messages."""
        return Footprint(per_second=0.0)
