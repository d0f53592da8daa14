"""Decoders: the search for the text of encoded speech, chosen when a model is used.

Legend: B rows, T frames, V classes with the blank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from speechtrain.losses.ctc import ctc_loss
from speechtrain.losses.transducer import transducer_loss
from speechtrain.nn.joint import Joint
from speechtrain.nn.prediction import Prediction
from speechtrain.text.vocabulary import Tokenizer


@dataclass(frozen=True)
class Word:
    """A word of a hypothesis."""

    text: str  # the letters of the word
    start: float  # in seconds
    end: float  # in seconds
    confidence: float  # the lowest confidence of its labels


@dataclass(frozen=True)
class Hypothesis:
    """A decoded utterance."""

    labels: tuple[int, ...]  # the ids of the labels
    text: str  # the decoded labels
    score: float  # log-probability of the path (greedy) or of all paths, with a beam's additions
    times: tuple[float, ...]  # seconds at which each label's frame begins
    ends: tuple[float, ...] = ()  # seconds at which each label's last frame ends
    confidences: tuple[float, ...] = ()  # the probability of each label in its frame, without the blank
    merit: float | None = None  # the number by which a beam orders texts, the highest first
    alternatives: tuple[Hypothesis, ...] = ()  # the other texts of an n-best list, the best first
    tokenizer: Tokenizer | None = field(default=None, repr=False, compare=False)

    @cached_property
    def words(self) -> tuple[Word, ...]:
        """The words of ``text``, each with its times and its confidence."""
        tokenizer, spans = self.tokenizer, list[tuple[int, int]]()
        if tokenizer is None or not self.ends:
            return ()
        for at in range(len(self.labels)):
            if not tokenizer.decode(self.labels[at : at + 1]).strip():
                continue  # it separates words
            # what stands between two labels shows when both are written
            is_new = not spans or len(tokenizer.decode(self.labels[spans[-1][1] : at + 1]).split()) > 1
            spans.append((at, at)) if is_new else spans.__setitem__(-1, (spans[-1][0], at))
        return tuple(
            Word(
                tokenizer.decode(self.labels[first : last + 1]).strip(),
                self.times[first],
                self.ends[last],
                min(self.confidences[first : last + 1]),
            )
            for first, last in spans
        )


@dataclass
class Scorer:
    """The interface of a model for a search."""

    tokenizer: Tokenizer
    frame_seconds: float  # from one frame to the next

    @property
    def blank(self) -> int:
        return self.tokenizer.blank

    def text(self, labels: Sequence[int]) -> str:
        return self.tokenizer.decode(labels)

    def hypothesis(
        self,
        labels: Sequence[int],
        begins: Sequence[int],
        ends: Sequence[int],
        confidences: Sequence[float],
        score: float,
    ) -> Hypothesis:
        """A hypothesis whose labels lie in the frames ``begins`` to before ``ends``."""
        seconds = self.frame_seconds
        return Hypothesis(
            labels=tuple(labels),
            text=self.text(labels),
            score=score,
            times=tuple(frame * seconds for frame in begins),
            ends=tuple(frame * seconds for frame in ends),
            confidences=tuple(confidences),
            tokenizer=self.tokenizer,
        )


class CTCScorer(Scorer):
    """A model whose frames are log-probabilities (B, T, V) already."""

    def log_likelihood(self, frames: Tensor, lengths: Tensor, labels: Tensor, symbols: Tensor) -> Tensor:
        """The log-probability (B,) of ``labels`` (B, U), of which ``symbols`` (B,) count: minus the loss."""
        return -ctc_loss(frames.float(), labels, lengths, symbols=symbols, blank=self.blank)


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

    def log_likelihood(self, frames: Tensor, lengths: Tensor, labels: Tensor, symbols: Tensor) -> Tensor:
        """The log-probability (B,) of ``labels`` (B, U), of which ``symbols`` (B,) count: minus the loss."""
        joint = self.joint
        return -transducer_loss(
            frames.float(),
            joint.prediction(self.prediction(labels)).float(),
            weight=joint.output.weight,
            bias=joint.output.bias,
            labels=labels,
            encoder_lengths=lengths,
            label_lengths=symbols,
            blank=self.blank,
            durations=joint.durations,
        )


class Decoder(ABC):
    """A search. It has no weights, so any run can be used with any decoder that fits its model."""

    searches = True
    """Whether it finds text; False for the null object."""

    sums_paths = False
    """Whether a text's score is that of all its paths, not of its best one."""

    @abstractmethod
    def decode(self, scorer: Scorer, frames: Tensor, lengths: Tensor) -> list[Hypothesis]:
        """Return the best hypothesis of each row of ``frames`` (B, T, ·) of ``lengths`` (B,).

        Raises ConfigError for a model that it cannot search. The message begins with ``decoder=NAME``, the
        name of its choice, and a space.
        """


class NoDecoder(Decoder):
    """For models that write no text, and where no other decoder is wanted: every text is empty."""

    searches = False

    def decode(self, scorer: Scorer, frames: Tensor, lengths: Tensor) -> list[Hypothesis]:
        return [Hypothesis(labels=(), text="", score=0.0, times=()) for _ in range(len(lengths))]
