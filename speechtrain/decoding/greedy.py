"""Greedy decoding of a whole batch at once.

Legend: B rows, T frames, N frames of a window, V classes with the blank last, H joint width. A symbol is a
label or the blank.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from speechtrain.decoding.base import CTCScorer, Decoder, Hypothesis, Scorer, TransducerScorer
from speechtrain.errors import ConfigError, require_least

_LABELS_PER_SECOND = 50  # Some models never stop to emit labels. Their rows end here.
_LARGEST_FRAME_LIMIT = 1000  # labels of one frame, because a row has no other limit until its next frame
_WINDOW = 3  # frames that one step searches
# The host reads whether any row is left only after this number of steps, because each read stops the device.
_STEPS_PER_READ = 4


class Greedy(Decoder):
    """Chooses the most likely symbol at each point. The hypothesis of a row does not depend on its batch.

    For a transducer, each step searches a window of frames for the next label of each row. Rows advance
    independently of each other. A blank leads to the next frame. A label stays in the frame and updates the
    prediction network.

    - A frame ends after ``max_symbols_per_step`` labels.
    - A row ends at the start of a frame if it has more than ``max_symbols`` labels. So it may exceed this
      number by the labels of one frame. MLPerf's reference decoder has the same rule and 300 labels. None
      allows 50 labels per second of audio, which is twice the characters of the fastest speech.
    - With durations (TDT), a row advances by the likeliest duration after each symbol, and by at least one
      frame after a blank. The limits are checked only in the frames that the row visits.

    For CTC, the text is the best class of each frame, with repetitions merged and blanks removed.
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
        """Return the number of labels (B,) with which a row may still begin another frame."""
        if self.max_symbols is None:
            return (lengths * (_LABELS_PER_SECOND * frame_seconds)).ceil().long()
        return torch.full_like(lengths, self.max_symbols)


class _TransducerSearch:
    """A search with the present frame, labels and prediction state of each row."""

    def __init__(self, settings: Greedy, scorer: TransducerScorer, frames: Tensor, lengths: Tensor) -> None:
        device = frames.device
        self.scorer, self.frames, self.lengths = scorer, frames, lengths
        self.frame_limit = settings.max_symbols_per_step
        self.row_limits = settings.row_limits(lengths, scorer.frame_seconds)
        self.row = torch.arange(len(frames), device=device)  # (B,) the indices of the rows
        self.durations = self.row.new_tensor(scorer.joint.durations)  # in frames, empty without TDT
        # With durations, the next frame is known only after the duration of the blank is computed.
        self.window = 1 if len(self.durations) else _WINDOW
        self.offsets = torch.arange(self.window, device=device)
        self.prediction, self.state = scorer.start(len(frames))
        # For each row (B,): its present frame, its labels in that frame, and all its labels.
        zeros = self.row.new_zeros(3, len(frames))
        self.frame, self.labels_in_frame, self.label_counts = zeros.unbind()
        self.scores = torch.zeros(len(frames), device=device)  # (B,) log-probabilities of the paths
        self.is_active = lengths > 0  # (B,) whether the row has not ended
        self.steps = list[tuple[Tensor, Tensor, Tensor]]()  # symbols, frames and confidences, each (B,)

    def hypotheses(self) -> list[Hypothesis]:
        """Search all rows and return their hypotheses."""
        while bool(self.is_active.any()):
            for _ in range(_STEPS_PER_READ):
                self._step()
        if not self.steps:
            return [self.scorer.hypothesis((), (), (), (), 0.0) for _ in self.row]
        # Each array is (B, steps).
        columns = zip(*self.steps, strict=True)
        symbols, begins, confidences = (torch.stack(column, 1).cpu().numpy() for column in columns)
        ends = begins + 1
        hypotheses = []
        for row, score in enumerate(self.scores.tolist()):
            spans = (begins[row], ends[row], confidences[row])
            hypotheses.append(_hypothesis(self.scorer, symbols[row], *spans, score))
        return hypotheses

    def _step(self) -> None:
        """Emit the first label in each row's window, or pass the window if all its symbols are blanks."""
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
        self.steps.append((symbol, self.frame + blanks, confidences[last_visit]))

        # Only a label advances the prediction network.
        prediction, state = self.scorer.step(symbol.masked_fill(~emits, 0), self.state)
        self.prediction = torch.where(emits[:, None], prediction, self.prediction)
        self.state = self.scorer.prediction.select(emits, state, self.state)
        self._move(emits, blanks, duration_logits[:, 0])

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


def _best_paths(scorer: CTCScorer, frames: Tensor, lengths: Tensor) -> list[Hypothesis]:
    """Return the CTC hypothesis of each row: the best class of each frame.

    Equal classes in consecutive frames are one label, with the highest confidence of these frames.
    """
    scores, classes = frames.max(-1)
    label_scores = frames[..., :-1].logsumexp(-1)
    frame_confidences = (scores - label_scores).exp().clamp(max=1.0)
    hypotheses = []
    for row, length in enumerate(lengths.tolist()):
        path = classes[row, :length].cpu().numpy()
        confidences = frame_confidences[row, :length].cpu().numpy()
        begins = np.flatnonzero(np.diff(path, prepend=-1))  # the frames where the class changes
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
    """Return the hypothesis of ``symbols`` without the blanks.

    ``symbols``, their frames from ``begins`` to before ``ends``, and ``confidences`` are arrays of one shape.
    """
    is_label = symbols != scorer.blank
    spans = (begins[is_label].tolist(), ends[is_label].tolist(), confidences[is_label].tolist())
    return scorer.hypothesis(symbols[is_label].tolist(), *spans, score)
