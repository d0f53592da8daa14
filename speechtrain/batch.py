"""The micro-batch that the data layer passes to a task, and the prediction of its memory.

Shapes: B rows of the batch, S audio samples, U labels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

FAULTS = frozenset({"other_length", "unexplained_bytes", "opposed_channels", "silent_channel"})
"""The reasons of a ``Skip`` whose recording is used nevertheless."""


@dataclass(frozen=True)
class Skip:
    """A recording that the data layer cannot use, of a set or of ``augment.noise`` and ``augment.rooms``.

    A recording that is used although it has one of FAULTS is also listed.
    """

    id: str
    reason: str  # a key of ``data.loader.REASONS``
    detail: str = ""


@dataclass(frozen=True)
class Batch:
    """One micro-batch of utterances.

    A padding row replaces an unusable cut, so that the shape stays the same. Padding rows also fill the last
    batch of an evaluation set that has too few cuts. The ``weight`` of a padding row is 0, its audio is
    silence of the row's planned length, and it has no labels.
    """

    audio: Tensor  # (B, S) float32 in [-1, 1], zero beyond each row's length
    audio_lengths: Tensor  # (B,) int64, samples
    labels: Tensor  # (B, U) int64, zero beyond each row's length
    label_lengths: Tensor  # (B,) int64
    weight: Tensor  # (B,) float32, 1 for an utterance, 0 for a padding row
    # (B,) int64: the key of each row selects its dither in evaluation. It is ``counter_rng.dither_offset`` of
    # the row's samples, or 0 without samples.
    keys: Tensor
    ids: tuple[str, ...]  # the id of each row's utterance, "" for a padding row
    texts: tuple[str, ...]  # reference transcript of each row, normalised by the tokenizer
    unspoken: tuple[bool, ...] = ()  # whether nobody speaks in a row. () if that is not known
    epoch: int = 0  # counted from 0
    index: int = 0  # number of the micro-batch among all ranks' micro-batches of the epoch, from 0
    seconds: float = 0.0  # audio in the rows that are not padding
    # unusable cuts, which padding rows replace, cuts with FAULTS, and unusable noises and rooms
    skipped: tuple[Skip, ...] = field(default=())
    extra: dict[str, Tensor] = field(default_factory=dict)  # tensors that ``Task.prepare`` adds on the host
    # the encoder's frames and the labels of each row as numbers of the host, if ``Task.prepare`` knows them
    host_lengths: tuple[list[int], list[int]] | None = None

    @property
    def utterances(self) -> int:
        """Return the number of rows that are not padding. No tensor is read, so the device is not awaited."""
        return sum(1 for name in self.ids if name)

    @property
    def unusable(self) -> list[Skip]:
        """Return the skipped recordings without those that have only FAULTS."""
        return [skip for skip in self.skipped if skip.reason not in FAULTS]

    def to(self, move: Callable[[Tensor], Tensor]) -> Batch:
        """Return a copy of the batch in which ``move`` has been applied to every tensor."""
        tensors: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                tensors[name] = move(value)
        extra = {name: move(tensor) for name, tensor in self.extra.items()}
        return replace(self, **tensors, extra=extra)


@dataclass(frozen=True)
class Footprint:
    """Predicted memory of one training step in bytes, without weights and optimizer state.

    The prediction is ``rows × (seconds × per_second + seconds × labels × per_second_label)``, where
    ``seconds`` is the longest audio and ``labels`` the largest number of labels in the batch. The sampler
    uses the prediction to limit a batch to ``data.batch.memory_gib``, and the message of an out-of-memory
    error shows it.
    """

    per_second: float  # bytes of a row for each second of audio
    per_second_label: float = 0.0  # bytes of a row for each second of audio and each label (the lattice)

    def bytes(self, rows: int, seconds: float, labels: int) -> float:
        """Return the predicted bytes of ``rows`` rows that are padded to ``seconds`` and ``labels``."""
        return rows * seconds * (self.per_second + labels * self.per_second_label)
