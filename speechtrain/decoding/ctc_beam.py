"""Prefix beam search for CTC.

Legend: B rows, W prefixes of a row, T frames, V classes with the blank last, N texts, S = 2 U + 1 states of
an alignment of U labels: the labels, and a blank before and after each.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from speechtrain.decoding.base import CTCScorer, Hypothesis, Scorer, TransducerScorer
from speechtrain.decoding.beam import NEVER, Beam, BeamSearch, TimedLabels, Trail, extended_key
from speechtrain.errors import ConfigError


class CTCBeam(BeamSearch):
    """Prefix beam search (Graves, 2008, and Hannun et al., 2014) for a whole batch at once.

    The probability of a prefix is the sum over its paths that end in a blank and its paths that do not.
    Each text has the times of its likeliest path.
    """

    @torch.no_grad()
    def decode(self, scorer: Scorer, frames: Tensor, lengths: Tensor) -> list[Hypothesis]:
        if isinstance(scorer, CTCScorer):
            return self._decode(scorer, frames.float(), lengths)
        advice = ""
        if isinstance(scorer, TransducerScorer):
            advice = ". Choose beam"
        raise ConfigError(f"decoder=ctc_beam searches CTC models, not {type(scorer).__name__}{advice}")

    def search(
        self, scorer: CTCScorer, frames: Tensor, lengths: Tensor
    ) -> tuple[list[list[TimedLabels]], Tensor]:
        search = _PrefixSearch(self, scorer, frames, lengths)
        for frame in range(int(lengths.max())):
            search.advance(frame)
        return search.trail.hypotheses(search.beam), search.beam.score

    def _align(
        self, scorer: CTCScorer, frames: Tensor, lengths: Tensor, texts: list[TimedLabels]
    ) -> list[TimedLabels]:
        """Return ``texts`` with the frames of their labels on the likeliest path."""
        paths = _likeliest_paths(frames, lengths, texts, scorer.blank)
        totals = frames[..., :-1].logsumexp(-1, keepdim=True)
        probabilities = (frames - totals).exp().clamp(max=1.0)
        confidences = probabilities.cpu().numpy()
        row_lengths = lengths.tolist()
        aligned = []
        for text, path in zip(texts, paths, strict=True):
            path = path[: row_lengths[text.row]]
            aligned.append(_set_times(text, path, confidences[text.row]))
        return aligned


class _PrefixSearch:
    """The prefixes of a batch."""

    def __init__(self, settings: CTCBeam, scorer: CTCScorer, frames: Tensor, lengths: Tensor) -> None:
        self.fusion, self.width, self.blank = settings.fusion, settings.width, scorer.blank
        self.frames, self.lengths = frames, lengths
        self.trail = Trail()
        self.beam = Beam.start(len(frames), self.width, self.blank, frames.device)
        self.silent = self.beam.score  # log-probability of the paths that end in a blank
        self.voiced = torch.full_like(self.silent, NEVER)  # log-probability of the paths that end in a label

    def advance(self, frame: int) -> None:
        """Extend the prefixes by one frame."""
        beam = self.beam
        scores = self.frames[:, frame]
        is_live = (frame < self.lengths)[:, None]
        repetition = scores.gather(1, beam.label)
        paths = beam.score[..., None] + scores[:, None]
        # A label after itself is a new label only if a blank is between them.
        paths.scatter_(2, beam.label[..., None], (self.silent + repetition)[..., None])
        paths.masked_fill_(~is_live[..., None], NEVER)
        arcs = beam.arcs(paths)
        voiced = torch.logaddexp(self.voiced + repetition, arcs.logsumexp(1))
        voiced = voiced.masked_fill(beam.label == self.blank, NEVER)
        self.voiced = torch.where(is_live, voiced, self.voiced)
        self.silent = torch.where(is_live, beam.score + scores[:, -1:], self.silent)
        self._keep_best(beam.without(arcs, paths[..., :-1]), frame)

    def _keep_best(self, new_paths: Tensor, frame: int) -> None:
        """Keep the best of the present prefixes and of the prefixes with one more label."""
        choice, score, fusion_score = self._choose(new_paths)
        is_new, extension = choice >= self.width, (choice - self.width).clamp(min=0)
        labels = new_paths.shape[2]
        parent = torch.where(is_new, extension.div(labels, rounding_mode="floor"), choice)
        self.silent = self.silent.gather(1, parent).masked_fill(is_new, NEVER)
        self.voiced = torch.where(is_new, score, self.voiced.gather(1, parent))
        parents = replace(self.beam.take(parent), score=score, fusion_score=fusion_score)
        self.beam = self._extend(parents, extension % labels, is_new, frame)

    def _choose(self, new_paths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the W best: their numbers, their scores and their fusion scores (B, W).

        Present prefixes have the numbers 0 to W − 1. ``new_paths`` (B, W, V − 1), the scores of the prefixes
        with one more label, have the numbers after these.
        """
        beam = self.beam
        fusion_scores = self.fusion.label_scores(beam.fusion_score, beam.fusion_state).expand_as(new_paths)
        pool = torch.cat((torch.logaddexp(self.silent, self.voiced), new_paths.flatten(1)), 1)
        fusion_pool = torch.cat((beam.fusion_score, fusion_scores.flatten(1)), 1)
        choice = (pool + fusion_pool).topk(self.width).indices
        return choice, pool.gather(1, choice), fusion_pool.gather(1, choice)

    def _extend(self, parents: Beam, label: Tensor, is_new: Tensor, frame: int) -> Beam:
        """Return ``parents``, with ``label`` (B, W) added to the new prefixes. No score changes."""
        node, state = parents.node, parents.fusion_state
        if bool(is_new.any()):
            # The alignment replaces the frame and the confidence of this node.
            node = torch.where(is_new, self.trail.add(node, label, frame, parents.score), node)
        return replace(
            parents,
            key=torch.where(is_new, extended_key(parents.key, label), parents.key),
            parent_key=torch.where(is_new, parents.key, parents.parent_key),
            label=torch.where(is_new, label, parents.label),
            node=node,
            fusion_state=torch.where(is_new, self.fusion.advance(state, label, is_new), state),
        )


def _states(texts: list[TimedLabels], blank: int) -> Tensor:
    """Return the states (N, S) of each text, padded with blanks."""
    rows = [torch.tensor(text.labels, dtype=torch.int64) for text in texts]
    labels = pad_sequence(rows, True, blank)
    states = torch.full((len(texts), 2 * labels.shape[1] + 1), blank)
    states[:, 1::2] = labels
    return states


def _likeliest_paths(frames: Tensor, lengths: Tensor, texts: list[TimedLabels], blank: int) -> np.ndarray:
    """Return the states (N, T) of each text's likeliest path.

    A path steps to the same or to the next state in each frame. It may step over the blank between two
    different labels.
    """
    rows = torch.tensor([text.row for text in texts], device=frames.device)
    states = _states(texts, blank).to(frames.device)
    may_skip = (states != blank) & (states != states.roll(2, 1))
    scores = frames.new_full(states.shape, NEVER)
    scores[:, 0] = 0.0
    steps = []
    for frame in range(int(lengths.max())):
        best, step = _likeliest_steps(scores, may_skip)
        is_live = (frame < lengths[rows])[:, None]
        scores = torch.where(is_live, best + frames[rows, frame].gather(1, states), scores)
        steps.append(torch.where(is_live, step, 0).to(torch.int8))
    return _trace_back(steps, scores, texts)


def _likeliest_steps(scores: Tensor, may_skip: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each state the best score (N, S) of the states before it, and the distance to that state."""
    padded = F.pad(scores, (2, 0), value=NEVER)
    skipped = padded[:, :-2].masked_fill(~may_skip, NEVER)
    best, step = torch.stack((scores, padded[:, 1:-1], skipped)).max(0)
    return best, step


def _trace_back(steps: list[Tensor], scores: Tensor, texts: list[TimedLabels]) -> np.ndarray:
    """Return the states (N, T) of the paths that end with the likeliest of ``scores`` (N, S).

    ``steps`` has a tensor (N, S) for each frame: the distance of each state from its state one frame before.
    """
    last_blanks = torch.tensor([2 * len(text.labels) for text in texts], device=scores.device)
    ends = torch.stack((last_blanks, (last_blanks - 1).clamp(min=0)), 1)
    likelier = scores.gather(1, ends).max(1, keepdim=True).indices
    state = ends.gather(1, likelier)
    path = [state[:, :0]]
    for step in reversed(steps):
        path.append(state)
        state = state - step.gather(1, state)
    return torch.cat(path[::-1], 1).cpu().numpy()


def _set_times(text: TimedLabels, path: np.ndarray, confidences: np.ndarray) -> TimedLabels:
    """Return a text with the frames of its labels in ``path`` (T,) and their highest confidences (T, V)."""
    states = np.arange(1, 2 * len(text.labels), 2)
    begins, ends = (path.searchsorted(states, side).tolist() for side in ("left", "right"))
    highest = list[float]()
    for begin, end, label in zip(begins, ends, text.labels, strict=True):
        label_confidences = confidences[begin:end, label]
        highest.append(float(label_confidences.max(initial=0.0)))
    return replace(text, begins=tuple(begins), ends=tuple(ends), confidences=tuple(highest))
