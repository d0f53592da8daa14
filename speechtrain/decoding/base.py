"""The interface of decoders, which search the likeliest text of encoded speech.

A decoder has no weights, so validation, evaluation and transcription can use different ones for one model.

Legend: B rows, T frames, V classes with the blank last, H joint width, U labels. All log-probabilities are
natural logarithms.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from speechtrain.errors import ConfigError
from speechtrain.losses.ctc import ctc_loss
from speechtrain.losses.transducer import transducer_loss
from speechtrain.nn.joint import Joint
from speechtrain.nn.prediction import Prediction
from speechtrain.text.vocabulary import Tokenizer

SHORTEST_ENDPOINT = 0.1
"""The least ``endpoint_seconds`` of a decoder, because words have pauses too."""


@dataclass(frozen=True)
class Word:
    """A word of a hypothesis."""

    text: str  # the letters of the word
    start: float  # seconds from the beginning of the audio
    end: float  # seconds from the beginning of the audio
    confidence: float  # the lowest confidence of its labels


@dataclass(frozen=True)
class Hypothesis:
    """A decoded utterance."""

    labels: tuple[int, ...]  # the ids of the labels
    text: str  # the decoded labels
    # The log-probability of the path (greedy), or of all paths of the text plus the fusion score (beam).
    score: float
    times: tuple[float, ...]  # the beginning of each label's first frame, in seconds
    ends: tuple[float, ...] = ()  # the end of each label's last frame, in seconds
    confidences: tuple[float, ...] = ()  # the probability of each label among all labels, without the blank
    # The number by which a beam search ranks its texts, the highest first: the score, or the score per label.
    merit: float | None = None
    alternatives: tuple[Hypothesis, ...] = ()  # the other texts of an n-best list, by descending merit
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

    def part(self, begin: int, end: int) -> Hypothesis:
        """Return the hypothesis of the labels from ``begin`` to before ``end``."""
        labels = self.labels[begin:end]
        return replace(
            self,
            labels=labels,
            text=self.tokenizer.decode(labels) if self.tokenizer else "",
            times=self.times[begin:end],
            ends=self.ends[begin:end],
            confidences=self.confidences[begin:end],
            alternatives=(),
        )


def _word_spans(tokenizer: Tokenizer, labels: Sequence[int]) -> list[tuple[int, int]]:
    """Return for each word the positions of its first label and of the label after its last one."""
    spans = list[tuple[int, int]]()
    for position, label in enumerate(labels):
        if not tokenizer.decode([label]).strip():
            continue  # The label only separates words.
        begin = position
        if spans:
            last_begin, last_end = spans[-1]
            # A tokenizer leaves out the space at the beginning of a text. So the labels are decoded together.
            text = tokenizer.decode(labels[last_end - 1 : position + 1])
            has_space = len(text.split()) > 1
            if not has_space:
                begin = last_begin  # The label continues the last word.
                spans.pop()
        spans.append((begin, position + 1))
    return spans


@dataclass
class Scorer:
    """The part of a model that a search needs. The subclasses add the scores of labels."""

    tokenizer: Tokenizer
    frame_seconds: float  # seconds from the beginning of a frame to the beginning of the next

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
        """Return the hypothesis of ``labels``, with times in seconds.

        ``begins`` has the first frame of each label, and ``ends`` has the frame after its last frame.
        """
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

    def log_likelihood(self, frames: Tensor, lengths: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
        """Return the log-probability (B,) of a text for each row, over all paths.

        The text of a row is the first ``counts`` (B,) labels of ``labels`` (B, U).
        """
        return -ctc_loss(frames.float(), labels, lengths, label_counts=counts, blank=self.blank)


@dataclass
class TransducerScorer(Scorer):
    """A model whose joint network adds an encoded frame (B, H) to a projected prediction (B, H)."""

    prediction: Prediction  # the prediction network
    joint: Joint  # its attribute ``prediction`` is the linear projection of the prediction network's output

    def start(self, rows: int) -> tuple[Tensor, Any]:
        """Return the projected prediction (B, H) and the prediction network's state before any label."""
        output, state = self.prediction.start(rows)
        return self.joint.prediction(output), state

    def step(self, labels: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Return the projected prediction (B, H) and the state after one more label per row (B,)."""
        output, state = self.prediction.step(labels, state)
        return self.joint.prediction(output), state

    def log_likelihood(self, frames: Tensor, lengths: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
        """Return the log-probability (B,) of a text for each row, over all paths.

        The text of a row is the first ``counts`` (B,) labels of ``labels`` (B, U).
        """
        joint = self.joint
        predictions = self.prediction(labels)
        return -transducer_loss(
            frames.float(),
            joint.prediction(predictions).float(),
            weight=joint.output.weight,
            bias=joint.output.bias,
            labels=labels,
            encoder_lengths=lengths,
            label_lengths=counts,
            blank=self.blank,
            durations=joint.durations,
        )


class SearchStream(ABC):
    """The search of one recording whose frames arrive in pieces, utterance by utterance.

    All times are seconds from the beginning of the recording. The final hypothesis of an utterance does not
    depend on the pieces, except for the rounding of its score.
    """

    def __init__(self, scorer: Scorer, endpoint_seconds: float | None) -> None:
        self.scorer, self.endpoint_seconds = scorer, endpoint_seconds
        self.frame = 0  # the number of frames of the recording that the search has read

    @abstractmethod
    def step(self, frames: Tensor) -> None:
        """Read the next frames (1, T, ·) of the recording. T may be 0."""

    @property
    @abstractmethod
    def hypothesis(self) -> Hypothesis:
        """The best text of the present utterance so far."""

    @property
    @abstractmethod
    def final_labels(self) -> int:
        """The number of first labels of ``hypothesis`` that no further frame can change."""

    @property
    def is_ended(self) -> bool:
        """Whether the present utterance has a label and its last ``endpoint_seconds`` are blank.

        False if ``endpoint_seconds`` is None. A pause within one piece is not found.
        """
        ends = self.hypothesis.ends
        if self.endpoint_seconds is None or not ends:
            return False
        frame_seconds = self.scorer.frame_seconds
        blank_frames = self.frame - round(ends[-1] / frame_seconds)
        return blank_frames * frame_seconds >= self.endpoint_seconds

    def finish(self) -> Hypothesis:
        """End the present utterance, and return its final hypothesis. The next step begins another utterance.

        The caller decides when an utterance ends, at an endpoint or at any other time. A search keeps nothing
        of the utterances before.
        """
        hypothesis = self.hypothesis
        self._begin()
        return hypothesis

    @abstractmethod
    def _begin(self) -> None:
        """Begin an utterance at the frame ``self.frame``."""


class Decoder(ABC):
    """A search without weights. A run can be used with any decoder that fits its model."""

    searches = True
    """Whether the decoder returns texts. Only ``NoDecoder`` has False."""

    sums_paths = False
    """Whether the score of a text is the sum over its paths. Otherwise it is the score of the best path."""

    @abstractmethod
    def decode(self, scorer: Scorer, frames: Tensor, lengths: Tensor) -> list[Hypothesis]:
        """Return the best hypothesis of each row of ``frames`` (B, T, ·), whose lengths are ``lengths`` (B,).

        Raises ConfigError for a model that the decoder cannot search. The message begins with
        ``decoder=NAME``, the name of the decoder in ``conf/decoder``, and a space.
        """

    def stream(self, scorer: Scorer) -> SearchStream:
        """Return a search of one recording whose frames arrive in pieces.

        Raises ConfigError for a model that the decoder cannot search in this way.
        """
        name = type(self).__name__
        raise ConfigError(f"decoder: {name} cannot search a recording in pieces. Set decoder=greedy")

    def check(self, tokenizer: Tokenizer) -> None:  # noqa: B027 - empty by default
        """Raise ConfigError for settings that need symbols which ``tokenizer`` lacks."""


class NoDecoder(Decoder):
    """Returns empty texts. It is for models that write no text, and for evaluations without a search."""

    searches = False

    def decode(self, scorer: Scorer, frames: Tensor, lengths: Tensor) -> list[Hypothesis]:
        empty = Hypothesis(labels=(), text="", score=0.0, times=())
        return [empty] * len(lengths)
