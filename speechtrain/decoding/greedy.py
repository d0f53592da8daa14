"""Greedy decoding of a whole batch at once, or of one recording in pieces.

Legend: B rows, T frames, N frames of a window, V classes with the blank last, H joint width. A symbol is a
label or the blank.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import Tensor

from speechtrain.decoding.base import (
    SHORTEST_ENDPOINT,
    CTCScorer,
    Decoder,
    Hypothesis,
    Scorer,
    SearchStream,
    TransducerScorer,
)
from speechtrain.errors import ConfigError, require_least

_LABELS_PER_SECOND = 50  # Some models never stop to emit labels. Their rows end here.
_LARGEST_FRAME_LIMIT = 1000  # labels of one frame, because a row has no other limit until its next frame
_WINDOW = 3  # frames that one step searches
# The host reads whether any row of a batch is left only after this number of steps. A read stops the device.
_STEPS_PER_READ = 4


class Greedy(Decoder):
    """Chooses the most likely symbol at each point. The hypothesis of a row does not depend on its batch.

    For a transducer, each step searches a window of frames for the next label of each row. Rows advance
    independently of each other. A blank leads to the next frame. A label stays in the frame and updates the
    prediction network.

    - A frame ends after ``max_symbols_per_step`` labels.
    - A row ends at the start of a frame if it has more than ``max_symbols`` labels. So it may exceed this
      number by the labels of one frame. MLPerf's reference decoder has the same rule and 300 labels. None
      allows 50 labels per second of audio, which is twice the characters of the fastest speech. In a stream,
      None allows any number, because the length of the utterance is not known.
    - With durations (TDT), a row advances by the likeliest duration after each symbol, and by at least one
      frame after a blank. The limits are checked only in the frames that the row visits.

    For CTC, the text is the best class of each frame, with repetitions merged and blanks removed.

    An utterance of a stream ends after ``endpoint_seconds`` of blanks. None: never.
    """

    def __init__(
        self,
        max_symbols_per_step: int = 30,
        max_symbols: int | None = None,
        endpoint_seconds: float | None = 0.8,
    ) -> None:
        require_least(1, max_symbols_per_step=max_symbols_per_step, max_symbols=max_symbols)
        require_least(SHORTEST_ENDPOINT, endpoint_seconds=endpoint_seconds)
        if max_symbols_per_step > _LARGEST_FRAME_LIMIT:
            raise ValueError(
                f"max_symbols_per_step is {max_symbols_per_step}, but it must be at most"
                f" {_LARGEST_FRAME_LIMIT}"
            )
        self.max_symbols_per_step = max_symbols_per_step
        self.max_symbols = max_symbols
        self.endpoint_seconds = endpoint_seconds

    @torch.no_grad()
    def decode(self, scorer: Scorer, frames: Tensor, lengths: Tensor) -> list[Hypothesis]:
        if isinstance(scorer, TransducerScorer):
            search = _TransducerSearch(self, scorer, self.row_limits(lengths, scorer.frame_seconds))
            search.read(frames, lengths)
            return search.hypotheses()
        if isinstance(scorer, CTCScorer):
            return _best_paths(scorer, frames, lengths)
        raise _refusal(scorer)

    def stream(self, scorer: Scorer) -> SearchStream:
        if isinstance(scorer, TransducerScorer):
            return _TransducerStream(self, scorer)
        if isinstance(scorer, CTCScorer):
            return _CTCStream(scorer, self.endpoint_seconds)
        raise _refusal(scorer)

    def row_limits(self, lengths: Tensor, frame_seconds: float) -> Tensor:
        """Return the number of labels (B,) with which a row may still begin another frame."""
        if self.max_symbols is None:
            return (lengths * (_LABELS_PER_SECOND * frame_seconds)).ceil().long()
        return torch.full_like(lengths, self.max_symbols)


def _refusal(scorer: Scorer) -> ConfigError:
    name = type(scorer).__name__
    return ConfigError(f"decoder=greedy cannot search {name}. Choose another decoder")


class _TransducerSearch:
    """A search with the present frame, labels and prediction state of each row.

    The search carries on over any number of pieces of frames. ``row_limits`` (B,) is the number of labels
    with which a row may still begin another frame. ``first_frame`` is the number of the first frame. The host
    reads whether any row is left after each ``steps_per_read`` steps.
    """

    def __init__(
        self,
        settings: Greedy,
        scorer: TransducerScorer,
        row_limits: Tensor,
        first_frame: int = 0,
        steps_per_read: int = _STEPS_PER_READ,
    ) -> None:
        rows = len(row_limits)
        self.scorer = scorer
        self.prediction, self.state = scorer.start(rows)
        device = self.prediction.device
        self.frame_limit, self.row_limits = settings.max_symbols_per_step, row_limits.to(device)
        self.row = torch.arange(rows, device=device)  # (B,) the indices of the rows
        self.durations = self.row.new_tensor(scorer.joint.durations)  # in frames, empty without TDT
        # With durations, the next frame is known only after the duration of the blank is computed.
        self.window = 1 if len(self.durations) else _WINDOW
        self.offsets = torch.arange(self.window, device=device)
        self.steps_per_read = steps_per_read
        self.first_frame = first_frame  # the number of the piece's first frame
        # For each row (B,): its present frame in the piece, its labels in that frame, and all its labels.
        zeros = self.row.new_zeros(3, rows)
        self.frame, self.labels_in_frame, self.label_counts = zeros.unbind()
        self.scores = torch.zeros(rows, device=device)  # (B,) log-probabilities of the paths
        # For each row: its labels, their frames and their confidences.
        self.labels = [list[int]() for _ in range(rows)]
        self.begins = [list[int]() for _ in range(rows)]
        self.confidences = [list[float]() for _ in range(rows)]

    def read(self, frames: Tensor, lengths: Tensor) -> None:
        """Search a piece of frames (B, T, H), whose lengths are ``lengths`` (B,).

        The pieces before the last one have T frames in each row.
        """
        self.frames, self.lengths = frames, lengths
        self.is_active = (self.frame < lengths) & (self.label_counts <= self.row_limits)
        steps = []
        while bool(self.is_active.any()):
            for _ in range(self.steps_per_read):
                steps.append(self._step())
        if steps:
            self._add_labels(steps)
        self.first_frame += frames.shape[1]
        if len(self.durations):  # A duration may lead into the next piece.
            self.frame = self.frame - frames.shape[1]
        else:  # The frames of a window that are beyond the piece were not searched.
            self.frame = torch.zeros_like(self.frame)

    def hypotheses(self) -> list[Hypothesis]:
        """Return the hypothesis of each row."""
        hypotheses = []
        for row, score in enumerate(self.scores.tolist()):
            begins = self.begins[row]
            ends = [begin + 1 for begin in begins]
            spans = (begins, ends, self.confidences[row])
            hypotheses.append(self.scorer.hypothesis(self.labels[row], *spans, score))
        return hypotheses

    def _add_labels(self, steps: list[tuple[Tensor, Tensor, Tensor]]) -> None:
        """Add the labels of steps to their rows. A step has symbols, frames and confidences, each (B,)."""
        # Each array is (B, steps).
        columns = zip(*steps, strict=True)
        symbols, begins, confidences = (torch.stack(column, 1).cpu().numpy() for column in columns)
        for row, row_symbols in enumerate(symbols):
            is_label = row_symbols != self.scorer.blank
            row_begins = self.first_frame + begins[row, is_label]
            self.labels[row] += row_symbols[is_label].tolist()
            self.begins[row] += row_begins.tolist()
            self.confidences[row] += confidences[row, is_label].tolist()

    def _step(self) -> tuple[Tensor, Tensor, Tensor]:
        """Emit the first label in each row's window, or pass the window if all its symbols are blanks.

        Return the last symbol of each row, its frame and its confidence, each (B,).
        """
        frames = self.frame[:, None] + self.offsets  # (B, N)
        last_frame = self.frames.shape[1] - 1
        encoded = self.frames[self.row[:, None], frames.clamp(max=last_frame)].flatten(0, 1)
        predictions = self.prediction.repeat_interleave(self.window, 0)
        logits = self.scorer.joint(encoded, predictions).float().view(*frames.shape, -1)
        classes = logits.shape[2] - len(self.durations)
        symbol_logits, duration_logits = logits.tensor_split([classes], 2)  # (B, N, V) and (B, N, ·)

        symbols = symbol_logits.max(-1).indices  # (B, N), as scores and confidences
        log_probabilities = symbol_logits.log_softmax(-1)  # takes a third of logsumexp's time on a CPU
        scores = log_probabilities.gather(2, symbols[..., None])[..., 0]
        label_probability = -log_probabilities[..., -1].expm1()  # 1 minus the probability of the blank
        confidences = (scores.exp() / label_probability).clamp(max=1.0)

        # The row is already in the first frame. The other frames begin only if the row is within its limit.
        may_begin = (self.offsets == 0) | (self.label_counts <= self.row_limits)[:, None]
        may_visit = self.is_active[:, None] & (frames < self.lengths[:, None]) & may_begin
        is_label = may_visit & (symbols != self.scorer.blank)
        emits = is_label.any(1)  # (B,) whether the row emits a label
        first_label = is_label.int().argmax(1)
        blanks = torch.where(emits, first_label, self.window)  # (B,) the blanks before the label
        is_visited = may_visit & (self.offsets <= blanks[:, None])
        self.scores += scores.masked_fill(~is_visited, 0.0).sum(1)
        last_visit = (self.row, blanks.clamp(max=self.window - 1))  # the index of (B, N) tensors
        symbol = torch.where(emits, symbols[last_visit], self.scorer.blank)
        step = (symbol, self.frame + blanks, confidences[last_visit])

        if self.steps_per_read > 1 or bool(emits.any()):
            self._advance_prediction(emits, symbol)
        self._move(emits, blanks, duration_logits[:, 0])
        return step

    def _advance_prediction(self, emits: Tensor, symbol: Tensor) -> None:
        """Advance the prediction network by ``symbol`` (B,) in the rows that emit a label, ``emits`` (B,)."""
        prediction, state = self.scorer.step(symbol.masked_fill(~emits, 0), self.state)
        self.prediction = torch.where(emits[:, None], prediction, self.prediction)
        self.state = self.scorer.prediction.select(emits, state, self.state)

    def _move(self, emits: Tensor, blanks: Tensor, duration_logits: Tensor) -> None:
        """Advance each row by ``blanks`` (B,) frames, and by another one if it reaches the frame's limit.

        With durations, a row advances by the likeliest duration if that is longer. ``emits`` (B,) is whether
        the row emits a label, and ``duration_logits`` is (B, ·).
        """
        # A label after a blank is the first label of its frame.
        self.labels_in_frame = torch.where(emits, self.labels_in_frame * (blanks == 0) + 1, 0)
        is_frame_full = self.labels_in_frame >= self.frame_limit
        advance = blanks + is_frame_full
        if len(self.durations):
            score, likeliest = duration_logits.log_softmax(-1).max(-1)
            self.scores += score.masked_fill(~self.is_active, 0.0)
            advance = torch.maximum(advance, self.durations[likeliest])
        leaves_frame = advance > blanks
        self.labels_in_frame = self.labels_in_frame.masked_fill(leaves_frame, 0)
        self.frame = torch.where(self.is_active, self.frame + advance, self.frame)
        self.label_counts += emits
        # The limit of a row is checked at the start of a frame, so a row within a frame continues.
        may_continue = (self.labels_in_frame > 0) | (self.label_counts <= self.row_limits)
        self.is_active = self.is_active & (self.frame < self.lengths) & may_continue


class _TransducerStream(SearchStream):
    """The search of the present utterance of a recording, as a batch of one row."""

    def __init__(self, settings: Greedy, scorer: TransducerScorer) -> None:
        super().__init__(scorer, settings.endpoint_seconds)
        self.settings, self.transducer = settings, scorer
        self._begin()

    @torch.no_grad()
    def _begin(self) -> None:
        row_limits = torch.tensor([self.settings.max_symbols or sys.maxsize])
        # A stream is one row, most of whose steps are blanks. A read saves the prediction network's step.
        self.search = _TransducerSearch(
            self.settings, self.transducer, row_limits, self.frame, steps_per_read=1
        )

    @torch.no_grad()
    def step(self, frames: Tensor) -> None:
        count = frames.shape[1]
        self.search.read(frames, torch.tensor([count], device=frames.device))
        self.frame += count

    @property
    def hypothesis(self) -> Hypothesis:
        (hypothesis,) = self.search.hypotheses()
        return hypothesis

    @property
    def final_labels(self) -> int:
        return len(self.search.labels[0])


def _best_paths(scorer: CTCScorer, frames: Tensor, lengths: Tensor) -> list[Hypothesis]:
    """Return the CTC hypothesis of each row."""
    scores, classes, frame_confidences = _best_classes(frames)
    hypotheses = []
    for row, length in enumerate(lengths.tolist()):
        path = classes[row, :length].cpu().numpy()
        confidences = frame_confidences[row, :length].cpu().numpy()
        score = float(scores[row, :length].sum())
        hypotheses.append(_merged(scorer, path, confidences, score))
    return hypotheses


def _best_classes(frames: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the score, the number and the confidence of the best class of each frame, each (B, T)."""
    scores, classes = frames.max(-1)
    label_scores = frames[..., :-1].logsumexp(-1)
    return scores, classes, (scores - label_scores).exp().clamp(max=1.0)


def _merged(
    scorer: Scorer, path: np.ndarray, confidences: np.ndarray, score: float, first_frame: int = 0
) -> Hypothesis:
    """Return the hypothesis of a path (T,), which is the class of each frame from ``first_frame``.

    Equal classes in consecutive frames are one label, with the highest confidence of these frames.
    """
    begins = np.flatnonzero(np.diff(path, prepend=-1))  # the frames where the class changes
    ends = np.append(begins[1:], len(path))
    if len(path):
        confidences = np.maximum.reduceat(confidences, begins)
    symbols = path[begins]
    is_label = symbols != scorer.blank
    label_begins, label_ends = first_frame + begins[is_label], first_frame + ends[is_label]
    spans = (label_begins.tolist(), label_ends.tolist(), confidences[is_label].tolist())
    return scorer.hypothesis(symbols[is_label].tolist(), *spans, score)


class _CTCStream(SearchStream):
    """The best class of each frame of the present utterance of a recording."""

    def __init__(self, scorer: CTCScorer, endpoint_seconds: float | None) -> None:
        super().__init__(scorer, endpoint_seconds)
        self._begin()

    def _begin(self) -> None:
        self.first_frame = self.frame
        self.path = np.zeros(0, np.int64)  # the class of each frame
        self.confidences = np.zeros(0, np.float32)  # of each frame
        self.score = 0.0

    @torch.no_grad()
    def step(self, frames: Tensor) -> None:
        scores, classes, confidences = _best_classes(frames)
        self.path = np.append(self.path, classes[0].cpu().numpy())
        self.confidences = np.append(self.confidences, confidences[0].cpu().numpy())
        self.score += float(scores.sum())
        self.frame += frames.shape[1]

    @property
    def hypothesis(self) -> Hypothesis:
        return _merged(self.scorer, self.path, self.confidences, self.score, self.first_frame)

    @property
    def final_labels(self) -> int:
        labels = len(self.hypothesis.labels)
        is_open = len(self.path) > 0 and self.path[-1] != self.scorer.blank
        return labels - int(is_open)  # The next frame may lengthen the last label.
