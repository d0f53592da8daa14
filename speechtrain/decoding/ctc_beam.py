"""Prefix beam search for CTC.

Legend: B rows, W prefixes of a row, T frames, V classes with the blank last, N texts. A text of U labels has
S = 2 U + 1 alignment states: the blank, and each label with the blank after it. All scores are natural
log-probabilities.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from speechtrain.decoding.base import CTCScorer, Hypothesis, Scorer, TransducerScorer
from speechtrain.decoding.beam import IMPOSSIBLE, Beam, BeamSearch, LabelTree, TimedLabels, extended_key
from speechtrain.errors import ConfigError


class CTCBeam(BeamSearch):
    """Prefix beam search (Graves, 2008, and Hannun et al., 2014) for a whole batch at once.

    The probability of a prefix is the sum over all its paths. The search sums the paths that end in a blank
    and the paths that end in the last label separately, because only a blank separates two equal labels.
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
        return search.label_tree.hypotheses(search.beam), search.beam.score

    def _align(
        self, scorer: CTCScorer, frames: Tensor, lengths: Tensor, texts: list[TimedLabels]
    ) -> list[TimedLabels]:
        """Return ``texts`` with the frames of their labels on the likeliest path."""
        padded_paths = _likeliest_paths(frames, lengths, texts, scorer.blank)
        label_totals = frames[..., :-1].logsumexp(-1, keepdim=True)
        probabilities = (frames - label_totals).exp().clamp(max=1.0)
        confidences = probabilities.cpu().numpy()  # (B, T, V)
        row_lengths = lengths.tolist()
        timed_texts = []
        for text, padded_path in zip(texts, padded_paths, strict=True):
            path = padded_path[: row_lengths[text.row]]  # Its states never decrease.
            label_states = np.arange(1, 2 * len(text.labels), 2)
            begins = path.searchsorted(label_states, side="left").tolist()
            ends = path.searchsorted(label_states, side="right").tolist()
            # A label has the highest confidence of its frames.
            label_confidences = list[float]()
            for begin, end, label in zip(begins, ends, text.labels, strict=True):
                frame_confidences = confidences[text.row, begin:end, label]
                label_confidences.append(float(frame_confidences.max(initial=0.0)))
            timed_texts.append(
                TimedLabels(text.row, text.labels, tuple(begins), tuple(ends), tuple(label_confidences))
            )
        return timed_texts


class _PrefixSearch:
    """The W best prefixes of each row after the frames that the search has read."""

    def __init__(self, settings: CTCBeam, scorer: CTCScorer, frames: Tensor, lengths: Tensor) -> None:
        self.fusion, self.width, self.blank = settings.fusion, settings.width, scorer.blank
        self.frames, self.lengths = frames, lengths
        self.label_tree = LabelTree()
        self.beam = Beam.start(len(frames), self.width, self.blank, frames.device)
        # Scores (B, W) of the paths of each prefix that end in a blank, and of those that end in its last
        # label. Before the first frame, the empty path counts as one that ends in a blank.
        self.blank_score = self.beam.score
        self.label_score = torch.full_like(self.blank_score, IMPOSSIBLE)

    def advance(self, frame: int) -> None:
        """Extend the paths of all prefixes by one frame, and choose the W best prefixes after it."""
        beam = self.beam
        scores = self.frames[:, frame]  # (B, V)
        is_live = (frame < self.lengths)[:, None]  # (B, 1) whether the row has this frame
        repeat_score = scores.gather(1, beam.label)  # (B, W) of each prefix's last label in this frame
        new_label_scores = beam.score[..., None] + scores[:, None]  # (B, W, V) of each prefix and a new label
        # A new label that equals the last label needs a blank between them.
        equal_label_score = self.blank_score + repeat_score
        new_label_scores.scatter_(2, beam.label[..., None], equal_label_score[..., None])
        new_label_scores.masked_fill_(~is_live[..., None], IMPOSSIBLE)
        # Some prefixes with a new label are already in the beam. Their paths are added to those prefixes.
        arcs = beam.arcs(new_label_scores)
        label_score = torch.logaddexp(self.label_score + repeat_score, arcs.logsumexp(1))
        # The empty prefix has no last label. Its ``beam.label`` is the blank.
        label_score = label_score.masked_fill(beam.label == self.blank, IMPOSSIBLE)
        self.label_score = torch.where(is_live, label_score, self.label_score)
        self.blank_score = torch.where(is_live, beam.score + scores[:, -1:], self.blank_score)
        self._select_best(beam.without(arcs, new_label_scores[..., :-1]), frame)

    def _select_best(self, extension_scores: Tensor, frame: int) -> None:
        """Replace the beam by the W best of its prefixes and of their extensions by one label.

        ``extension_scores`` (B, W, V − 1) has the score of each prefix with each new label.
        """
        # A row's candidates are its W prefixes, then their extensions in the order of ``extension_scores``.
        fusion_scores = self.fusion.label_scores(self.beam.fusion_score, self.beam.fusion_state)
        fusion_scores = fusion_scores.expand_as(extension_scores)
        prefix_score = torch.logaddexp(self.blank_score, self.label_score)
        all_scores = torch.cat((prefix_score, extension_scores.flatten(1)), 1)
        all_fusion_scores = torch.cat((self.beam.fusion_score, fusion_scores.flatten(1)), 1)
        candidate = (all_scores + all_fusion_scores).topk(self.width).indices  # (B, W)
        score = all_scores.gather(1, candidate)

        labels = extension_scores.shape[2]
        is_extension = candidate >= self.width
        extension = (candidate - self.width).clamp(min=0)
        label = extension % labels
        extended_prefix = extension.div(labels, rounding_mode="floor")
        parent = torch.where(is_extension, extended_prefix, candidate)
        self.blank_score = self.blank_score.gather(1, parent).masked_fill(is_extension, IMPOSSIBLE)
        self.label_score = torch.where(is_extension, score, self.label_score.gather(1, parent))

        parents = self.beam.take(parent)
        node, state = parents.node, parents.fusion_state
        if bool(is_extension.any()):
            # ``_align`` replaces this frame and this confidence, because only the end of the search shows the
            # likeliest path.
            new_node = self.label_tree.add(node, label, frame, confidences=score)
            node = torch.where(is_extension, new_node, node)
        new_state = self.fusion.advance(state, label, is_extension)
        self.beam = Beam(
            score=score,
            key=torch.where(is_extension, extended_key(parents.key, label), parents.key),
            parent_key=torch.where(is_extension, parents.key, parents.parent_key),
            label=torch.where(is_extension, label, parents.label),
            node=node,
            fusion_score=all_fusion_scores.gather(1, candidate),
            fusion_state=torch.where(is_extension, new_state, state),
        )


def _likeliest_paths(frames: Tensor, lengths: Tensor, texts: list[TimedLabels], blank: int) -> np.ndarray:
    """Return the likeliest path (N, T) of each text, as the index of its alignment state in each frame.

    From one frame to the next, a path stays in its state or moves to the next one. It may also skip the blank
    between two different labels.
    """
    rows = torch.tensor([text.row for text in texts], device=frames.device)
    text_labels = [torch.tensor(text.labels, dtype=torch.int64) for text in texts]
    labels = pad_sequence(text_labels, batch_first=True, padding_value=blank)
    symbols = torch.full((len(texts), 2 * labels.shape[1] + 1), blank)  # (N, S), padded with blanks
    symbols[:, 1::2] = labels
    symbols = symbols.to(frames.device)
    may_skip = (symbols != blank) & (symbols != symbols.roll(2, 1))
    scores = frames.new_full(symbols.shape, IMPOSSIBLE)  # (N, S) of the best path that ends in each state
    scores[:, 0] = 0.0
    # For each frame, the number of states (N, S) that the best path to a state moves: 0, 1 or 2.
    all_steps = []
    for frame in range(int(lengths.max())):
        padded = F.pad(scores, (2, 0), value=IMPOSSIBLE)
        skip_scores = padded[:, :-2].masked_fill(~may_skip, IMPOSSIBLE)
        best_scores, steps = torch.stack((scores, padded[:, 1:-1], skip_scores)).max(0)
        is_live = (frame < lengths[rows])[:, None]
        symbol_scores = frames[rows, frame].gather(1, symbols)
        scores = torch.where(is_live, best_scores + symbol_scores, scores)
        all_steps.append(torch.where(is_live, steps, 0).to(torch.int8))

    # A path ends in the last label or in the blank after it. It is traced back to its beginning.
    last_blanks = torch.tensor([2 * len(text.labels) for text in texts], device=scores.device)
    last_labels = (last_blanks - 1).clamp(min=0)  # A text without labels has only the state of a blank.
    ends = torch.stack((last_blanks, last_labels), 1)
    likelier = scores.gather(1, ends).max(1, keepdim=True).indices
    state = ends.gather(1, likelier)
    path = [state[:, :0]]  # An empty column, because the frames may be none.
    for steps in reversed(all_steps):
        path.append(state)
        state = state - steps.gather(1, state)
    return torch.cat(path[::-1], 1).cpu().numpy()
