"""Task: one network with its objective. It maps a batch to a loss sum and the weight of this sum."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from speechtrain.batch import Batch, Footprint
from speechtrain.errors import ConfigError, require_contract
from speechtrain.metrics import word_errors

KNOWN_METRICS = ("loss", "wer", "cer", "ser")
"""Metrics of which a lower value is better."""

Sums = dict[str, tuple[Tensor, Tensor]]
"""Metrics as ``name: (sum, count)`` with scalar tensors. ``MetricSums`` divides them after all reductions."""


def require_sums(part: object, method: str, metrics: Any) -> None:
    """Raise ConfigError unless ``metrics``, which ``method`` of ``part`` returned, are Sums."""
    problem = f"{method} returns metrics that are not a mapping of names to (sum, count)"
    require_contract(isinstance(metrics, Mapping), part, problem)
    for name, pair in metrics.items():
        scalars = pair if isinstance(pair, tuple) else ()
        sizes = [scalar.numel() for scalar in scalars if isinstance(scalar, Tensor)]
        problem = f"{method} returns {name!r} that is not a pair (sum, count) of scalar tensors"
        require_contract(sizes == [1, 1], part, problem)


@dataclass(frozen=True)
class Loss:
    """A summed loss and its weight. Only the trainer divides it, by the global weight."""

    total: Tensor  # () fp32, summed over the utterances or the masked frames of a batch
    weight: Tensor  # () fp32, the number of these utterances or frames
    metrics: Sums = field(default_factory=dict)
    rows: Tensor | None = None  # (B,) the loss of each row without its gradient, for messages


def detached(metrics: Sums) -> Sums:
    """Return the metrics without gradients."""
    detached_metrics: Sums = {}
    for name, (total, count) in metrics.items():
        detached_metrics[name] = (total.detach(), count.detach())
    return detached_metrics


@dataclass(frozen=True)
class Example:
    """One decoded utterance, for logs and the report."""

    id: str  # the id of the utterance
    reference: str  # the normalised transcript
    hypothesis: str  # the decoded text

    def row(self) -> dict[str, Any]:
        """Return the fields of a log line or a row of a file. ``errors`` is the number of word errors."""
        texts = {"reference": self.reference, "hypothesis": self.hypothesis}
        return {"id": self.id, **texts, "errors": self.word_errors}

    @property
    def word_errors(self) -> int:
        return word_errors(self.reference, self.hypothesis)[0]


def worst_examples(examples: Iterable[Example], count: int) -> list[Example]:
    """Return the ``count`` utterances with the most word errors, the worst first.

    Utterances with equal errors stay in the order of ``examples``.
    """
    return heapq.nlargest(count, examples, key=lambda example: example.word_errors)


def examples_of(batch: Batch, hypotheses: Sequence[Any]) -> tuple[Example, ...]:
    """Return the decoded utterances of a batch, without padding rows.

    ``hypotheses`` has a ``speechtrain.decoding.base.Hypothesis`` for each row. A row in which nobody speaks
    has no text.
    """
    examples = []
    unspoken = batch.unspoken or [False] * len(batch.ids)
    for utterance_id, reference, hypothesis, is_unspoken in zip(
        batch.ids, batch.texts, hypotheses, unspoken, strict=True
    ):
        if utterance_id:  # A padding row has no id.
            text = "" if is_unspoken else hypothesis.text
            examples.append(Example(utterance_id, reference, text))
    return tuple(examples)


@dataclass(frozen=True)
class Evaluation:
    """The result of ``Task.evaluate`` for one batch."""

    metrics: Sums
    examples: tuple[Example, ...] = ()
    delays: dict[str, Tensor] = field(default_factory=dict)
    """``metrics.delay_counts`` (N,) by the name of the metric that is their 90th percentile."""


@dataclass(frozen=True)
class Alarm:
    """A training problem that a finite loss does not show."""

    onset: int  # the update at which the first sign was seen
    message: str  # one line: what happened and what to change


def units_of(module: nn.Module, is_even: bool = False) -> list[nn.Module]:
    """Return the units of ``module``, inner units before outer units.

    A unit is a submodule that is processed as a whole. FSDP gathers the parameters of one unit at a time, and
    activation checkpointing recomputes one unit at a time. A module lists its units in ``shard_units``. If a
    listed submodule is a ``ModuleList``, each of its members is a unit.

    A unit must be called only through its ``forward``, and equally often on every rank, also in evaluation. A
    decoder runs until its hypotheses end, so it cannot be a unit. Its parameters, and all others outside of
    units, are gathered once per batch. With ``is_even``, the units of a module with ``uneven_calls``, which
    ranks call unequally often, are omitted.
    """
    units: list[nn.Module] = []
    for submodule in module.modules():
        if is_even and getattr(submodule, "uneven_calls", False):
            continue
        for name in getattr(submodule, "shard_units", ()):
            unit = submodule.get_submodule(name)
            if isinstance(unit, nn.ModuleList):
                units += unit
            else:
                units.append(unit)
    return units[::-1]  # ``modules()`` yields outer modules first.


class Task(nn.Module, ABC):
    """A network and its objective, trained by the shared trainer."""

    metric: str = "loss"
    """The name of the evaluation metric that selects the best checkpoint (``checkpoint/best_metric.py``)."""

    metric_mode: str = ""
    """``min`` if a lower ``metric`` is better, or ``max``. Only KNOWN_METRICS need none."""

    skips_parameters: bool = False
    """Whether an update may not use some trained parameter. DDP must then search for unused parameters."""

    planned_updates: float = 0
    """The expected number of updates of the whole run, or 0 if the run has no planned end."""

    sample_rate: int = 16_000
    """The sample rate in Hz of the audio that the task expects."""

    normalise_audio: bool = False
    """Whether each recording is normalised to zero mean and unit variance before cropping and padding."""

    writes_text: bool = False
    """Whether evaluation decodes. Only then does the task need a decoder."""

    beam: str = ""
    """The choice of the config group ``decoder`` that is the beam search of this task, or "" without one."""

    decoder: Any = None
    """The decoder of every evaluation (``speechtrain.decoding.base.Decoder``). ``start.build`` sets it."""

    final_decoder: Any = None
    """The decoder of one more evaluation at the end of training. ``NoDecoder`` means no such evaluation."""

    @abstractmethod
    def forward(self, batch: Batch) -> Loss:
        """Return the loss sum of one micro-batch. Random numbers come from torch's seeded generators only."""

    @abstractmethod
    def evaluate(self, batch: Batch, decoder: Any) -> Evaluation:
        """Return the metrics of one evaluation batch as sums. Gradients and training mode are off.

        ``decoder`` writes the texts. A task without text ignores it.
        """

    def check(self, batch: Batch) -> None:
        """Raise ConfigError if a part of this task breaks its contract for a batch.

        This is called once before training, in the mode of evaluation, with the prepared batch.
        """

    def transcribe(self, batch: Batch, decoder: Any) -> list[Any]:
        """Return each row's text with its times (``speechtrain.decoding.base.Hypothesis``), by ``decoder``.

        Raises ConfigError for a task that does not recognise speech.
        """
        raise ConfigError(f"{type(self).__name__} does not transcribe speech")

    def stream(self, context: Sequence[int] | None, decoder: Any) -> Any:
        """Return the recognition of one recording whose samples arrive in pieces (``TextStream``).

        Raises ConfigError for a task, an encoder or a decoder that needs whole recordings.
        """
        raise ConfigError(f"{type(self).__name__} does not transcribe speech")

    def advance(self, step: int, seed: int) -> None:
        """Prepare for the next update, such as a temperature or frozen parameters.

        The trainer calls this before every update. ``step`` is the number of completed updates. ``seed`` is
        for random numbers that are equal in all micro-batches of the update, on all ranks.
        """

    def watch(self, step: int, means: Mapping[str, float]) -> Alarm | None:
        """Return an alarm if the metrics of a log line show a problem, else None.

        ``means`` is equal on all ranks. An alarm stops the run or is printed as a warning
        (``trainer.on_collapse``).
        """
        return None

    def prepare(self, batch: Batch, seed: int) -> Batch:
        """Return the batch with tensors in ``batch.extra`` that this task computes on the host.

        The tensors are random numbers and counts. This is called before the batch moves to the device. In
        training, ``seed`` depends on the update and the micro-batch, in evaluation on the samples.
        """
        return batch

    def parameter_groups(self) -> Iterable[dict[str, Any]]:
        """Return the optimizer's parameter groups. A group may have ``lr_scale``, a factor of the rate."""
        return [{"params": [p for p in self.parameters() if p.requires_grad]}]

    def frozen(self) -> str:
        """Return which weights do not change, and for how long, for the log. "" if all change."""
        weights = sum(p.numel() for p in self.parameters() if not p.requires_grad)
        return f"{weights:,} weights in all updates" if weights else ""

    def footprint(self) -> Footprint:
        """Return the predicted memory of a step, for batch limits by memory and out-of-memory messages."""
        return Footprint(per_second=0.0)
