"""What the data layer hands to a task: one micro-batch, and how large its tensors may grow.

Legend: B rows of the batch, S audio samples, U labels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Skip:
    """A recording that the data layer could not use, and why (``reason`` is a short fixed word)."""

    id: str
    reason: str
    detail: str = ""


@dataclass(frozen=True)
class Batch:
    """One micro-batch of utterances.

    A filler row keeps the shape where a cut was lost or an evaluation set ran out: its ``weight``
    is 0, its audio is silence of the row's planned length and its label row is empty.
    """

    audio: Tensor  # (B, S) float32 in [-1, 1], zero beyond each row's length
    audio_lengths: Tensor  # (B,) int64, samples
    labels: Tensor  # (B, U) int64, zero beyond each row's length
    label_lengths: Tensor  # (B,) int64
    weight: Tensor  # (B,) float32, 1 for an utterance, 0 for a filler row
    keys: Tensor  # (B,) int64, a stable hash of each utterance's id: addresses draws made per utterance
    ids: tuple[str, ...]  # "" for a filler row
    texts: tuple[str, ...]  # reference transcripts, normalised as the tokenizer sees them
    epoch: int = 0
    index: int = 0  # of the micro-batch within its epoch, in global order
    seconds: float = 0.0  # audio in the rows that are not filler
    skipped: tuple[Skip, ...] = field(default=())
    extra: dict[str, Tensor] = field(default_factory=dict)  # by the task's ``prepare``, on the host

    @property
    def utterances(self) -> int:
        """Rows that are not filler (a host count: no tensor is read)."""
        return sum(1 for name in self.ids if name)

    def to(self, move: Callable[[Tensor], Tensor]) -> Batch:
        """The same batch with ``move`` applied to every tensor."""
        moved: dict[str, Any] = {k: move(v) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved, extra={k: move(v) for k, v in self.extra.items()})


@dataclass(frozen=True)
class Footprint:
    """Predicted bytes of one training step beyond weights and optimizer state, linear per batch.

    ``batch × (seconds × per_second + seconds × labels × per_second_label)``, with the longest
    ``seconds`` and ``labels`` of the batch: packing by memory and the out-of-memory message use it.
    """

    per_second: float
    per_second_label: float = 0.0

    def bytes(self, rows: int, seconds: float, labels: int) -> float:
        """Predicted bytes of a batch of ``rows`` padded to ``seconds`` and ``labels``."""
        return rows * seconds * (self.per_second + labels * self.per_second_label)
