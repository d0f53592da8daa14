"""The micro-batch that the data layer passes to a task, and the prediction of its memory.

Shapes: B rows of the batch, S audio samples, U labels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Skip:
    """A recording that the data layer cannot use. ``reason`` is a key of ``data.loader.REASONS``."""

    id: str
    reason: str
    detail: str = ""


@dataclass(frozen=True)
class Batch:
    """One micro-batch of utterances.

    A padding row keeps the shape if a cut is unusable or an evaluation set has ended. The ``weight`` of a
    padding row is 0, its audio is silence of the row's planned length, and its label row is empty.
    """

    audio: Tensor  # (B, S) float32 in [-1, 1], zero beyond each row's length
    audio_lengths: Tensor  # (B,) int64, samples
    labels: Tensor  # (B, U) int64, zero beyond each row's length
    label_lengths: Tensor  # (B,) int64
    weight: Tensor  # (B,) float32, 1 for an utterance, 0 for a padding row
    keys: Tensor  # (B,) int64, the ``dither_offset`` of each row's samples, or 0 without samples
    ids: tuple[str, ...]  # "" for a padding row
    texts: tuple[str, ...]  # reference transcripts, normalised by the tokenizer
    epoch: int = 0
    index: int = 0  # number of the micro-batch in its epoch, in global order
    seconds: float = 0.0  # audio in the rows that are not padding
    skipped: tuple[Skip, ...] = field(default=())
    extra: dict[str, Tensor] = field(default_factory=dict)  # set by the task's ``prepare``, on the host

    @property
    def utterances(self) -> int:
        """Number of rows that are not padding, counted on the host without reading a tensor."""
        return sum(1 for name in self.ids if name)

    def to(self, move: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with ``move`` applied to every tensor."""
        tensors: dict[str, Any] = {
            name: move(field_value)
            for name, field_value in vars(self).items()
            if isinstance(field_value, Tensor)
        }
        return replace(self, **tensors, extra={name: move(tensor) for name, tensor in self.extra.items()})


@dataclass(frozen=True)
class Footprint:
    """Predicted memory of one training step in bytes, without weights and optimizer state.

    The prediction is ``rows × (seconds × per_second + seconds × labels × per_second_label)`` with the
    longest ``seconds`` and ``labels`` of the batch. Packing by memory and the out-of-memory message use it.
    """

    per_second: float  # bytes of a row per second of audio
    per_second_label: float = 0.0  # bytes of a row per second of audio and label

    def bytes(self, rows: int, seconds: float, labels: int) -> float:
        """Predict the bytes of a batch of ``rows`` padded to ``seconds`` and ``labels``."""
        return rows * seconds * (self.per_second + labels * self.per_second_label)
