"""Prefix beam search for CTC.

Legend: B rows, W prefixes of a row, T frames, V classes with the blank last, S = 2 U + 1 states of an
alignment of U labels: the labels with blanks around each.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from speechtrain.decoding.base import CTCScorer, Hypothesis, Scorer, TransducerScorer
from speechtrain.decoding.beam import NEVER, Beam, BeamSearch, Found, Trail, extended
from speechtrain.errors import ConfigError


class CTCBeam(BeamSearch):
    """Prefix beam search (Graves, 2008; Hannun et al., 2014) for a whole batch at once.

    A prefix has the probability of its paths that end in a blank and of those that do not. Times are those
    of the likeliest path of each text.
    """

    @torch.no_grad()
    def decode(self, scorer: Scorer, frames: Tensor, lengths: Tensor) -> list[Hypothesis]:
        if isinstance(scorer, CTCScorer):
            return self._decode(scorer, frames.float(), lengths)
        other = "; choose beam" if isinstance(scorer, TransducerScorer) else ""
        raise ConfigError(f"decoder=ctc_beam searches CTC models, not {type(scorer).__name__}{other}")

    def search(self, scorer: CTCScorer, frames: Tensor, lengths: Tensor) -> tuple[list[list[Found]], Tensor]:
        rows, width, labels = len(frames), self.width, frames.shape[2] - 1
        beam = Beam.start(rows, width, scorer.blank, frames.device)
        silent, voiced = beam.score, torch.full_like(beam.score, NEVER)  # paths that end in a blank, or not
        trail = Trail()
        for frame in range(int(lengths.max())):
            live, scores = (frame < lengths)[:, None], frames[:, frame, None]
            reached = beam.score[..., None] + scores
            # a label after itself is another one only where a blank is between
            reached.scatter_(2, beam.last[..., None], (silent + _of(scores, beam.last))[..., None])
            arcs = beam.arcs(reached)
            stay = torch.logaddexp(voiced + _of(scores, beam.last), arcs.logsumexp(1))
            silent = torch.where(live, beam.score + scores[..., -1], silent)
            voiced = torch.where(live, stay.masked_fill(beam.last == scorer.blank, NEVER), voiced)
            new = beam.without(arcs, reached[..., :-1]).masked_fill(~live[..., None], NEVER).flatten(1)
            bonus = self.fusion.next(beam.extra, beam.state).expand(-1, -1, labels).flatten(1)
            pool = torch.cat((torch.logaddexp(silent, voiced), new), 1)
            extra = torch.cat((beam.extra, bonus), 1)
            place = (pool + extra).topk(width).indices
            score, extra = pool.gather(1, place), extra.gather(1, place)
            is_new, made = place >= width, (place - width).clamp(min=0)
            parent = torch.where(is_new, made.div(labels, rounding_mode="floor"), place)
            label, old = made % labels, beam.take(parent)
            node = trail.add(old.node, label, frame, score) if bool(is_new.any()) else old.node
            beam = Beam(
                score,
                torch.where(is_new, extended(old.key, label), old.key),
                torch.where(is_new, old.key, old.before),
                torch.where(is_new, label, old.last),
                torch.where(is_new, node, old.node),
                extra,
                torch.where(is_new, self.fusion.advance(old.state, label, is_new), old.state),
            )
            silent = silent.gather(1, parent).masked_fill(is_new, NEVER)
            voiced = torch.where(is_new, score, voiced.gather(1, parent))
        return trail.found(beam), beam.score

    def _placed(
        self, scorer: CTCScorer, frames: Tensor, lengths: Tensor, found: list[list[Found]]
    ) -> list[list[Found]]:
        rows = [index for index, row in enumerate(found) for _ in row]
        texts = [one.labels for row in found for one in row]
        placed = iter(_alignments(scorer, frames, lengths, rows, texts))
        return [[next(placed) for _ in row] for row in found]


def _of(scores: Tensor, labels: Tensor) -> Tensor:
    """The scores (B, W) of ``labels`` (B, W) in one frame's (B, 1, V)."""
    return scores[:, 0].gather(1, labels)


def _alignments(
    scorer: CTCScorer, frames: Tensor, lengths: Tensor, rows: list[int], texts: list[tuple[int, ...]]
) -> list[Found]:
    """The frames of each label of ``texts`` (N) on the likeliest path through the frames of its row."""
    blank, device = scorer.blank, frames.device
    states = [[blank, *(state for label in text for state in (label, blank))] for text in texts]
    most = max(map(len, states))
    padded = torch.tensor([one + [blank] * (most - len(one)) for one in states], device=device)
    row = torch.tensor(rows, device=device)
    skips = (padded != blank) & (padded != padded.roll(2, 1))  # from the label before, over the blank
    place = torch.arange(most, device=device)
    reached = torch.full(padded.shape, NEVER, device=device)
    reached[:, 0] = 0.0
    steps, count = list[Tensor](), int(lengths.max())
    for frame in range(count):
        one = torch.where(place >= 1, reached.roll(1, 1), NEVER)
        two = torch.where(skips & (place >= 2), reached.roll(2, 1), NEVER)
        ways = torch.stack((reached, one, two)) if frame else torch.stack((reached, one))
        best, step = ways.max(0)
        live = (frame < lengths[row])[:, None]
        reached = torch.where(live, best + frames[row, frame].gather(1, padded), reached)
        steps.append(torch.where(live, step, 0).to(torch.int8))
    final = torch.tensor([len(one) - 1 for one in states], device=device)
    last = torch.stack((final, (final - 1).clamp(min=0)))
    at = last.gather(0, reached.gather(1, last.T).max(1).indices[None])[0]
    path = list[Tensor]()
    for frame in range(count - 1, -1, -1):
        path.append(at)
        at = at - steps[frame].gather(1, at[:, None])[:, 0]
    walks = torch.stack(path[::-1], 1).cpu().numpy() if path else np.zeros((len(texts), 0))
    sure = (frames - frames[..., :-1].logsumexp(-1, keepdim=True)).exp().clamp(max=1.0).cpu().numpy()
    found, counts = [], lengths.tolist()
    for text, index, walk in zip(texts, rows, walks, strict=True):
        odd = np.arange(1, 2 * len(text), 2)  # the states of labels
        begins, ends = (walk[: counts[index]].searchsorted(odd, side).tolist() for side in ("left", "right"))
        spans = zip(begins, ends, text, strict=True)
        chances = (float(sure[index, a:b, label].max(initial=0.0)) for a, b, label in spans)
        found.append(Found(text, tuple(begins), tuple(ends), tuple(chances)))
    return found
