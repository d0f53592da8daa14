"""Task: one network with its objective. It maps a batch to a loss sum and the weight of this sum."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from speechtrain.batch import Batch, Footprint
from speechtrain.errors import ConfigError
from speechtrain.metrics import word_errors

Sums = dict[str, tuple[Tensor, Tensor]]
"""Metrics as ``name: (sum, count)`` scalar tensors. The reporter divides them after all reductions."""


@dataclass(frozen=True)
class Loss:
    """A summed loss and its weight. Only the trainer divides it, by the global weight."""

    total: Tensor  # () fp32, summed over the utterances or the masked frames of a batch
    weight: Tensor  # () fp32, the number of these utterances or frames
    metrics: Sums = field(default_factory=dict)


@dataclass(frozen=True)
class Example:
    """One decoded utterance, for logs and the report."""

    id: str  # the id of the utterance
    reference: str  # the normalised transcript
    hypothesis: str  # the decoded text

    def row(self) -> dict[str, Any]:
        """The fields of a log and of a file. ``errors`` are in words."""
        texts = {"reference": self.reference, "hypothesis": self.hypothesis}
        return {"id": self.id, **texts, "errors": self.word_errors}

    @property
    def word_errors(self) -> int:
        return word_errors(self.reference, self.hypothesis)[0]


def worst_examples(examples: Iterable[Example], count: int) -> list[Example]:
    """Return the utterances with the most word errors. Those with equal errors keep their order."""
    return heapq.nlargest(count, examples, key=lambda example: example.word_errors)


def examples_of(batch: Batch, hypotheses: Sequence[Any]) -> tuple[Example, ...]:
    """Return the decoded utterances of a batch, without padding rows.

    ``hypotheses`` has a ``speechtrain.decoding.base.Hypothesis`` for each row.
    """
    rows = zip(batch.ids, batch.texts, hypotheses, strict=True)
    return tuple(Example(name, reference, hypothesis.text) for name, reference, hypothesis in rows if name)


@dataclass(frozen=True)
class Evaluation:
    """The result of ``Task.evaluate`` for one batch."""

    metrics: Sums
    examples: tuple[Example, ...] = ()


@dataclass(frozen=True)
class Alarm:
    """A training problem that a finite loss does not show."""

    onset: int  # the update at which the first sign was seen
    message: str  # one line: what happened and what to change


def units_of(module: nn.Module, is_even: bool = False) -> list[nn.Module]:
    """Return the units of ``module``, inner units before outer ones.

    FSDP gathers the parameters of one unit at a time. Activation checkpointing computes one unit at a time
    again. A module names its units in ``shard_units``. Each member of a named ``ModuleList`` is a unit.

    A unit must be used through its ``forward`` alone and equally often on every rank, also in evaluation. A
    decoder runs until its hypotheses end, so it cannot be a unit: it is gathered once per batch, with all
    other parameters outside of units. ``is_even`` leaves out the units of a module with ``uneven_calls``,
    which ranks call unequally often.
    """
    units: list[nn.Module] = []
    for owner in module.modules():
        if is_even and getattr(owner, "uneven_calls", False):
            continue
        for name in getattr(owner, "shard_units", ()):
            part = owner.get_submodule(name)
            if isinstance(part, nn.ModuleList):
                units += part
            else:
                units.append(part)
    return units[::-1]


class Task(nn.Module, ABC):
    """A network and its objective, trained by the shared trainer."""

    metric: str = "loss"
    """The name of the evaluation metric that selects the best checkpoint (``checkpoint/best_metric.py``)."""

    skips_parameters: bool = False
    """Whether some update leaves a trained parameter unused. DDP must then search for unused parameters."""

    planned_updates: float = 0
    """The updates of the whole run at its pace so far, or 0 if the run has no planned end."""

    sample_rate: int = 16_000
    """The sample rate in Hz of the audio that the task expects."""

    normalise_audio: bool = False
    """Whether each recording is normalised to zero mean and unit variance before cropping and padding."""

    writes_text: bool = False
    """Whether evaluation decodes. Only then does the task need a decoder."""

    beam: str = ""
    """The choice of the config group ``decoder`` that sums over all paths of a text, or "" without one."""

    decoder: Any = None
    """The decoder of every evaluation (``speechtrain.decoding.base.Decoder``). The builder sets it."""

    final_decoder: Any = None
    """The decoder of an extra evaluation at the end of training, which runs only if the decoder searches."""

    @abstractmethod
    def forward(self, batch: Batch) -> Loss:
        """Compute the loss sum of one micro-batch. All randomness is from the seeded global generators."""

    @abstractmethod
    def evaluate(self, batch: Batch) -> Evaluation:
        """Compute the metrics of one evaluation batch, as sums, without gradients in ``eval`` mode."""

    def transcribe(self, batch: Batch) -> list[Any]:
        """Return each row's text with its times (``speechtrain.decoding.base.Hypothesis``).

        Raises ConfigError for a task that does not recognise speech.
        """
        raise ConfigError(f"{type(self).__name__} does not transcribe speech")

    def advance(self, step: int, seed: int) -> None:
        """Prepare for the next update (temperatures, freezing). The trainer calls this before every update.

        ``step`` is the number of completed updates. ``seed`` addresses draws that all micro-batches of the
        update share, on all ranks.
        """

    def watch(self, step: int, means: Mapping[str, float]) -> Alarm | None:
        """Check the metrics of a log line, equal on all ranks. An alarm stops the run or warns."""
        return None

    def prepare(self, batch: Batch, seed: int) -> Batch:
        """Add this task's host-side draws and counts to the batch, before it moves to the device.

        ``seed`` is the micro-batch's address in training. In evaluation it follows from the samples.
        The results are in ``batch.extra``.
        """
        return batch

    def parameter_groups(self) -> Iterable[dict[str, Any]]:
        """The optimizer's parameter groups. A group may have ``lr_scale``."""
        return [{"params": [p for p in self.parameters() if p.requires_grad]}]

    def footprint(self) -> Footprint:
        """The predicted memory of a step, for batch limits by memory and out-of-memory messages."""
        return Footprint(per_second=0.0)
