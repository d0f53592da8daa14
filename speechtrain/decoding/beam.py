"""Beam search for transducers, and what every beam search here shares.

Legend: B rows, W hypotheses of a row, T frames, V classes with the blank last, H joint width.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from speechtrain.decoding.base import CTCScorer, Decoder, Hypothesis, Scorer, TransducerScorer
from speechtrain.decoding.fusion import Fusion
from speechtrain.decoding.greedy import Greedy
from speechtrain.errors import ConfigError
from speechtrain.files import FilePath
from speechtrain.text.ngram import read_ngram

NEVER = -torch.inf
_SPARE = 2  # hypotheses more than ``width`` that a transducer's search follows (NeMo's expansion_beta)
_MOST_SYMBOLS = 100
_MOST_WIDTH = 1000
_AT_ONCE = 2**24  # numbers of repeated frames in memory while texts are scored


@dataclass
class Beam:
    """The hypotheses of each row, all (B, W); an empty place has the score −inf."""

    score: Tensor  # log-probability of the paths found so far
    key: Tensor  # a hash of the labels: equal keys are equal labels
    before: Tensor  # the key without the last label
    last: Tensor  # the last label; the blank where there is none
    node: Tensor  # of the trail
    extra: Tensor  # what the fusion adds to the score
    state: Tensor  # of the fusion

    @classmethod
    def start(cls, rows: int, width: int, blank: int, device: torch.device) -> Beam:
        zeros = torch.zeros(rows, width, dtype=torch.int64, device=device)
        score = torch.full((rows, width), NEVER, device=device)
        score[:, 0] = 0.0
        return cls(score, zeros + 1, zeros, zeros + blank, zeros - 1, score.clamp(0, 0), zeros)

    def take(self, places: Tensor) -> Beam:
        return Beam(*(getattr(self, field.name).gather(1, places) for field in fields(self)))

    def joined(self, others: Sequence[Beam]) -> Beam:
        pools = ([getattr(beam, f.name) for beam in (self, *others)] for f in fields(self))
        return Beam(*(torch.cat(pool, 1) for pool in pools))

    def arcs(self, scores: Tensor) -> Tensor:
        """The score (B, W, W) of the label that leads from one hypothesis to another, −inf where none does.

        ``scores`` (B, W, V) are those of a label after each hypothesis.
        """
        alive = self.score > NEVER
        leads = (self.key[:, :, None] == self.before[:, None]) & alive[:, None] & alive[:, :, None]
        return _picked(scores, self.last).masked_fill(~leads, NEVER)

    def without(self, arcs: Tensor, scores: Tensor) -> Tensor:
        """``scores`` (B, W, V − 1) of labels, −inf where the label leads to a hypothesis of the beam."""
        scores = torch.cat((scores, scores[..., :1]), 2)  # a place for the blank
        last = torch.where(arcs > NEVER, self.last[:, None], scores.shape[2] - 1)
        return scores.scatter(2, last, NEVER)[..., :-1]

    def merged(self) -> Beam:
        """One hypothesis, the likeliest, of those with equal labels, with the score of their sum."""
        same = self.key[:, :, None] == self.key[:, None]
        total = self.score[:, None].masked_fill(~same, NEVER).logsumexp(2)
        order = torch.arange(self.score.shape[1], device=self.score.device)
        mine, other = self.score[:, :, None], self.score[:, None]
        is_better = (other > mine) | ((other == mine) & (order < order[:, None]))
        self.score = total.masked_fill((same & is_better).any(2), NEVER)
        return self


def extended(key: Tensor, label: Tensor) -> Tensor:
    """The keys of labels with one more, a hash of 64 bits (the multipliers of SplitMix64)."""
    key = (key ^ ((label + 1) * -0x61C8864680B583EB)) * -0x40A7B892E31B1A47
    return (key ^ (key >> 30)) * -0x6B2FB644ECCEEE15


def _picked(scores: Tensor, labels: Tensor) -> Tensor:
    """``scores`` (B, W, V) of ``labels`` (B, U): (B, W, U)."""
    return scores.gather(2, labels[:, None].expand(-1, scores.shape[1], -1))


@dataclass(frozen=True)
class Found:
    """Labels with the frames of each, from ``begins`` to before ``ends``, and its confidence."""

    labels: tuple[int, ...]
    begins: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    sure: tuple[float, ...] = ()


class Trail:
    """The labels of all hypotheses as a tree: each node has a label, a frame, a confidence and its parent."""

    def __init__(self) -> None:
        self.parents, self.values, self.sure = list[Tensor](), list[Tensor](), list[Tensor]()
        self.size = 0

    def add(self, parents: Tensor, labels: Tensor, frame: int, sure: Tensor) -> Tensor:
        """Add a node for each element of these tensors of one shape; returns their numbers."""
        self.parents.append(parents.flatten())
        self.values.append(torch.stack((labels, torch.full_like(labels, frame)), -1).flatten(0, -2))
        self.sure.append(sure.flatten())
        self.size += labels.numel()
        return torch.arange(self.size - labels.numel(), self.size, device=labels.device).view(labels.shape)

    def found(self, beam: Beam) -> list[list[Found]]:
        """The hypotheses of each row, in their order, with the frame at which each label began."""
        tensors = (self.parents, self.values, self.sure)
        parents, values, sure = (torch.cat(parts).tolist() if parts else [] for parts in tensors)
        found = list[list[Found]]()
        for nodes, scores in zip(beam.node.tolist(), beam.score.tolist(), strict=True):
            found.append([])
            for node in (node for node, score in zip(nodes, scores, strict=True) if score > NEVER):
                path = list[int]()
                at = node
                while at >= 0:
                    path.append(at)
                    at = parents[at]
                path.reverse()
                labels, begins = (tuple(values[node][way] for node in path) for way in (0, 1))
                ends = tuple(begin + 1 for begin in begins)
                found[-1].append(Found(labels, begins, ends, tuple(sure[node] for node in path)))
        return found


@dataclass(eq=False)
class BeamSearch(Decoder):
    """A search that keeps the ``width`` likeliest label sequences of each row.

    Equal sequences are one hypothesis, so a text's score is the sum over its paths. The best ``nbest``, and
    greedy's, are scored again by the model's loss, so ``score`` is exact and never below that of greedy's
    text. Of the texts at least as likely as greedy's, the first has the highest score per label, with
    ``normalise_score`` (the blank at the start counts as one, as in NeMo), else the highest score.
    """

    sums_paths = True

    width: int = 4
    nbest: int = 4
    normalise_score: bool = True
    lm: FilePath | None = None
    lm_weight: float = 0.3
    word_bonus: float = 0.0
    hotwords: list[str] | None = None
    hotword_bonus: float = 5.0

    def __post_init__(self) -> None:
        for name, size in {"width": self.width, "nbest": self.nbest}.items():
            if not 1 <= size <= _MOST_WIDTH:
                raise ValueError(f"{name} is {size}; it must be 1 to {_MOST_WIDTH}")
        model = read_ngram(self.lm) if self.lm else None
        phrases = self.hotwords or ()
        self.fusion = Fusion(model, self.lm_weight, self.word_bonus, phrases, self.hotword_bonus)

    @abstractmethod
    def search(self, scorer: Any, frames: Tensor, lengths: Tensor) -> tuple[list[list[Found]], Tensor]:
        """The ``width`` best of each row, the best first, and the scores (B, W) that the search summed."""

    def _decode(self, scorer: Any, frames: Tensor, lengths: Tensor) -> list[Hypothesis]:
        self.fusion.begin(scorer.tokenizer)
        greedy = Greedy().decode(scorer, frames, lengths)
        found, _ = self.search(scorer, frames, lengths)
        seconds = scorer.frame_seconds
        for row, one in zip(found, greedy, strict=True):
            begins, ends = (tuple(round(x / seconds) for x in times) for times in (one.times, one.ends))
            kept = [f for f in row[: self.nbest] if f.labels != one.labels]
            row[:] = [Found(one.labels, begins, ends, one.confidences), *kept]
        found = self._placed(scorer, frames, lengths, found)
        rows = [index for index, row in enumerate(found) for _ in row]
        labels = [f.labels for row in found for f in row]
        scores = iter(self._exact(scorer, frames, lengths, rows, labels))
        hypotheses = []
        for row in found:
            made = [scorer.hypothesis(f.labels, f.begins, f.ends, f.sure, next(scores)) for f in row]
            hypotheses.append(self._best_first(made))
        return hypotheses

    def _placed(
        self, scorer: Any, frames: Tensor, lengths: Tensor, found: list[list[Found]]
    ) -> list[list[Found]]:
        """``found`` with the frames of each label, where the search does not know them."""
        return found

    def _best_first(self, made: list[Hypothesis]) -> Hypothesis:
        """The best of hypotheses, of which the first is greedy's, with the others as its alternatives."""
        scored = [replace(one, merit=self._merit(one, made[0].score)) for one in made]
        best = max(scored, key=attrgetter("merit"))
        others = sorted((one for one in scored if one is not best), key=lambda one: -one.score)
        others = sorted(others[: self.nbest - 1], key=attrgetter("merit"), reverse=True)
        return replace(best, alternatives=tuple(others))

    def _merit(self, hypothesis: Hypothesis, floor: float) -> float:
        """Return what orders texts: with ``normalise_score`` the score per label, else the score.

        A text below ``floor``, the score of greedy's text, is below all others. It keeps its score, which is
        at most 0 here: scores of the others are at least ``floor``, and a division raises negative ones.
        """
        if not self.normalise_score:
            return hypothesis.score
        if hypothesis.score < floor:
            return min(hypothesis.score, 0.0)
        return hypothesis.score / (len(hypothesis.labels) + 1)

    def _exact(
        self,
        scorer: Any,
        frames: Tensor,
        lengths: Tensor,
        rows: list[int],
        labels: list[tuple[int, ...]],
    ) -> list[float]:
        """The score of each of ``labels``: the model's log-probability and what the fusion adds."""
        symbols = [len(one) for one in labels]
        padded = [[*one, *[0] * (max(symbols) - len(one))] for one in labels]
        targets = torch.tensor(padded, dtype=torch.int64).view(len(labels), max(symbols)).to(frames.device)
        counts, row = (torch.tensor(x, device=frames.device) for x in (symbols, rows))
        scores = list[float]()
        step = max(1, _AT_ONCE // max(1, frames[0].numel()))
        for begin in range(0, len(rows), step):
            part = slice(begin, begin + step)
            most = max(symbols[part])
            given = (frames[row[part]], lengths[row[part]], targets[part, :most], counts[part])
            scores += scorer.log_likelihood(*given).tolist()
        return [score + self.fusion.total(one) for score, one in zip(scores, labels, strict=True)]


@dataclass(eq=False)
class TransducerBeam(BeamSearch):
    """Modified adaptive expansion search (Kim et al., ICASSP 2021) for a whole batch at once.

    In each frame, a hypothesis ends by the blank or is extended by labels, at most ``max_symbols_per_step``.
    Only those extensions are followed that may be among the ``width`` best after this frame, and whose label
    is at least exp(−``gamma``) times as likely as the likeliest symbol there. A label that leads from one
    hypothesis of the beam to another adds its probability there.
    """

    max_symbols_per_step: int = 5
    gamma: float = 7.0

    def __post_init__(self) -> None:
        super().__post_init__()
        symbols = self.max_symbols_per_step
        if not 1 <= symbols <= _MOST_SYMBOLS:  # Each symbol of a frame costs memory.
            raise ValueError(f"max_symbols_per_step is {symbols}; it must be 1 to {_MOST_SYMBOLS}")
        if self.gamma <= 0:
            raise ValueError(f"gamma is {self.gamma}; it must be above 0")

    @torch.no_grad()
    def decode(self, scorer: Scorer, frames: Tensor, lengths: Tensor) -> list[Hypothesis]:
        if isinstance(scorer, TransducerScorer):
            if scorer.joint.durations:
                raise ConfigError(
                    "decoder=beam: joint.durations (TDT) has no beam search; set decoder=greedy"
                )
            return self._decode(scorer, frames, lengths)
        other = "; choose ctc_beam" if isinstance(scorer, CTCScorer) else ""
        raise ConfigError(f"decoder=beam searches transducers, not {type(scorer).__name__}{other}")

    def search(
        self, scorer: TransducerScorer, frames: Tensor, lengths: Tensor
    ) -> tuple[list[list[Found]], Tensor]:
        search = _TransducerSearch(self, scorer, frames, lengths)
        for frame in range(int(lengths.max())):
            search.advance(frame)
        total = search.beam.score + search.beam.extra
        place = total.sort(dim=1, descending=True, stable=True).indices[:, : self.width]
        best = search.beam.take(place)
        return search.trail.found(best), best.score


class _TransducerSearch:
    """The beam of a batch, and the state of the prediction network of each hypothesis, in rows of B · W."""

    def __init__(
        self, settings: TransducerBeam, scorer: TransducerScorer, frames: Tensor, lengths: Tensor
    ) -> None:
        self.settings, self.scorer, self.frames, self.lengths = settings, scorer, frames, lengths
        self.fusion = settings.fusion
        self.rows, self.width = len(frames), settings.width + _SPARE
        self.beam = Beam.start(self.rows, self.width, scorer.blank, frames.device)
        self.trail = Trail()
        self.prediction, self.state = scorer.start(self.rows * self.width)

    def advance(self, frame: int) -> None:
        """Take one frame into account."""
        beam, live = self.beam, (frame < self.lengths)[:, None]
        scores = self._joined(self.frames[:, frame].repeat_interleave(self.width, 0), self.prediction)
        scores = scores.view(self.rows, self.width, -1)
        arcs = self._fold(scores, live, frame)
        ended = beam.score + torch.where(live, scores[..., -1], 0.0)
        # what is less likely before its blank cannot be among the best after it
        floor = (ended + beam.extra).topk(self.width).values[:, -1:]
        labels = self._likely(beam.score[..., None] + scores[..., :-1], scores)
        reached = beam.without(arcs, labels.masked_fill(~live[..., None], NEVER))
        beam.score, source = ended, beam
        levels = list[tuple[Beam, Tensor, Tensor, Any]]()
        for left in range(self.settings.max_symbols_per_step - 1, -1, -1):
            made = self._extend(source, levels, reached, scores, floor, frame)
            if made is None:
                break
            level, alive = made
            at = alive.div(self.width, rounding_mode="floor")
            near = self._joined(self.frames[at, frame], levels[-1][2])
            source = level
            if left:
                scores = near.new_full((self.rows * self.width, near.shape[1]), NEVER)
                scores[alive] = near
                scores = scores.view(self.rows, self.width, -1)
                reached = self._likely(source.score[..., None] + scores[..., :-1], scores)
            level.score.view(-1)[alive] += near[:, -1]
        if levels:
            self._keep_best(levels)

    def _joined(self, frames: Tensor, prediction: Tensor) -> Tensor:
        """The log-probabilities (N, V) after N hypotheses at their frames (N, H)."""
        scores: Tensor = self.scorer.joint(frames, prediction).float().log_softmax(-1)
        return scores

    def _likely(self, reached: Tensor, scores: Tensor) -> Tensor:
        highest = scores.max(-1, keepdim=True).values
        return reached.masked_fill(~(scores[..., :-1] >= highest - self.settings.gamma), NEVER)

    def _fold(self, scores: Tensor, live: Tensor, frame: int) -> Tensor:
        """Add the paths of this frame from one hypothesis of the beam to another; returns their arcs."""
        beam = self.beam
        arcs = beam.arcs(scores).masked_fill(~live[..., None], NEVER)
        if not bool((arcs > NEVER).any()):
            return arcs
        own = beam.score
        for _ in range(self.settings.max_symbols_per_step):
            paths = beam.score[..., None] + arcs
            beam.score = torch.logaddexp(own, paths.logsumexp(1))
        highest, parent = paths.max(1)
        later = highest > own  # the label is rather here than where it was before
        sure = _picked(scores - scores[..., :-1].logsumexp(-1, keepdim=True), beam.last)
        sure = sure.gather(1, parent[:, None])[:, 0].exp().clamp(max=1.0)
        node = self.trail.add(beam.node.gather(1, parent), beam.last, frame, sure)
        beam.node = torch.where(later, node, beam.node)
        return arcs

    def _extend(
        self,
        source: Beam,
        levels: list[tuple[Beam, Tensor, Tensor, Any]],
        reached: Tensor,
        scores: Tensor,
        floor: Tensor,
        frame: int,
    ) -> tuple[Beam, Tensor] | None:
        """The best extensions of ``source``, and which of them (N,) are alive; None if none is.

        Appends them to ``levels``, with the row of each in the predictions and states (N, ·) that follow.
        """
        labels = reached.shape[2]
        bonus = self.fusion.next(source.extra, source.state)
        total, place = (reached + bonus).flatten(1).topk(self.width)
        score = reached.flatten(1).gather(1, place).masked_fill(total <= floor, NEVER)
        alive = (score > NEVER).flatten().nonzero()[:, 0]
        if not len(alive):
            return None
        parent, label = place.div(labels, rounding_mode="floor"), place % labels
        old = source.take(parent)
        wide = scores.gather(1, parent[..., None].expand(-1, -1, scores.shape[2]))[..., :-1]
        sure = (wide.gather(2, label[..., None])[..., 0] - wide.logsumexp(2)).exp().clamp(max=1.0)
        node = self.trail.add(old.node, label, frame, sure)
        extra = bonus.expand_as(reached).flatten(1).gather(1, place)
        state = self.fusion.advance(old.state, label, score > NEVER)
        level = Beam(score, extended(old.key, label), old.key, label, node, extra, state)
        base = torch.arange(self.rows, device=place.device)[:, None] * self.width
        origin, known = (base + parent).flatten()[alive], self.state
        if levels:
            origin, known = levels[-1][1][origin], levels[-1][3]
        known = self.scorer.prediction.take(origin, known)
        prediction, known = self.scorer.step(label.flatten()[alive], known)
        row = torch.zeros(self.rows * self.width, dtype=torch.int64, device=place.device)
        row[alive] = torch.arange(len(alive), device=place.device)
        levels.append((level, row, prediction, known))
        return level, alive

    def _keep_best(self, levels: list[tuple[Beam, Tensor, Tensor, Any]]) -> None:
        """Replace the beam by the best of itself and of its extensions, with their states."""
        pool = self.beam.joined([level for level, *_ in levels]).merged()
        place = (pool.score + pool.extra).topk(self.width).indices
        self.beam = pool.take(place)
        level, slot = place.div(self.width, rounding_mode="floor").flatten(), place % self.width
        base = torch.arange(self.rows, device=place.device)[:, None] * self.width
        rows = (base + slot).flatten()
        network = self.scorer.prediction
        prediction, state = self.prediction[rows], network.take(rows, self.state)
        for number, (_, row, new, new_state) in enumerate(levels, 1):
            is_new = level == number
            prediction = torch.where(is_new[:, None], new[row[rows]], prediction)
            state = network.select(is_new, network.take(row[rows], new_state), state)
        self.prediction, self.state = prediction, state
