"""Greedy decoding of a whole batch at once."""

from __future__ import annotations

import torch
from torch import Tensor

from speechtrain.decoding.base import CTCScorer, Decoder, Hypothesis, Scorer, TransducerScorer
from speechtrain.errors import ConfigError

_LABELS_PER_SECOND = 50  # a limit for a model that emits labels without end


class Greedy(Decoder):
    """The most likely symbol at each point; the results do not depend on the batch.

    Transducer: every row has its own frame pointer, so one iteration emits a label in some rows and moves
    to the next frame in others. A blank keeps the prediction state; a label replaces it. A frame ends after
    ``max_symbols_per_step`` labels, a row after ``max_symbols`` (MLPerf: 300); None allows 50 per second of
    audio, twice the characters of the fastest speech. With 300, the labels are those of MLPerf's reference
    decoder, which takes one utterance at a time.

    CTC: the best class of each frame, repetitions merged, blanks removed.
    """

    def __init__(self, max_symbols_per_step: int = 30, max_symbols: int | None = None) -> None:
        sizes = {"max_symbols_per_step": max_symbols_per_step, "max_symbols": max_symbols}
        for name, size in sizes.items():
            if size is not None and size < 1:
                raise ValueError(f"{name} is {size}; it must be at least 1")
        self.max_symbols_per_step = max_symbols_per_step
        self.max_symbols = max_symbols

    @torch.no_grad()
    def decode(self, scorer: Scorer, frames: Tensor, lengths: Tensor) -> list[Hypothesis]:
        if isinstance(scorer, TransducerScorer):
            return self._transducer(scorer, frames, lengths)
        if isinstance(scorer, CTCScorer):
            return _best_path(scorer, frames, lengths)
        raise ConfigError(f"decoder=greedy cannot search {type(scorer).__name__}; choose another decoder")

    def _transducer(self, scorer: TransducerScorer, frames: Tensor, lengths: Tensor) -> list[Hypothesis]:
        rows, most, _ = frames.shape
        prediction, state = scorer.start(rows)
        limits = torch.full_like(lengths, self.max_symbols or 0)
        if self.max_symbols is None:
            limits = (lengths * (_LABELS_PER_SECOND * scorer.frame_seconds)).ceil().long()
        index = torch.arange(rows, device=frames.device)
        frame = torch.zeros(rows, dtype=torch.int64, device=frames.device)
        in_frame, emitted = torch.zeros_like(frame), torch.zeros_like(frame)
        scores = torch.zeros(rows, device=frames.device)
        found: list[list[tuple[int, float]]] = [[] for _ in range(rows)]  # labels and their times
        active = frame < lengths
        while bool(active.any()):  # an iteration is one joint for all rows and up to four host reads
            logits = scorer.joint(frames[index, frame.clamp(max=most - 1)], prediction).float()
            labels = logits.argmax(-1)
            best = logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]
            scores += best.masked_fill(~active, 0.0)
            emits = active & (labels != scorer.blank)
            in_frame = torch.where(emits, in_frame + 1, torch.zeros_like(in_frame))
            emitted = emitted + emits
            moves = active & (~emits | (in_frame >= self.max_symbols_per_step))
            if bool(emits.any()):
                for row, label, at in torch.stack((index, labels, frame), 1)[emits].tolist():
                    found[row].append((label, at * scorer.frame_seconds))
                advanced, new_state = scorer.step(torch.where(emits, labels, torch.zeros_like(labels)), state)
                prediction = torch.where(emits[:, None], advanced, prediction)
                state = scorer.prediction.select(emits, new_state, state)
            frame = frame + moves
            in_frame = torch.where(moves, torch.zeros_like(in_frame), in_frame)
            active = (frame < lengths) & (emitted < limits)
        return [_hypothesis(scorer, *pair) for pair in zip(found, scores.tolist(), strict=True)]


def _best_path(scorer: CTCScorer, frames: Tensor, lengths: Tensor) -> list[Hypothesis]:
    best, classes = (values.cpu() for values in frames.max(-1))
    changed = torch.ones_like(classes, dtype=torch.bool)
    changed[:, 1:] = classes[:, 1:] != classes[:, :-1]
    kept = changed & (classes != scorer.blank)
    hypotheses = []
    for row, keep, scores, length in zip(classes, kept, best, lengths.tolist(), strict=True):
        at = keep[:length].nonzero()[:, 0]
        pairs = zip(row[at].tolist(), (at * scorer.frame_seconds).tolist(), strict=True)
        hypotheses.append(_hypothesis(scorer, list(pairs), float(scores[:length].sum())))
    return hypotheses


def _hypothesis(scorer: Scorer, found: list[tuple[int, float]], score: float) -> Hypothesis:
    labels = tuple(label for label, _ in found)
    times = tuple(time for _, time in found)
    return Hypothesis(labels=labels, text=scorer.text(labels), score=score, times=times)
