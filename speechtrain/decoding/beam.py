"""Beam search for transducers, and the parts that it shares with CTC's beam search.

Legend: B rows, W hypotheses of a row, T frames, V classes with the blank last, H joint width. All scores are
natural log-probabilities. A slot is the index of a hypothesis in its row, from 0 to W − 1.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from speechtrain.decoding.base import (
    SHORTEST_ENDPOINT,
    CTCScorer,
    Decoder,
    Hypothesis,
    Scorer,
    SearchStream,
    TransducerScorer,
)
from speechtrain.decoding.fusion import Fusion
from speechtrain.decoding.greedy import Greedy
from speechtrain.errors import ConfigError, require_least
from speechtrain.files import FilePath
from speechtrain.text.ngram import read_ngram
from speechtrain.text.vocabulary import Tokenizer

IMPOSSIBLE = -torch.inf  # the score of a path that cannot occur
_SPARE = 2  # A transducer's beam is wider than ``width`` by this number (NeMo's expansion_beta).
_LARGEST_FRAME_LIMIT = 100  # labels of one frame
_LARGEST_WIDTH = 1000
# Scoring a text needs a copy of its row's frames. This many values (64 MB) are copied at a time.
_SCORED_VALUES = 2**24


@dataclass
class Beam:
    """The hypotheses of each row. Each tensor is (B, W). An empty slot has the score −inf."""

    score: Tensor  # the sum over the paths that the search has followed
    key: Tensor  # a hash of all labels: hypotheses with equal keys have equal labels
    parent_key: Tensor  # the hash of all labels except the last one
    label: Tensor  # the last label, or the blank if the hypothesis has no label
    node: Tensor  # the node of the last label in the ``LabelTree``, or −1 if the hypothesis has no label
    fusion_score: Tensor  # the score that the fusion adds
    fusion_state: Tensor  # the index of the hypothesis's ``TextState`` in the fusion

    @classmethod
    def start(cls, rows: int, width: int, blank: int, device: torch.device) -> Beam:
        """Return the beam before the first frame. Each row has one hypothesis, the empty text."""
        zeros = torch.zeros(rows, width, dtype=torch.int64, device=device)
        score = torch.full((rows, width), IMPOSSIBLE, device=device)
        score[:, 0] = 0.0
        return cls(
            score=score,
            key=zeros + 1,
            parent_key=zeros,
            label=zeros + blank,
            node=zeros - 1,
            fusion_score=torch.zeros_like(score),
            fusion_state=zeros,
        )

    def take(self, slots: Tensor) -> Beam:
        """Return the hypotheses in ``slots`` (B, ·)."""
        return Beam(*(getattr(self, field.name).gather(1, slots) for field in fields(self)))

    def concatenate(self, beams: Sequence[Beam]) -> Beam:
        """Return the hypotheses of this beam and of other ``beams`` as one beam."""
        columns = []
        for field in fields(self):
            columns.append(torch.cat([getattr(beam, field.name) for beam in (self, *beams)], 1))
        return Beam(*columns)

    def arcs(self, scores: Tensor) -> Tensor:
        """Return the score (B, parent W, child W) of the label that leads from one hypothesis to another.

        A child has the labels of its parent and one more. Other pairs have −inf. ``scores`` (B, W, V) has
        the score of each label after each hypothesis.
        """
        is_alive = self.score > IMPOSSIBLE
        is_child = self.key[:, :, None] == self.parent_key[:, None]
        is_arc = is_child & is_alive[:, None] & is_alive[:, :, None]
        child_labels = self.label[:, None].expand_as(is_arc)
        return scores.gather(2, child_labels).masked_fill(~is_arc, IMPOSSIBLE)

    def without(self, arcs: Tensor, scores: Tensor) -> Tensor:
        """Return ``scores`` (B, W, V − 1), with −inf for labels that lead to a hypothesis of the beam.

        ``arcs`` (B, W, W) is the result of the method ``arcs``.
        """
        # Pairs without an arc write to an added column, which is then dropped.
        padded = torch.cat((scores, scores[..., :1]), 2)
        label = torch.where(arcs > IMPOSSIBLE, self.label[:, None], padded.shape[2] - 1)
        return padded.scatter(2, label, IMPOSSIBLE)[..., :-1]

    def merge(self) -> Beam:
        """Merge hypotheses with equal labels. The likeliest of them gets the sum, the others get −inf."""
        is_equal = self.key[:, :, None] == self.key[:, None]
        total = self.score[:, None].masked_fill(~is_equal, IMPOSSIBLE).logsumexp(2)
        slot = torch.arange(self.score.shape[1], device=self.score.device)
        score, rival_score = self.score[:, :, None], self.score[:, None]
        is_tie = (rival_score == score) & (slot < slot[:, None])  # The lower slot wins.
        is_rival_better = (rival_score > score) | is_tie
        self.score = total.masked_fill((is_equal & is_rival_better).any(2), IMPOSSIBLE)
        return self


def extended_key(key: Tensor, label: Tensor) -> Tensor:
    """Return the keys of hypotheses with one more label: 64-bit hashes (SplitMix64's multipliers)."""
    key = (key ^ ((label + 1) * -0x61C8864680B583EB)) * -0x40A7B892E31B1A47
    return (key ^ (key >> 30)) * -0x6B2FB644ECCEEE15


@dataclass(frozen=True)
class TimedLabels:
    """The labels of a hypothesis with their frames and confidences."""

    row: int  # the row of the batch
    labels: tuple[int, ...]  # the ids
    begins: tuple[int, ...] = ()  # the first frame of each label
    ends: tuple[int, ...] = ()  # the frame after the last frame of each label
    confidences: tuple[float, ...] = ()


class LabelTree:
    """The labels of all hypotheses as a tree, so that hypotheses share the nodes of their common beginning.

    A node has a label, the frame of the label, a confidence and a parent node. It is the index of its label
    among all labels in the order of ``add``. The parent of a first label is −1.
    """

    def __init__(self) -> None:
        self.parents, self.labels, self.confidences = list[Tensor](), list[Tensor](), list[Tensor]()
        self.frames = list[int]()

    def add(self, parents: Tensor, labels: Tensor, frame: int, confidences: Tensor) -> Tensor:
        """Add a node for each element of these tensors of one shape. Return the new nodes in that shape."""
        self.parents.append(parents.flatten())
        self.labels.append(labels.flatten())
        self.confidences.append(confidences.flatten())
        first_node = len(self.frames)
        self.frames += [frame] * labels.numel()
        return torch.arange(first_node, len(self.frames), device=labels.device).view(labels.shape)

    def hypotheses(self, beam: Beam) -> list[list[TimedLabels]]:
        """Return the hypotheses of each row, in the order of their slots and without empty slots.

        Each label lasts one frame.
        """
        parents, labels = _concatenated(self.parents), _concatenated(self.labels)
        confidences = _concatenated(self.confidences)
        scores = beam.score.tolist()
        rows = []
        for row, last_nodes in enumerate(beam.node.tolist()):
            texts = []
            for last_node, score in zip(last_nodes, scores[row], strict=True):
                if score > IMPOSSIBLE:
                    nodes = _nodes_to(last_node, parents)
                    begins = [self.frames[node] for node in nodes]
                    text = TimedLabels(
                        row,
                        labels=tuple(labels[node] for node in nodes),
                        begins=tuple(begins),
                        ends=tuple(begin + 1 for begin in begins),
                        confidences=tuple(confidences[node] for node in nodes),
                    )
                    texts.append(text)
            rows.append(texts)
        return rows


def _concatenated(parts: list[Tensor]) -> list[Any]:
    return torch.cat(parts).tolist() if parts else []


def _nodes_to(node: int, parents: Sequence[int]) -> list[int]:
    """Return the nodes from the root to ``node``."""
    nodes = []
    while node >= 0:
        nodes.append(node)
        node = parents[node]
    return nodes[::-1]


@dataclass(eq=False)
class BeamSearch(Decoder):
    """A search that keeps the ``width`` likeliest label sequences of each row.

    Equal sequences are one hypothesis, so the score of a text is the sum over its paths. The search follows
    only some paths. So the model's loss scores the best ``nbest`` texts and the text of greedy search again,
    over all paths.

    Without ``normalise_score``, the text with the highest score is the best. With ``normalise_score``, the
    best text has the highest score per label among the texts that are at least as likely as greedy's. The
    number of labels is counted with the blank at the start, as in NeMo.
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

    def check(self, tokenizer: Tokenizer) -> None:
        self.fusion.start_search(tokenizer)

    @abstractmethod
    def search(self, scorer: Any, frames: Tensor, lengths: Tensor) -> tuple[list[list[TimedLabels]], Tensor]:
        """Return the ``width`` best hypotheses of each row, the best first, and their scores (B, W).

        The order depends on the fusion scores. The returned scores come from the model alone.
        """

    def _decode(self, scorer: Any, frames: Tensor, lengths: Tensor) -> list[Hypothesis]:
        """Return the best hypothesis of each row, with scores that are exact."""
        self.fusion.start_search(scorer.tokenizer)
        greedy_hypotheses = Greedy().decode(scorer, frames, lengths)
        row_texts, _ = self.search(scorer, frames, lengths)
        texts = self.candidates(scorer, greedy_hypotheses, row_texts)
        texts = self._align(scorer, frames, lengths, texts)
        scores = _log_likelihoods(scorer, frames, lengths, texts)
        return self.best_hypotheses(scorer, texts, scores, len(frames))

    def candidates(
        self, scorer: Scorer, greedy_hypotheses: list[Hypothesis], row_texts: list[list[TimedLabels]]
    ) -> list[TimedLabels]:
        """Return for each row greedy's text, then the ``nbest`` texts of the search that differ from it."""
        frame_seconds = scorer.frame_seconds
        texts = []
        for row, greedy in enumerate(greedy_hypotheses):
            begins = [round(seconds / frame_seconds) for seconds in greedy.times]
            ends = [round(seconds / frame_seconds) for seconds in greedy.ends]
            texts.append(TimedLabels(row, greedy.labels, tuple(begins), tuple(ends), greedy.confidences))
            best_texts = row_texts[row][: self.nbest]
            texts += [text for text in best_texts if text.labels != greedy.labels]
        return texts

    def best_hypotheses(
        self, scorer: Scorer, texts: list[TimedLabels], scores: list[float], rows: int
    ) -> list[Hypothesis]:
        """Return the best hypothesis of each row among ``texts``, whose scores lack the fusion scores."""
        row_hypotheses = [list[Hypothesis]() for _ in range(rows)]
        for text, score in zip(texts, scores, strict=True):
            score += self.fusion.text_score(text.labels)
            spans = (text.begins, text.ends, text.confidences)
            row_hypotheses[text.row].append(scorer.hypothesis(text.labels, *spans, score))
        return [self._best_first(hypotheses) for hypotheses in row_hypotheses]

    def _align(
        self, scorer: Any, frames: Tensor, lengths: Tensor, texts: list[TimedLabels]
    ) -> list[TimedLabels]:
        """Return ``texts`` with the right frames and confidences of their labels.

        A search that does not know the likeliest path of a text overrides this method.
        """
        return texts

    def _best_first(self, hypotheses: list[Hypothesis]) -> Hypothesis:
        """Return the hypothesis of a row with the highest merit, with the others as its alternatives.

        The first of ``hypotheses`` is greedy's. The alternatives are the ``nbest`` − 1 likeliest of the
        others, in the order of their merit.
        """
        greedy_score = hypotheses[0].score
        texts = [replace(text, merit=self._merit(text, greedy_score)) for text in hypotheses]
        best = max(texts, key=attrgetter("merit"))
        texts.remove(best)
        texts.sort(key=lambda text: -text.score)
        alternatives = sorted(texts[: self.nbest - 1], key=attrgetter("merit"), reverse=True)
        return replace(best, alternatives=tuple(alternatives))

    def _merit(self, hypothesis: Hypothesis, greedy_score: float) -> float:
        """Return the number that orders texts: the score per label with ``normalise_score``, else the score.

        With ``normalise_score``, a text that is less likely than greedy's comes after all others. So its
        merit is its score, or 0 for a positive score. The merit of each of the others is higher: their scores
        are at least ``greedy_score``, and the division by the number of labels raises negative scores.
        """
        if not self.normalise_score:
            return hypothesis.score
        if hypothesis.score < greedy_score:
            return min(hypothesis.score, 0.0)
        return hypothesis.score / (len(hypothesis.labels) + 1)


def _log_likelihoods(scorer: Any, frames: Tensor, lengths: Tensor, texts: list[TimedLabels]) -> list[float]:
    """Return the model's log-probability of each text, over all its paths."""
    scores = list[float]()
    row_values = frames[0].numel()
    texts_at_once = max(1, _SCORED_VALUES // max(1, row_values))
    for begin in range(0, len(texts), texts_at_once):
        part = texts[begin : begin + texts_at_once]
        rows = torch.tensor([text.row for text in part], device=frames.device)
        label_counts = torch.tensor([len(text.labels) for text in part], device=frames.device)
        text_labels = [torch.tensor(text.labels, dtype=torch.int64) for text in part]
        labels = pad_sequence(text_labels, batch_first=True).to(frames.device)
        scores += scorer.log_likelihood(frames[rows], lengths[rows], labels, label_counts).tolist()
    return scores


@dataclass(eq=False)
class TransducerBeam(BeamSearch):
    """Modified adaptive expansion search (Kim et al., ICASSP 2021) for a whole batch at once.

    In each frame, a hypothesis emits 0 to ``max_symbols_per_step`` labels, and then the blank, which leads to
    the next frame. The search follows a further label only under two conditions:

    - The extended hypothesis can still be among the best after this frame.
    - The label is at least exp(−``gamma``) times as likely as the likeliest symbol at this point.

    If a label leads from one hypothesis of the beam to a second one, the probability of that path is added to
    the second one.

    An utterance of a stream ends after ``endpoint_seconds`` of blanks. None: never.
    """

    max_symbols_per_step: int = 5
    gamma: float = 7.0
    endpoint_seconds: float | None = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        symbols = self.max_symbols_per_step
        if not 1 <= symbols <= _LARGEST_FRAME_LIMIT:  # Each symbol of a frame costs memory.
            raise ValueError(f"max_symbols_per_step is {symbols}: it must be 1 to {_LARGEST_FRAME_LIMIT}")
        if self.gamma <= 0:
            raise ValueError(f"gamma is {self.gamma}: it must be above 0")
        require_least(SHORTEST_ENDPOINT, endpoint_seconds=self.endpoint_seconds)

    @torch.no_grad()
    def decode(self, scorer: Scorer, frames: Tensor, lengths: Tensor) -> list[Hypothesis]:
        return self._decode(_transducer(scorer), frames, lengths)

    def stream(self, scorer: Scorer) -> SearchStream:
        return _TransducerStream(self, _transducer(scorer))

    def search(
        self, scorer: TransducerScorer, frames: Tensor, lengths: Tensor
    ) -> tuple[list[list[TimedLabels]], Tensor]:
        search = _TransducerSearch(self, scorer, len(frames))
        for frame in range(int(lengths.max())):
            is_live = (frame < lengths)[:, None]
            search.advance(frames[:, frame], is_live, frame)
        row_texts, scores = search.hypotheses()
        return [texts[: self.width] for texts in row_texts], scores[:, : self.width]


def _transducer(scorer: Scorer) -> TransducerScorer:
    """Return ``scorer``, or raise ConfigError if ``TransducerBeam`` cannot search its model."""
    if not isinstance(scorer, TransducerScorer):
        advice = ". Choose ctc_beam" if isinstance(scorer, CTCScorer) else ""
        raise ConfigError(f"decoder=beam searches transducers, not {type(scorer).__name__}{advice}")
    if scorer.joint.durations:
        raise ConfigError("decoder=beam: joint.durations (TDT) has no beam search. Set decoder=greedy")
    return scorer


@dataclass
class _Level:
    """The hypotheses that have emitted the same number of labels in the present frame.

    The prediction network runs only for the N hypotheses that are alive, which have a score above −inf.
    """

    beam: Beam
    alive: Tensor  # (N,) the indices of the hypotheses that are alive, among all B · W
    network_rows: Tensor  # (B · W,) the row of each hypothesis in ``prediction`` and ``state``
    prediction: Tensor  # (N, H) the prediction after each hypothesis
    state: Any  # the state of the prediction network after each hypothesis, with N rows


class _TransducerSearch:
    """The W best hypotheses of each row after the frames that the search has read."""

    def __init__(self, settings: TransducerBeam, scorer: TransducerScorer, rows: int) -> None:
        self.settings, self.scorer = settings, scorer
        self.fusion, self.network = settings.fusion, scorer.prediction
        self.rows, self.width = rows, settings.width + _SPARE
        prediction, state = scorer.start(rows * self.width)
        indices = torch.arange(rows * self.width, device=prediction.device)
        self.row_starts = indices.view(rows, self.width)[:, :1]  # (B, 1) the index of each row's slot 0
        self.label_tree = LabelTree()
        beam = Beam.start(rows, self.width, scorer.blank, prediction.device)
        self.level = _Level(beam, indices, indices, prediction, state)

    def advance(self, encoded: Tensor, is_live: Tensor, frame: int) -> None:
        """Extend the hypotheses by the symbols of one frame (B, H), and choose the W best after it.

        ``is_live`` (B, 1) is whether the row has this frame, and ``frame`` is the number of the frame.
        """
        beam = self.level.beam
        repeated = encoded.repeat_interleave(self.width, 0)
        scores = self._log_probabilities(repeated, self.level.prediction).view(self.rows, self.width, -1)
        arcs = self._add_arcs(scores, is_live, frame)
        label_scores = self._extension_scores(beam, scores).masked_fill(~is_live[..., None], IMPOSSIBLE)
        label_scores = beam.without(arcs, label_scores)
        beam.score = beam.score + torch.where(is_live, scores[..., -1], 0.0)
        # The blank after an extension only lowers its score. So an extension must exceed the worst score of
        # the present hypotheses, which already contain the blank.
        floor = (beam.score + beam.fusion_score).topk(self.width).values[:, -1:]
        # The present level, then the levels with 1, 2, … more labels, all with this frame's blank
        levels = [self.level]
        for labels_left in reversed(range(self.settings.max_symbols_per_step)):
            level = self._extend(levels[-1], label_scores, scores, floor, frame)
            if level is None:
                break
            levels.append(level)
            rows = level.alive.div(self.width, rounding_mode="floor")
            alive_scores = self._log_probabilities(encoded[rows], level.prediction)
            if labels_left:
                scores = torch.full_like(scores, IMPOSSIBLE)
                scores.view(-1, scores.shape[2])[level.alive] = alive_scores
                label_scores = self._extension_scores(level.beam, scores)
            blank_scores = alive_scores[:, -1]
            level.beam.score.view(-1)[level.alive] += blank_scores
        if len(levels) > 1:
            self.level = self._best(levels)

    def hypotheses(self) -> tuple[list[list[TimedLabels]], Tensor]:
        """Return the hypotheses of each row without empty slots, the best first, and their scores (B, W)."""
        beam = self.level.beam
        total = beam.score + beam.fusion_score
        best = beam.take(total.sort(dim=1, descending=True, stable=True).indices)
        return self.label_tree.hypotheses(best), best.score

    def _log_probabilities(self, encoded: Tensor, prediction: Tensor) -> Tensor:
        """Return the log-probabilities (N, V) of the symbols for N pairs of frame and prediction (N, H)."""
        scores: Tensor = self.scorer.joint(encoded, prediction).float().log_softmax(-1)
        return scores

    def _add_arcs(self, scores: Tensor, is_live: Tensor, frame: int) -> Tensor:
        """Add the paths that lead in this frame from one hypothesis of the beam to another.

        Changes the scores and the nodes of the beam. Returns the scores (B, W, W) of the labels between
        hypotheses, as ``Beam.arcs`` does.
        """
        beam = self.level.beam
        arcs = beam.arcs(scores).masked_fill(~is_live[..., None], IMPOSSIBLE)
        if not bool((arcs > IMPOSSIBLE).any()):
            return arcs
        old_score = beam.score
        # A path may visit several hypotheses in one frame. Each round adds the paths of one more label.
        for _ in range(self.settings.max_symbols_per_step):
            path_scores = beam.score[..., None] + arcs
            beam.score = torch.logaddexp(old_score, path_scores.logsumexp(1))
        highest, parent = path_scores.max(1)
        is_likelier = highest > old_score  # The label is likelier in this frame than in its earlier frame.
        confidences = _confidences(scores, parent, beam.label)
        node = self.label_tree.add(beam.node.gather(1, parent), beam.label, frame, confidences)
        beam.node = torch.where(is_likelier, node, beam.node)
        return arcs

    def _extension_scores(self, beam: Beam, scores: Tensor) -> Tensor:
        """Return the score (B, W, V − 1) of each hypothesis with each label, and −inf for unlikely labels."""
        highest = scores.max(-1, keepdim=True).values
        labels = scores[..., :-1]
        is_likely = labels >= highest - self.settings.gamma
        return (beam.score[..., None] + labels).masked_fill(~is_likely, IMPOSSIBLE)

    def _extend(
        self, source: _Level, label_scores: Tensor, scores: Tensor, floor: Tensor, frame: int
    ) -> _Level | None:
        """Return the W best extensions of ``source`` by one label, or None if none exceeds ``floor``.

        - ``label_scores`` (B, W, V − 1) is the score of each hypothesis of ``source`` with each label.
        - ``scores`` (B, W, V) are the log-probabilities of the symbols after each hypothesis of ``source``.
        - ``floor`` (B, 1) is the score, with fusion, that an extension must exceed.
        """
        # Each candidate (B, W) is the index of an element in a row of ``label_scores``.
        fusion_scores = self.fusion.label_scores(source.beam.fusion_score, source.beam.fusion_state)
        totals, candidate = (label_scores + fusion_scores).flatten(1).topk(self.width)
        score = label_scores.flatten(1).gather(1, candidate).masked_fill(totals <= floor, IMPOSSIBLE)
        fusion_scores = fusion_scores.expand_as(label_scores).flatten(1)
        is_alive = score > IMPOSSIBLE
        alive = is_alive.flatten().nonzero()[:, 0]
        if not len(alive):
            return None
        labels = label_scores.shape[2]
        label = candidate % labels
        parent = candidate.div(labels, rounding_mode="floor")
        parents = source.beam.take(parent)
        confidences = _confidences(scores, parent, label)
        beam = Beam(
            score=score,
            key=extended_key(parents.key, label),
            parent_key=parents.key,
            label=label,
            node=self.label_tree.add(parents.node, label, frame, confidences),
            fusion_score=fusion_scores.gather(1, candidate),
            fusion_state=self.fusion.advance(parents.fusion_state, label, is_alive),
        )
        parent_indices = (self.row_starts + parent).flatten()[alive]
        state = self.network.take(source.network_rows[parent_indices], source.state)
        prediction, state = self.scorer.step(label.flatten()[alive], state)
        network_rows = torch.zeros_like(self.level.network_rows)
        network_rows[alive] = torch.arange(len(alive), device=alive.device)
        return _Level(beam, alive, network_rows, prediction, state)

    def _best(self, levels: Sequence[_Level]) -> _Level:
        """Return the W best hypotheses of all levels as a level of the next frame.

        All of its B · W hypotheses have a prediction and a state, as in the first of ``levels``.
        """
        present, *extensions = levels
        pool = present.beam.concatenate([level.beam for level in extensions]).merge()
        candidate = (pool.score + pool.fusion_score).topk(self.width).indices
        level_numbers = candidate.div(self.width, rounding_mode="floor").flatten()
        indices = (self.row_starts + candidate % self.width).flatten()
        prediction, state = present.prediction[indices], self.network.take(indices, present.state)
        for number, level in enumerate(extensions, 1):
            is_from_level = level_numbers == number
            network_rows = level.network_rows[indices]
            level_state = self.network.take(network_rows, level.state)
            prediction = torch.where(is_from_level[:, None], level.prediction[network_rows], prediction)
            state = self.network.select(is_from_level, level_state, state)
        return _Level(pool.take(candidate), present.alive, present.network_rows, prediction, state)


def _confidences(scores: Tensor, parents: Tensor, labels: Tensor) -> Tensor:
    """Return the probability (B, W) of each of ``labels`` (B, W) among all labels, without the blank.

    ``parents`` (B, W) has the slots of the hypotheses before the labels. ``scores`` (B, W, V) has the
    log-probabilities after the hypotheses of all slots.
    """
    label_scores = scores.flatten(1).gather(1, parents * scores.shape[2] + labels)
    totals = scores[..., :-1].logsumexp(2).gather(1, parents)
    return (label_scores - totals).exp().clamp(max=1.0)


class _TransducerStream(SearchStream):
    """The beam search and the greedy search of the present utterance of a recording, and its frames.

    Both searches may write the final text, and the end of the utterance needs all its frames for the exact
    scores. So the memory grows with the utterance.
    """

    def __init__(self, decoder: TransducerBeam, scorer: TransducerScorer) -> None:
        super().__init__(scorer, decoder.endpoint_seconds)
        self.transducer, self.greedy = scorer, Greedy().stream(scorer)
        # A search writes to the fusion. Other searches of the same decoder must not see this.
        self.decoder = copy(decoder)
        self.decoder.fusion = copy(decoder.fusion)
        self._begin()

    @torch.no_grad()
    def _begin(self) -> None:
        self.decoder.fusion.start_search(self.scorer.tokenizer)
        self.search = _TransducerSearch(self.decoder, self.transducer, rows=1)
        self.pieces = list[Tensor]()  # the frames (1, T, H) of the utterance
        (self.texts,), self.scores = self.search.hypotheses()  # the best first

    @torch.no_grad()
    def step(self, frames: Tensor) -> None:
        self.greedy.step(frames)
        self.pieces.append(frames)
        is_live = torch.ones(1, 1, dtype=torch.bool, device=frames.device)
        for encoded in frames.unbind(1):
            self.search.advance(encoded, is_live, self.frame)
            self.frame += 1
        (self.texts,), self.scores = self.search.hypotheses()

    @property
    def hypothesis(self) -> Hypothesis:
        """The best text so far, by the scores of the searches."""
        greedy = self.greedy.hypothesis
        texts = self._candidates(greedy)
        score_of = {}
        for text, score in zip(self.texts, self.scores[0].tolist(), strict=False):
            score_of[text.labels] = score
        scores = [score_of.get(text.labels, greedy.score) for text in texts]
        (best,) = self.decoder.best_hypotheses(self.scorer, texts, scores, rows=1)
        return best

    @property
    def final_labels(self) -> int:
        labels = [self.greedy.hypothesis.labels]
        labels += [text.labels for text in self.texts]
        count = 0
        for labels_at_position in zip(*labels, strict=False):
            if len(set(labels_at_position)) > 1:
                break
            count += 1
        return count

    @torch.no_grad()
    def finish(self) -> Hypothesis:
        if not any(piece.shape[1] for piece in self.pieces):
            return super().finish()  # The loss needs a frame.
        texts = self._candidates(self.greedy.finish())
        frames = torch.cat(self.pieces, 1)
        lengths = torch.tensor([frames.shape[1]], device=frames.device)
        scores = _log_likelihoods(self.scorer, frames, lengths, texts)
        (best,) = self.decoder.best_hypotheses(self.scorer, texts, scores, rows=1)
        self._begin()
        return best

    def _candidates(self, greedy: Hypothesis) -> list[TimedLabels]:
        return self.decoder.candidates(self.scorer, [greedy], [self.texts[: self.decoder.width]])
