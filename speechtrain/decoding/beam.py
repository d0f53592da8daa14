"""Beam search for transducers, and the parts that it shares with CTC's beam search.

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
from torch.nn.utils.rnn import pad_sequence

from speechtrain.decoding.base import CTCScorer, Decoder, Hypothesis, Scorer, TransducerScorer
from speechtrain.decoding.fusion import Fusion
from speechtrain.decoding.greedy import Greedy
from speechtrain.errors import ConfigError
from speechtrain.files import FilePath
from speechtrain.text.ngram import read_ngram

NEVER = -torch.inf
_SPARE = 2  # hypotheses beyond ``width`` that a transducer's search follows (NeMo's expansion_beta)
_LARGEST_FRAME_LIMIT = 100  # labels
_LARGEST_WIDTH = 1000
_SCORED_VALUES = 2**24  # values of the repeated frames in memory while texts are scored


@dataclass
class Beam:
    """The hypotheses of each row. Each tensor is (B, W). An empty slot has the score −inf."""

    score: Tensor  # log-probability of the paths found so far
    key: Tensor  # a hash of the labels: equal keys are equal labels
    parent_key: Tensor  # the key without the last label
    label: Tensor  # the last label, or the blank if the hypothesis is empty
    node: Tensor  # the last label's node of the trail
    fusion_score: Tensor  # the score that the fusion adds
    fusion_state: Tensor

    @classmethod
    def start(cls, rows: int, width: int, blank: int, device: torch.device) -> Beam:
        zeros = torch.zeros(rows, width, dtype=torch.int64, device=device)
        score = torch.full((rows, width), NEVER, device=device)
        score[:, 0] = 0.0
        return cls(score, zeros + 1, zeros, zeros + blank, zeros - 1, torch.zeros_like(score), zeros)

    def take(self, slots: Tensor) -> Beam:
        return Beam(*(getattr(self, field.name).gather(1, slots) for field in fields(self)))

    def join(self, beams: Sequence[Beam]) -> Beam:
        """Return the hypotheses of this beam and of other ``beams`` as one beam."""
        columns = []
        for field in fields(self):
            columns.append(torch.cat([getattr(beam, field.name) for beam in (self, *beams)], 1))
        return Beam(*columns)

    def arcs(self, scores: Tensor) -> Tensor:
        """Return the score (B, W, W) of the label that leads from one hypothesis to another.

        The score is −inf if no label leads there. ``scores`` (B, W, V) has the score of each label after
        each hypothesis.
        """
        is_alive = self.score > NEVER
        is_child = self.key[:, :, None] == self.parent_key[:, None]
        is_arc = is_child & is_alive[:, None] & is_alive[:, :, None]
        return _select_labels(scores, self.label).masked_fill(~is_arc, NEVER)

    def without(self, arcs: Tensor, scores: Tensor) -> Tensor:
        """Return ``scores`` (B, W, V − 1), with −inf for labels that lead to a hypothesis of the beam."""
        scores = torch.cat((scores, scores[..., :1]), 2)  # The last column is for slots without an arc.
        label = torch.where(arcs > NEVER, self.label[:, None], scores.shape[2] - 1)
        return scores.scatter(2, label, NEVER)[..., :-1]

    def merge(self) -> Beam:
        """Add the scores of hypotheses with equal labels. Only the likeliest of them remains."""
        is_equal = self.key[:, :, None] == self.key[:, None]
        total = self.score[:, None].masked_fill(~is_equal, NEVER).logsumexp(2)
        order = torch.arange(self.score.shape[1], device=self.score.device)
        score, rival = self.score[:, :, None], self.score[:, None]
        is_better = (rival > score) | ((rival == score) & (order < order[:, None]))
        self.score = total.masked_fill((is_equal & is_better).any(2), NEVER)
        return self


def extended_key(key: Tensor, label: Tensor) -> Tensor:
    """Return the keys of hypotheses with one more label: 64-bit hashes (SplitMix64's multipliers)."""
    key = (key ^ ((label + 1) * -0x61C8864680B583EB)) * -0x40A7B892E31B1A47
    return (key ^ (key >> 30)) * -0x6B2FB644ECCEEE15


def _select_labels(scores: Tensor, labels: Tensor) -> Tensor:
    """Select the ``scores`` (B, W, V) of ``labels`` (B, U): (B, W, U)."""
    return scores.gather(2, labels[:, None].expand(-1, scores.shape[1], -1))


@dataclass(frozen=True)
class TimedLabels:
    """Labels of a row with their confidences. They last from the frames ``begins`` to before ``ends``."""

    row: int
    labels: tuple[int, ...]
    begins: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()


class Trail:
    """The labels of all hypotheses as a tree. A node has a label, a frame, a confidence and a parent."""

    def __init__(self) -> None:
        self.parents, self.labels, self.confidences = list[Tensor](), list[Tensor](), list[Tensor]()
        self.frames = list[int]()

    def add(self, parents: Tensor, labels: Tensor, frame: int, confidences: Tensor) -> Tensor:
        """Add a node for each element of these tensors of one shape. Returns the numbers of the nodes."""
        self.parents.append(parents.flatten())
        self.labels.append(labels.flatten())
        self.confidences.append(confidences.flatten())
        first = len(self.frames)
        self.frames += [frame] * labels.numel()
        return torch.arange(first, len(self.frames), device=labels.device).view(labels.shape)

    def hypotheses(self, beam: Beam) -> list[list[TimedLabels]]:
        """Return the hypotheses of each row in the order of the beam. Each label lasts one frame."""
        parents, labels = _numbers(self.parents), _numbers(self.labels)
        confidences = _numbers(self.confidences)
        all_nodes, all_scores = beam.node.tolist(), beam.score.tolist()
        rows = []
        for row, nodes in enumerate(all_nodes):
            texts = []
            for node, score in zip(nodes, all_scores[row], strict=True):
                if score > NEVER:
                    path = _path(parents, node)
                    begins = [self.frames[node] for node in path]
                    text = TimedLabels(
                        row,
                        labels=tuple(labels[node] for node in path),
                        begins=tuple(begins),
                        ends=tuple(begin + 1 for begin in begins),
                        confidences=tuple(confidences[node] for node in path),
                    )
                    texts.append(text)
            rows.append(texts)
        return rows


def _numbers(parts: list[Tensor]) -> list[Any]:
    return torch.cat(parts).tolist() if parts else []


def _path(parents: Sequence[int], node: int) -> list[int]:
    """Return the nodes from the root to ``node``."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


@dataclass(eq=False)
class BeamSearch(Decoder):
    """A search that keeps the ``width`` likeliest label sequences of each row.

    Equal sequences are one hypothesis, so the score of a text is the sum over its paths. The model's loss
    scores the best ``nbest`` texts and greedy's text again, so ``score`` is exact and at least the score of
    greedy's text. With ``normalise_score``, the first text has the highest score per label of the texts that
    are at least as likely as greedy's. The blank at the start counts as a label, as in NeMo. Without
    ``normalise_score``, the first text has the highest score.
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
            if not 1 <= size <= _LARGEST_WIDTH:
                raise ValueError(f"{name} is {size}: it must be 1 to {_LARGEST_WIDTH}")
        model = read_ngram(self.lm) if self.lm else None
        phrases = self.hotwords or ()
        self.fusion = Fusion(model, self.lm_weight, self.word_bonus, phrases, self.hotword_bonus)

    @abstractmethod
    def search(self, scorer: Any, frames: Tensor, lengths: Tensor) -> tuple[list[list[TimedLabels]], Tensor]:
        """Return the ``width`` best hypotheses of each row, the best first, and their scores (B, W).

        The order depends on the fusion scores. The returned scores come from the model alone.
        """

    def _decode(self, scorer: Any, frames: Tensor, lengths: Tensor) -> list[Hypothesis]:
        self.fusion.begin(scorer.tokenizer)
        texts = self._align(scorer, frames, lengths, self._texts(scorer, frames, lengths))
        scores = _log_likelihoods(scorer, frames, lengths, texts)
        candidates = [list[Hypothesis]() for _ in frames]
        for text, score in zip(texts, scores, strict=True):
            score += self.fusion.total(text.labels)
            spans = (text.begins, text.ends, text.confidences)
            candidates[text.row].append(scorer.hypothesis(text.labels, *spans, score))
        return [self._best_first(hypotheses) for hypotheses in candidates]

    def _texts(self, scorer: Any, frames: Tensor, lengths: Tensor) -> list[TimedLabels]:
        """Return for each row greedy's text and the ``nbest`` of the search, without greedy's text."""
        greedy = Greedy().decode(scorer, frames, lengths)
        beams, _ = self.search(scorer, frames, lengths)
        texts = []
        for row, (hypothesis, beam) in enumerate(zip(greedy, beams, strict=True)):
            texts.append(_timed_labels(row, hypothesis, scorer.frame_seconds))
            texts += [text for text in beam[: self.nbest] if text.labels != hypothesis.labels]
        return texts

    def _align(
        self, scorer: Any, frames: Tensor, lengths: Tensor, texts: list[TimedLabels]
    ) -> list[TimedLabels]:
        """Return ``texts`` with the frames of their labels, for a search that does not know the frames."""
        return texts

    def _best_first(self, candidates: list[Hypothesis]) -> Hypothesis:
        """Return the best hypothesis with the others as its alternatives. The first candidate is greedy's."""
        floor = candidates[0].score
        texts = [replace(candidate, merit=self._merit(candidate, floor)) for candidate in candidates]
        best = max(texts, key=attrgetter("merit"))
        texts.remove(best)
        texts.sort(key=lambda text: -text.score)
        alternatives = sorted(texts[: self.nbest - 1], key=attrgetter("merit"), reverse=True)
        return replace(best, alternatives=tuple(alternatives))

    def _merit(self, hypothesis: Hypothesis, floor: float) -> float:
        """Return the number that orders texts: the score per label with ``normalise_score``, else the score.

        With ``normalise_score``, a text below ``floor``, the score of greedy's text, comes after all others.
        Its merit is its score, which is at most 0 here. The scores of the others are at least ``floor``, and
        the division raises negative ones.
        """
        if not self.normalise_score:
            return hypothesis.score
        if hypothesis.score < floor:
            return min(hypothesis.score, 0.0)
        return hypothesis.score / (len(hypothesis.labels) + 1)


def _timed_labels(row: int, hypothesis: Hypothesis, frame_seconds: float) -> TimedLabels:
    begins = [round(seconds / frame_seconds) for seconds in hypothesis.times]
    ends = [round(seconds / frame_seconds) for seconds in hypothesis.ends]
    return TimedLabels(row, hypothesis.labels, tuple(begins), tuple(ends), hypothesis.confidences)


def _log_likelihoods(scorer: Any, frames: Tensor, lengths: Tensor, texts: list[TimedLabels]) -> list[float]:
    """Return the model's log-probability of each text."""
    scores = list[float]()
    row_values = frames[0].numel()
    size = max(1, _SCORED_VALUES // max(1, row_values))
    for begin in range(0, len(texts), size):
        part = texts[begin : begin + size]
        rows = torch.tensor([text.row for text in part], device=frames.device)
        symbols = torch.tensor([len(text.labels) for text in part], device=frames.device)
        labels = pad_sequence([torch.tensor(text.labels, dtype=torch.int64) for text in part], True)
        labels = labels.to(frames.device)
        scores += scorer.log_likelihood(frames[rows], lengths[rows], labels, symbols).tolist()
    return scores


@dataclass(eq=False)
class TransducerBeam(BeamSearch):
    """Modified adaptive expansion search (Kim et al., ICASSP 2021) for a whole batch at once.

    In each frame, a hypothesis ends by the blank or is extended by at most ``max_symbols_per_step`` labels.
    The search follows an extension only under two conditions:

    - It may be among the ``width`` best after this frame.
    - Its label is at least exp(−``gamma``) times as likely as the likeliest symbol in this frame.

    If a label leads from one hypothesis of the beam to another, its probability is added to the other.
    """

    max_symbols_per_step: int = 5
    gamma: float = 7.0

    def __post_init__(self) -> None:
        super().__post_init__()
        symbols = self.max_symbols_per_step
        if not 1 <= symbols <= _LARGEST_FRAME_LIMIT:  # Each symbol of a frame costs memory.
            raise ValueError(f"max_symbols_per_step is {symbols}: it must be 1 to {_LARGEST_FRAME_LIMIT}")
        if self.gamma <= 0:
            raise ValueError(f"gamma is {self.gamma}: it must be above 0")

    @torch.no_grad()
    def decode(self, scorer: Scorer, frames: Tensor, lengths: Tensor) -> list[Hypothesis]:
        if isinstance(scorer, TransducerScorer):
            if scorer.joint.durations:
                raise ConfigError(
                    "decoder=beam: joint.durations (TDT) has no beam search. Set decoder=greedy"
                )
            return self._decode(scorer, frames, lengths)
        advice = ""
        if isinstance(scorer, CTCScorer):
            advice = ". Choose ctc_beam"
        raise ConfigError(f"decoder=beam searches transducers, not {type(scorer).__name__}{advice}")

    def search(
        self, scorer: TransducerScorer, frames: Tensor, lengths: Tensor
    ) -> tuple[list[list[TimedLabels]], Tensor]:
        search = _TransducerSearch(self, scorer, frames, lengths)
        for frame in range(int(lengths.max())):
            search.advance(frame)
        beam = search.level.beam
        total = beam.score + beam.fusion_score
        slots = total.sort(dim=1, descending=True, stable=True).indices[:, : self.width]
        best = beam.take(slots)
        return search.trail.hypotheses(best), best.score


@dataclass
class _Level:
    """Hypotheses with equal numbers of labels in the present frame, and the prediction network after each.

    The network runs only for the N hypotheses that are alive.
    """

    beam: Beam
    alive: Tensor  # (N,) the slots of B · W
    network_rows: Tensor  # (B · W,) the row of each hypothesis in the tensors of N rows
    prediction: Tensor  # (N, H)
    state: Any  # of N rows


class _TransducerSearch:
    """The beam of a batch, and its extensions in one frame."""

    def __init__(
        self, settings: TransducerBeam, scorer: TransducerScorer, frames: Tensor, lengths: Tensor
    ) -> None:
        self.settings, self.scorer, self.frames, self.lengths = settings, scorer, frames, lengths
        self.fusion, self.network = settings.fusion, scorer.prediction
        self.rows, self.width = len(frames), settings.width + _SPARE
        slots = torch.arange(self.rows * self.width, device=frames.device)
        self.row_starts = slots.view(self.rows, self.width)[:, :1]
        self.trail = Trail()
        beam = Beam.start(self.rows, self.width, scorer.blank, frames.device)
        self.level = _Level(beam, slots, slots, *scorer.start(len(slots)))

    def advance(self, frame: int) -> None:
        """Extend the hypotheses by the symbols of one frame."""
        beam = self.level.beam
        is_live = (frame < self.lengths)[:, None]
        encoded = self.frames[:, frame].repeat_interleave(self.width, 0)
        scores = self._log_probabilities(encoded, self.level.prediction).view(self.rows, self.width, -1)
        arcs = self._add_arcs(scores, is_live, frame)
        paths = self._path_scores(beam, scores).masked_fill(~is_live[..., None], NEVER)
        paths = beam.without(arcs, paths)
        beam.score = beam.score + torch.where(is_live, scores[..., -1], 0.0)
        # An extension that is less likely before its blank cannot be among the best after it.
        floor = (beam.score + beam.fusion_score).topk(self.width).values[:, -1:]
        levels = self._extensions(paths, scores, floor, frame)
        if len(levels) > 1:
            self.level = self._best(levels)

    def _extensions(self, paths: Tensor, scores: Tensor, floor: Tensor, frame: int) -> list[_Level]:
        """Return the present level and a level for each label more, all with the blank of this frame.

        ``paths`` (B, W, V − 1) are the scores of the present hypotheses with one more label. ``scores``
        (B, W, V) are the scores of the symbols after these hypotheses.
        """
        levels = [self.level]
        for labels_left in reversed(range(self.settings.max_symbols_per_step)):
            level = self._extend(levels[-1], paths, scores, floor, frame)
            if level is None:
                break
            levels.append(level)
            rows = level.alive.div(self.width, rounding_mode="floor")
            alive_scores = self._log_probabilities(self.frames[rows, frame], level.prediction)
            if labels_left:
                scores = torch.full_like(scores, NEVER)
                scores.view(-1, scores.shape[2])[level.alive] = alive_scores
                paths = self._path_scores(level.beam, scores)
            level.beam.score.view(-1)[level.alive] += alive_scores[:, -1]
        return levels

    def _log_probabilities(self, encoded: Tensor, prediction: Tensor) -> Tensor:
        """Return the log-probabilities (N, V) of the symbols after N predictions in N frames (N, H)."""
        scores: Tensor = self.scorer.joint(encoded, prediction).float().log_softmax(-1)
        return scores

    def _path_scores(self, beam: Beam, scores: Tensor) -> Tensor:
        """Return the scores (B, W, V − 1) of hypotheses with one more label, −inf for an unlikely label."""
        highest = scores.max(-1, keepdim=True).values
        labels = scores[..., :-1]
        is_likely = labels >= highest - self.settings.gamma
        return (beam.score[..., None] + labels).masked_fill(~is_likely, NEVER)

    def _add_arcs(self, scores: Tensor, is_live: Tensor, frame: int) -> Tensor:
        """Add the paths of this frame from one hypothesis of the beam to another. Returns their arcs."""
        beam = self.level.beam
        arcs = beam.arcs(scores).masked_fill(~is_live[..., None], NEVER)
        if not bool((arcs > NEVER).any()):
            return arcs
        old_score = beam.score
        for _ in range(self.settings.max_symbols_per_step):
            paths = beam.score[..., None] + arcs
            beam.score = torch.logaddexp(old_score, paths.logsumexp(1))
        highest, parent = paths.max(1)
        is_likelier = highest > old_score  # The label is likelier here than in its earlier frame.
        confidences = _confidences(scores, parent, beam.label)
        node = self.trail.add(beam.node.gather(1, parent), beam.label, frame, confidences)
        beam.node = torch.where(is_likelier, node, beam.node)
        return arcs

    def _extend(
        self, source: _Level, paths: Tensor, scores: Tensor, floor: Tensor, frame: int
    ) -> _Level | None:
        """Return the best extensions of ``source`` by a label, or None if all are below ``floor`` (B, 1)."""
        choice, score, fusion_score = self._choose(source.beam, paths, floor)
        is_alive = score > NEVER
        alive = is_alive.flatten().nonzero()[:, 0]
        if not len(alive):
            return None
        parent, label = choice.div(paths.shape[2], rounding_mode="floor"), choice % paths.shape[2]
        parents = source.beam.take(parent)
        confidences = _confidences(scores, parent, label)
        beam = Beam(
            score=score,
            key=extended_key(parents.key, label),
            parent_key=parents.key,
            label=label,
            node=self.trail.add(parents.node, label, frame, confidences),
            fusion_score=fusion_score,
            fusion_state=self.fusion.advance(parents.fusion_state, label, is_alive),
        )
        return self._predict(source, beam, parent, alive)

    def _choose(self, beam: Beam, paths: Tensor, floor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the W best of ``paths``: their numbers, their scores and their fusion scores (B, W)."""
        fusion_scores = self.fusion.label_scores(beam.fusion_score, beam.fusion_state)
        totals, choice = (paths + fusion_scores).flatten(1).topk(self.width)
        score = paths.flatten(1).gather(1, choice).masked_fill(totals <= floor, NEVER)
        return choice, score, fusion_scores.expand_as(paths).flatten(1).gather(1, choice)

    def _predict(self, source: _Level, beam: Beam, parent: Tensor, alive: Tensor) -> _Level:
        """Run the prediction network after the ``alive`` hypotheses of ``beam``, from ``parent`` (B, W)."""
        slots = (self.row_starts + parent).flatten()[alive]
        state = self.network.take(source.network_rows[slots], source.state)
        prediction, state = self.scorer.step(beam.label.flatten()[alive], state)
        rows = torch.zeros_like(self.level.network_rows)
        rows[alive] = torch.arange(len(alive), device=alive.device)
        return _Level(beam, alive, rows, prediction, state)

    def _best(self, levels: Sequence[_Level]) -> _Level:
        """Return the best hypotheses of all levels, with their predictions and states."""
        present, *extensions = levels
        pool = present.beam.join([level.beam for level in extensions]).merge()
        choice = (pool.score + pool.fusion_score).topk(self.width).indices
        numbers = choice.div(self.width, rounding_mode="floor").flatten()
        slots = (self.row_starts + choice % self.width).flatten()
        prediction, state = present.prediction[slots], self.network.take(slots, present.state)
        for number, level in enumerate(extensions, 1):
            is_here = numbers == number
            rows = level.network_rows[slots]
            prediction = torch.where(is_here[:, None], level.prediction[rows], prediction)
            state = self.network.select(is_here, self.network.take(rows, level.state), state)
        return _Level(pool.take(choice), present.alive, present.network_rows, prediction, state)


def _confidences(scores: Tensor, parents: Tensor, labels: Tensor) -> Tensor:
    """Return the probability (B, U) of each of ``labels`` (B, U) after its parent, without the blank."""
    label_scores = scores.flatten(1).gather(1, parents * scores.shape[2] + labels)
    totals = scores[..., :-1].logsumexp(2).gather(1, parents)
    return (label_scores - totals).exp().clamp(max=1.0)
