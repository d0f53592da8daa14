"""The interface of decoders. A decoder searches the text of encoded speech. Each use of a model chooses one.

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
        if self.tokenizer is None or not self.ends:
            return ()
        words = []
        for begin, end in _word_spans(self.tokenizer, self.labels):
            text = self.tokenizer.decode(self.labels[begin:end]).strip()
            confidence = min(self.confidences[begin:end])
            words.append(Word(text, self.times[begin], self.ends[end - 1], confidence))
        return tuple(words)


def _word_spans(tokenizer: Tokenizer, labels: Sequence[int]) -> list[tuple[int, int]]:
    """Return the positions of the first label of each word and of the label after its last one."""
    spans = list[tuple[int, int]]()
    for position, label in enumerate(labels):
        if not tokenizer.decode([label]).strip():
            continue  # The label separates words.
        begin = position
        if spans:
            # A space between two labels shows only if both are decoded together.
            word_begin, word_end = spans[-1]
            both = tokenizer.decode(labels[word_end - 1 : position + 1])
            if len(both.split()) < 2:
                begin = word_begin
                spans.pop()
        spans.append((begin, position + 1))
    return spans


@dataclass
class Scorer:
    """The interface that a search uses of a model."""

    tokenizer: Tokenizer
    frame_seconds: float  # from one frame to the next

    @property
    def blank(self) -> int:
        return self.tokenizer.blank

    def text(self, labels: Sequence[int]) -> str:
        """Return the text of label ids."""
        return self.tokenizer.decode(labels)

    def hypothesis(
        self,
        labels: Sequence[int],
        begins: Sequence[int],
        ends: Sequence[int],
        confidences: Sequence[float],
        score: float,
    ) -> Hypothesis:
        """Return the hypothesis whose labels last from the frames ``begins`` to before ``ends``."""
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
    """A model whose frames are log-probabilities (B, T, V)."""

    def log_likelihood(self, frames: Tensor, lengths: Tensor, labels: Tensor, symbols: Tensor) -> Tensor:
        """Return the log-probability (B,) of the first ``symbols`` (B,) of ``labels`` (B, U)."""
        return -ctc_loss(frames.float(), labels, lengths, symbols=symbols, blank=self.blank)


@dataclass
class TransducerScorer(Scorer):
    """A model that joins each frame (B, T, H) with the prediction (B, H). Both are in the joint's space."""

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
        """Return the log-probability (B,) of the first ``symbols`` (B,) of ``labels`` (B, U)."""
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
    """A search without weights. A run can be used with any decoder that fits its model."""

    searches = True
    """Whether the decoder returns texts. False for the null object."""

    sums_paths = False
    """Whether the score of a text is the sum over its paths. Otherwise it is the score of the best path."""

    @abstractmethod
    def decode(self, scorer: Scorer, frames: Tensor, lengths: Tensor) -> list[Hypothesis]:
        """Return the best hypothesis of each row of ``frames`` (B, T, ·) with ``lengths`` (B,).

        Raises ConfigError for a model that the decoder cannot search. The message begins with
        ``decoder=NAME``, the name of the decoder in ``conf/decoder``, and a space.
        """


class NoDecoder(Decoder):
    """Returns empty texts, for models that write no text and for evaluations without a search."""

    searches = False

    def decode(self, scorer: Scorer, frames: Tensor, lengths: Tensor) -> list[Hypothesis]:
        empty = Hypothesis(labels=(), text="", score=0.0, times=())
        return [empty] * len(lengths)
