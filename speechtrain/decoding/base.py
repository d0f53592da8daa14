"""Decoders: the search for the text of encoded speech, chosen when a model is used.

Legend: B rows, T frames, V classes with the blank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from speechtrain.nn.joint import Joint
from speechtrain.nn.prediction import Prediction
from speechtrain.text.vocabulary import Tokenizer


@dataclass(frozen=True)
class Hypothesis:
    """A decoded utterance."""

    labels: tuple[int, ...]
    text: str
    score: float  # log-probability of the path that the search followed
    times: tuple[float, ...]  # seconds at which each label's frame begins


@dataclass
class Scorer:
    """What a search asks of a model."""

    tokenizer: Tokenizer
    frame_seconds: float  # from one frame to the next

    @property
    def blank(self) -> int:
        return self.tokenizer.blank

    def text(self, labels: Sequence[int]) -> str:
        return self.tokenizer.decode(labels)


class CTCScorer(Scorer):
    """A model whose frames are log-probabilities (B, T, V) already."""


@dataclass
class TransducerScorer(Scorer):
    """A model whose frames (B, T, H), in the joint's space, are joined with a state of the labels so far."""

    prediction: Prediction
    joint: Joint

    def start(self, rows: int) -> tuple[Tensor, Any]:
        """Return the prediction (B, H) in the joint's space and the state before the first label."""
        output, state = self.prediction.start(rows)
        return self.joint.prediction(output), state

    def step(self, labels: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Return the prediction (B, H) and the state after one more label per row (B,)."""
        output, state = self.prediction.step(labels, state)
        return self.joint.prediction(output), state


class Decoder(ABC):
    """A search; it has no weights, so any run can be used with any decoder that fits its model."""

    searches = True
    """Whether it finds text; False for the null object."""

    @abstractmethod
    def decode(self, scorer: Scorer, frames: Tensor, lengths: Tensor) -> list[Hypothesis]:
        """Return the best hypothesis of each row of ``frames`` (B, T, ·) of ``lengths`` (B,)."""


class NoDecoder(Decoder):
    """For models that write no text, and where no other decoder is wanted: every text is empty."""

    searches = False

    def decode(self, scorer: Scorer, frames: Tensor, lengths: Tensor) -> list[Hypothesis]:
        return [Hypothesis(labels=(), text="", score=0.0, times=()) for _ in range(len(lengths))]
