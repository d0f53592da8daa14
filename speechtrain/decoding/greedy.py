"""Greedy decoding of a whole batch at once.

Legend: B rows, T frames, N frames of a window, V classes with the blank last.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from speechtrain.decoding.base import CTCScorer, Decoder, Hypothesis, Scorer, TransducerScorer
from speechtrain.errors import ConfigError, require_least

_LABELS_PER_SECOND = 50  # the limit for a model that emits labels without end
_LARGEST_FRAME_LIMIT = 1000  # labels, because a row has no other limit until its next frame
_WINDOW = 3  # frames
_STEPS_PER_READ = 4  # The device waits whenever the host reads.


class Greedy(Decoder):
    """The most likely symbol at each point. The hypotheses do not depend on the batch.

    Transducer: every row is at a frame of its own, and each step searches a window of frames for the row's
    next label. A blank keeps the prediction state, and a label replaces it.

    - A frame ends after ``max_symbols_per_step`` labels.
    - A row ends at the start of a frame if it has more than ``max_symbols`` labels, so the row may exceed
      this number by the labels of one frame. MLPerf's reference decoder has the same rule and 300. None
      allows 50 labels per second of audio, twice the characters of the fastest speech.
    - With durations (TDT), the likeliest duration of each symbol is the number of frames that the row
      advances. A blank advances by at least one frame. The limits are checked at the frames where rows stop.

    CTC: the best class of each frame, with repetitions merged and blanks removed.
    """

    def __init__(self, max_symbols_per_step: int = 30, max_symbols: int | None = None) -> None:
        require_least(1, max_symbols_per_step=max_symbols_per_step, max_symbols=max_symbols)
        if max_symbols_per_step > _LARGEST_FRAME_LIMIT:
            raise ValueError(
                f"max_symbols_per_step is {max_symbols_per_step}, but it must be at most"
                f" {_LARGEST_FRAME_LIMIT}"
            )
        self.max_symbols_per_step = max_symbols_per_step
        self.max_symbols = max_symbols

    @torch.no_grad()
    def decode(self, scorer: Scorer, frames: Tensor, lengths: Tensor) -> list[Hypothesis]:
        if isinstance(scorer, TransducerScorer):
            return _TransducerSearch(self, scorer, frames, lengths).hypotheses()
        if isinstance(scorer, CTCScorer):
            return _best_paths(scorer, frames, lengths)
        raise ConfigError(f"decoder=greedy cannot search {type(scorer).__name__}. Choose another decoder")

    def row_limits(self, lengths: Tensor, frame_seconds: float) -> Tensor:
        """Return the number of labels (B,) that each row may have if another frame is to begin."""
        if self.max_symbols is None:
            return (lengths * (_LABELS_PER_SECOND * frame_seconds)).ceil().long()
        return torch.full_like(lengths, self.max_symbols)


class _TransducerSearch:
    """The position and the labels of each row, and the state of the prediction network."""

    def __init__(self, settings: Greedy, scorer: TransducerScorer, frames: Tensor, lengths: Tensor) -> None:
        device = frames.device
        self.scorer, self.frames, self.lengths = scorer, frames, lengths
        self.frame_limit = settings.max_symbols_per_step
        self.row_limits = settings.row_limits(lengths, scorer.frame_seconds)
        self.row = torch.arange(len(frames), device=device)
        self.durations = self.row.new_tensor(scorer.joint.durations)
        # The frame after a blank is unknown before the duration of the blank is computed.
        self.window = 1 if len(self.durations) else _WINDOW
        self.offsets = torch.arange(self.window, device=device)
        self.prediction, self.state = scorer.start(len(frames))
        zeros = self.row.new_zeros(3, len(frames))
        self.frame, self.labels_in_frame, self.label_counts = zeros.unbind()
        self.scores = torch.zeros(len(frames), device=device)
        self.is_active = lengths > 0
        self.steps = list[tuple[Tensor, Tensor, Tensor]]()  # symbols, frames and confidences, each (B,)

    def hypotheses(self) -> list[Hypothesis]:
        """Search all rows and return their hypotheses."""
        while bool(self.is_active.any()):
            for _ in range(_STEPS_PER_READ):
                self._step()
        if not self.steps:
            return [self.scorer.hypothesis((), (), (), (), 0.0) for _ in self.row]
        columns = zip(*self.steps, strict=True)
        symbols, frames, confidences = (torch.stack(column, 1).cpu().numpy() for column in columns)
        hypotheses = []
        for row, score in enumerate(self.scores.tolist()):
            spans = (frames[row], frames[row] + 1, confidences[row])
            hypotheses.append(_hypothesis(self.scorer, symbols[row], *spans, score))
        return hypotheses

    def _step(self) -> None:
        """Move each row past the first label of its window, or past the window if all symbols are blanks."""
        frames = self.frame[:, None] + self.offsets
        logits, duration_logits = self._logits(frames)
        symbols, scores, confidences = _best_symbols(logits)
        may_visit = self._may_visit(frames)
        is_label = may_visit & (symbols != self.scorer.blank)
        emits = is_label.any(1)
        blanks = torch.where(emits, is_label.int().argmax(1), self.window)
        is_visited = may_visit & (self.offsets <= blanks[:, None])
        self.scores += scores.masked_fill(~is_visited, 0.0).sum(1)
        index = (self.row, blanks.clamp(max=self.window - 1))
        symbol = torch.where(emits, symbols[index], self.scorer.blank)
        self.steps.append((symbol, self.frame + blanks, confidences[index]))
        self._predict(symbol, emits)
        self._move(emits, blanks, duration_logits[:, 0])

    def _logits(self, frames: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of the symbols (B, N, V) and of the durations (B, N, ·) in ``frames`` (B, N)."""
        last_frame = self.frames.shape[1] - 1
        encoded = self.frames[self.row[:, None], frames.clamp(max=last_frame)].flatten(0, 1)
        prediction = self.prediction.repeat_interleave(self.window, 0)
        logits = self.scorer.joint(encoded, prediction).float().view(*frames.shape, -1)
        symbols, durations = logits.tensor_split([logits.shape[2] - len(self.durations)], 2)
        return symbols, durations

    def _may_visit(self, frames: Tensor) -> Tensor:
        """Return for each of ``frames`` (B, N) whether the row may visit it.

        The first frame of the window has begun. The others begin only if the row is within its limit.
        """
        may_begin = (self.offsets == 0) | (self.label_counts <= self.row_limits)[:, None]
        return self.is_active[:, None] & (frames < self.lengths[:, None]) & may_begin

    def _predict(self, symbol: Tensor, emits: Tensor) -> None:
        """Advance the prediction network of the rows that emit a label."""
        prediction, state = self.scorer.step(symbol.masked_fill(~emits, 0), self.state)
        self.prediction = torch.where(emits[:, None], prediction, self.prediction)
        self.state = self.scorer.prediction.select(emits, state, self.state)

    def _move(self, emits: Tensor, blanks: Tensor, duration_logits: Tensor) -> None:
        """Advance each row by ``blanks`` (B,) frames, and by another one if it reaches the frame's limit."""
        self.labels_in_frame = torch.where(emits, self.labels_in_frame * (blanks == 0) + 1, 0)
        advance = blanks + (self.labels_in_frame >= self.frame_limit)
        if len(self.durations):
            score, likeliest = duration_logits.log_softmax(-1).max(-1)
            self.scores += score.masked_fill(~self.is_active, 0.0)
            advance = torch.maximum(advance, self.durations[likeliest])
        self.labels_in_frame = self.labels_in_frame.masked_fill(advance > blanks, 0)
        self.frame = torch.where(self.is_active, self.frame + advance, self.frame)
        self.label_counts += emits
        may_continue = (self.labels_in_frame > 0) | (self.label_counts <= self.row_limits)
        self.is_active = self.is_active & (self.frame < self.lengths) & may_continue


def _best_symbols(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the likeliest symbol (B, N) in each frame, its log-probability and its confidence."""
    symbols = logits.max(-1).indices
    log_probabilities = logits.log_softmax(-1)  # takes a third of logsumexp's time on a CPU
    scores = log_probabilities.gather(2, symbols[..., None])[..., 0]
    label_probability = -log_probabilities[..., -1].expm1()
    return symbols, scores, (scores.exp() / label_probability).clamp(max=1.0)


def _best_paths(scorer: CTCScorer, frames: Tensor, lengths: Tensor) -> list[Hypothesis]:
    """Return the hypothesis of the best class of each frame. Each run of one label in it is one label."""
    scores, classes = frames.max(-1)
    label_scores = frames[..., :-1].logsumexp(-1)
    frame_confidences = (scores - label_scores).exp().clamp(max=1.0)
    hypotheses = []
    for row, length in enumerate(lengths.tolist()):
        path = classes[row, :length].cpu().numpy()
        confidences = frame_confidences[row, :length].cpu().numpy()
        begins = np.flatnonzero(np.diff(path, prepend=-1))
        ends = np.append(begins[1:], length)
        if length:
            confidences = np.maximum.reduceat(confidences, begins)
        score = float(scores[row, :length].sum())
        hypotheses.append(_hypothesis(scorer, path[begins], begins, ends, confidences, score))
    return hypotheses


def _hypothesis(
    scorer: Scorer,
    symbols: np.ndarray,
    begins: np.ndarray,
    ends: np.ndarray,
    confidences: np.ndarray,
    score: float,
) -> Hypothesis:
    """Return the hypothesis of ``symbols`` without the blanks."""
    is_label = symbols != scorer.blank
    spans = (begins[is_label].tolist(), ends[is_label].tolist(), confidences[is_label].tolist())
    return scorer.hypothesis(symbols[is_label].tolist(), *spans, score)
