"""The joint of the transducer loss in all cells of the padded lattice, in static shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from speechtrain.compute_policy import GraphFunction
from speechtrain.losses.transducer_joint import ACTIVATIONS, Walk
from speechtrain.losses.transducer_lattice import Gradients, Inputs, Joint, indices, next_labels


class StaticWalk(Walk):
    """Visits every cell of the padded lattice. A span is a slice of frames, which all utterances share.

    A device can record its operations in a graph, because it avoids index_add and writes into slices.
    """

    def __init__(self, joint: Joint, inputs: Inputs) -> None:
        super().__init__(joint, inputs)
        # Values beyond the lengths may be NaN. An utterance has one position more than labels.
        beyond_frames = indices(self.shape[1], inputs.frames) >= inputs.frames[:, None]
        beyond_positions = indices(self.shape[2], inputs.symbols) > inputs.symbols[:, None]
        self.encoder = inputs.encoder.to(joint.wide).masked_fill(beyond_frames[..., None], 0)
        self.prediction = inputs.prediction.to(joint.wide).masked_fill(beyond_positions[..., None], 0)
        self.targets = next_labels(inputs, joint.blank)
        # The numbers of frames are data. As constants they would make each span another graph.
        self.frame = indices(self.shape[1], self.encoder)

    def log_probabilities(self) -> list[Tensor]:
        """Return the log-probabilities of blank, next label and each duration, each (B, T, P).

        Outside the lattice of an utterance they are arbitrary but finite.
        """
        spans = [_span_arcs(self, self.encoder[:, span], self.frame[span]) for span in self._spans()]
        return [torch.cat(fields, 1) for fields in zip(*spans, strict=True)]

    def arcs(self, hidden: Tensor) -> list[Tensor]:
        """Return the log-probabilities (B, t, P) of the arcs of t frames with the ``hidden`` units."""
        symbol_logits, duration_logits = self._logits(hidden)
        log_p = symbol_logits.log_softmax(-1)
        targets = self.targets[:, None, :, None].expand(-1, log_p.shape[1], -1, -1)
        arcs = [log_p[..., self.joint.blank], log_p.gather(-1, targets)[..., 0]]
        if self.joint.durations:  # Graphs cannot contain the empty tensor that would be here without.
            arcs += duration_logits.log_softmax(-1).unbind(-1)
        return arcs

    def gradients(self, differentials: Sequence[Tensor], upstream: Tensor) -> Gradients:
        """Return the gradients of the inputs for the upstream gradients (B,).

        ``differentials`` are the results of ``logit_differentials``.
        """
        wide = self.joint.wide
        masks = self._symbol_masks()
        fields = [differentials[0] * upstream[:, None, None], *differentials[1:]]
        encoder, prediction = [], torch.zeros_like(self.prediction)
        weight = torch.zeros_like(self.weight, dtype=wide)
        bias = torch.zeros_like(self.bias, dtype=wide)
        for span in self._spans():
            span_fields = [field[:, span, :, None] for field in fields]
            span_sums = _span_gradients(self, self.encoder[:, span], self.frame[span], masks, span_fields)
            encoder.append(span_sums.encoder)
            prediction = prediction + span_sums.prediction
            weight = weight + span_sums.weight
            bias = bias + span_sums.bias
        return Gradients(torch.cat(encoder, 1), prediction, weight * self.joint.scale, bias=bias)

    def part_of_gradients(
        self, hidden: Tensor, frame: Tensor, masks: tuple[Tensor, ...], fields: Sequence[Tensor]
    ) -> Gradients:
        """Return the sums of the gradients over the cells of frames (t,). The weight's is not scaled."""
        wide = self.joint.wide
        gradient = self._logit_gradient(hidden, masks, fields)
        bias = gradient.sum((0, 1, 2), dtype=wide)
        weight = gradient.flatten(0, 2).t() @ hidden.flatten(0, 2)
        slope = self.joint.slope_(hidden)
        if self.joint.activation != "relu":  # Dropped units of relu have the slope 0 already.
            slope = self.dropout.applied(slope, frame)
        unit_gradient = (gradient @ self.weight).to(wide) * slope
        return Gradients(unit_gradient.sum(2), unit_gradient.sum(1), weight.to(wide), bias=bias)

    def _symbol_masks(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return masks, 1 or 0, of the blank (V,), the next label (B, 1, P, V) and all other symbols."""
        wide = self.joint.wide
        symbol = indices(len(self.weight) - len(self.joint.durations), self.weight)
        is_blank = (symbol == self.joint.blank).to(wide)
        is_label = (symbol == self.targets[:, None, :, None]).to(wide) * (1 - is_blank)
        return is_blank, is_label, 1 - is_blank - is_label

    def _logit_gradient(self, hidden: Tensor, masks: tuple[Tensor, ...], fields: Sequence[Tensor]) -> Tensor:
        """Return the gradient (B, frames of the span, P, V + K) over the logits.

        ``fields`` are the results of ``logit_differentials`` for the cells of the span, with an axis for
        symbols.
        """
        is_blank, is_label, is_other = masks
        symbol_logits, _ = self._logits(hidden)
        cell_weight, blank, label, *durations = fields
        gradient = symbol_logits.softmax(-1) * is_other + blank * is_blank + label * is_label
        if durations:
            gradient = torch.cat((gradient, *durations), -1)
        return (gradient * cell_weight).to(self.joint.dtype)

    def _spans(self) -> Iterator[slice]:
        """Return slices of frames with about ``chunk`` cells of all utterances together."""
        batch, frames, positions = self.shape
        step = max(1, self.joint.chunk // (batch * positions))
        return (slice(start, min(start + step, frames)) for start in range(0, frames, step))

    def hidden(self, encoder: Tensor, frame: Tensor) -> Tensor:
        """Return the hidden units (B, t, P, H) of the frames (t,) after dropout.

        The weight contains the scale of dropout.
        """
        sums = encoder[:, :, None] + self.prediction[:, None]
        hidden = ACTIVATIONS[self.joint.activation](sums)
        return self.dropout.applied(hidden, frame).to(self.joint.dtype)

    def _logits(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of symbols (…, V) and of durations (…, K) for hidden units (…, H)."""
        logits = F.linear(hidden, self.weight, self.bias)
        return self.joint.split_logits(logits.to(self.joint.wide))


@GraphFunction
def _span_arcs(walk: StaticWalk, encoder: Tensor, frame: Tensor) -> list[Tensor]:
    """Return the log-probabilities (B, t, P) of the arcs of the frames (t,)."""
    return walk.arcs(walk.hidden(encoder, frame))


@GraphFunction
def _span_gradients(
    walk: StaticWalk, encoder: Tensor, frame: Tensor, masks: tuple[Tensor, ...], fields: Sequence[Tensor]
) -> Gradients:
    """Return the sums of the gradients over the cells of the frames (t,)."""
    return walk.part_of_gradients(walk.hidden(encoder, frame), frame, masks, fields)
