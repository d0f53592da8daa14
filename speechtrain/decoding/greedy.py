"""Greedy decoding of a whole batch at once."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from speechtrain.decoding.base import CTCScorer, Decoder, Hypothesis, Scorer, TransducerScorer
from speechtrain.errors import ConfigError, require_least

_LABELS_PER_SECOND = 50  # a limit for a model that emits labels without end
_MOST_SYMBOLS = 1000  # labels of one frame, because a row has no other limit until its next frame
_WINDOW = 3
_STEPS_PER_READ = 4  # a device waits for every read by the host


class Greedy(Decoder):
    """The most likely symbol at each point; the results do not depend on the batch.

    Transducer: every row has its own frame pointer, and each step looks for its next label in the frames of
    a window. A blank keeps the prediction state; a label replaces it. A frame ends after
    ``max_symbols_per_step`` labels. A row ends at the start of a frame if it has more than ``max_symbols``
    labels, so it may exceed this number by the labels of one frame. MLPerf's reference decoder has the same
    rule and 300. None allows 50 labels per second of audio, twice the characters of the fastest speech. With
    durations (TDT), the likeliest duration of each symbol says how many frames are skipped after it, at least
    one after a blank, and the next frame that is visited checks the limit.

    CTC: the best class of each frame, repetitions merged, blanks removed.
    """

    def __init__(self, max_symbols_per_step: int = 30, max_symbols: int | None = None) -> None:
        require_least(1, max_symbols_per_step=max_symbols_per_step, max_symbols=max_symbols)
        if max_symbols_per_step > _MOST_SYMBOLS:
            raise ValueError(
                f"max_symbols_per_step is {max_symbols_per_step}, but it must be at most {_MOST_SYMBOLS}"
            )
        self.max_symbols_per_step = max_symbols_per_step
        self.max_symbols = max_symbols

    @torch.no_grad()
    def decode(self, scorer: Scorer, frames: Tensor, lengths: Tensor) -> list[Hypothesis]:
        if isinstance(scorer, TransducerScorer):
            return self._transducer(scorer, frames, lengths)
        if isinstance(scorer, CTCScorer):
            return _best_path(scorer, frames, lengths)
        raise ConfigError(f"decoder=greedy cannot search {type(scorer).__name__}; choose another decoder")

    def _limits(self, lengths: Tensor, frame_seconds: float) -> Tensor:
        """Return how many labels (B,) each row may have when a frame begins."""
        if self.max_symbols is None:
            return (lengths * (_LABELS_PER_SECOND * frame_seconds)).ceil().long()
        return torch.full_like(lengths, self.max_symbols)

    def _transducer(self, scorer: TransducerScorer, frames: Tensor, lengths: Tensor) -> list[Hypothesis]:
        rows, most, _ = frames.shape
        prediction, state = scorer.start(rows)
        limits = self._limits(lengths, scorer.frame_seconds)
        durations = torch.tensor(scorer.joint.durations, dtype=torch.int64, device=frames.device)
        window = 1 if len(durations) else _WINDOW  # how far a blank goes is not known before it is read
        index, ahead = (torch.arange(n, device=frames.device) for n in (rows, window))
        frame = torch.zeros(rows, dtype=torch.int64, device=frames.device)
        in_frame, emitted = torch.zeros_like(frame), torch.zeros_like(frame)
        scores = torch.zeros(rows, device=frames.device)
        found, sure = list[Tensor](), list[Tensor]()
        active = frame < lengths
        while bool(active.any()):
            for _ in range(_STEPS_PER_READ):
                at = frame[:, None] + ahead
                near = frames[index[:, None], at.clamp(max=most - 1)].flatten(0, 1)
                logits = scorer.joint(near, prediction.repeat_interleave(window, 0)).float()
                logits = logits.view(rows, window, -1)
                logits, of_durations = logits.tensor_split([logits.shape[2] - len(durations)], 2)
                labels = logits.max(-1).indices
                logs = logits.log_softmax(-1)  # a third of logsumexp's time on a CPU
                highest = logs.gather(2, labels[..., None])[..., 0]
                # the first frame of the window is begun; a frame after it begins within the limit only
                may_begin = (ahead == 0) | (emitted <= limits)[:, None]
                inside = active[:, None] & (at < lengths[:, None]) & may_begin
                hits = inside & (labels != scorer.blank)
                emits = hits.any(1)
                blanks = torch.where(emits, hits.int().argmax(1), window)
                seen = inside & (ahead <= blanks[:, None])
                scores += highest.masked_fill(~seen, 0.0).sum(1)
                here = (index, blanks.clamp(max=window - 1))
                label = torch.where(emits, labels[here], 0)
                found.append(torch.stack((torch.where(emits, label, -1), frame + blanks)))
                sure.append((highest[here].exp() / -logs[..., -1][here].expm1()).clamp(max=1.0))
                advanced, new_state = scorer.step(label, state)
                prediction = torch.where(emits[:, None], advanced, prediction)
                state = scorer.prediction.select(emits, new_state, state)
                in_frame = torch.where(emits, in_frame * (blanks == 0) + 1, 0)
                is_full = in_frame >= self.max_symbols_per_step
                moved = blanks + is_full
                if len(durations):
                    chance, longest = of_durations[:, 0].log_softmax(-1).max(-1)
                    scores += chance.masked_fill(~active, 0.0)
                    moved = torch.maximum(moved, durations[longest])
                in_frame = in_frame.masked_fill(moved > blanks, 0)
                frame = torch.where(active, frame + moved, frame)
                emitted += emits
                active = active & (frame < lengths) & ((in_frame > 0) | (emitted <= limits))
        if not found:
            return [scorer.hypothesis((), (), (), (), 0.0) for _ in range(rows)]
        symbols, places = torch.stack(found, 1).cpu().numpy()
        chances, totals = torch.stack(sure).cpu().numpy(), scores.tolist()
        hypotheses = []
        for row, total in enumerate(totals):
            kept = symbols[:, row] >= 0
            begins = places[kept, row]
            spans = (begins.tolist(), (begins + 1).tolist(), chances[kept, row].tolist())
            hypotheses.append(scorer.hypothesis(symbols[kept, row].tolist(), *spans, score=total))
        return hypotheses


def _best_path(scorer: CTCScorer, frames: Tensor, lengths: Tensor) -> list[Hypothesis]:
    best, classes = frames.max(-1)
    sure = (best - frames[..., :-1].logsumexp(-1)).exp().clamp(max=1.0)
    hypotheses = []
    for row, length in enumerate(lengths.tolist()):
        path, chances = classes[row, :length].cpu().numpy(), sure[row, :length].cpu().numpy()
        begins = np.flatnonzero(np.diff(path, prepend=-1))  # of runs of equal classes
        ends = np.append(begins[1:], length)
        chances = np.maximum.reduceat(chances, begins) if length else chances
        kept = path[begins] != scorer.blank
        spans = (begins[kept].tolist(), ends[kept].tolist(), chances[kept].tolist())
        score = float(best[row, :length].sum())
        hypotheses.append(scorer.hypothesis(path[begins][kept].tolist(), *spans, score=score))
    return hypotheses
