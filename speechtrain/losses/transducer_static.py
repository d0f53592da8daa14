"""The joint of the transducer loss in all cells of the padded lattice, in static shapes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from speechtrain.compute_policy import GraphFunction
from speechtrain.losses.transducer_diagonals import posteriors_by_diagonals
from speechtrain.losses.transducer_durations import posteriors_of_durations
from speechtrain.losses.transducer_joint import ACTIVATIONS, JointNetwork, arcs_with_penalty
from speechtrain.losses.transducer_lattice import Gradients, Inputs, Settings, indices, next_labels
from speechtrain.losses.transducer_recursion import Posteriors


class StaticJoint(JointNetwork):
    """Computes the log-probabilities and the gradients in every cell of the padded lattice.

    A span is a slice of frames, the same for all utterances. It has t frames. A device can record the
    operations in a graph, because they contain no index_add and no writes into slices.
    """

    def __init__(self, settings: Settings, inputs: Inputs) -> None:
        super().__init__(settings, inputs)
        # Values beyond the lengths may be NaN. An utterance has one position more than labels.
        beyond_frames = indices(self.shape[1], inputs.frame_counts) >= inputs.frame_counts[:, None]
        beyond_positions = indices(self.shape[2], inputs.label_counts) > inputs.label_counts[:, None]
        self.encoder = inputs.encoder.to(settings.wide).masked_fill(beyond_frames[..., None], 0)
        self.prediction = inputs.prediction.to(settings.wide).masked_fill(beyond_positions[..., None], 0)
        self.targets = next_labels(inputs, settings.blank)
        # The numbers of frames are data. As constants they would make each span another graph.
        self.frame = indices(self.shape[1], self.encoder)

    def log_probabilities(self) -> list[Tensor]:
        """Return the log-probabilities of blank, next label and each duration, each (B, T, P).

        Outside the lattice of an utterance they are arbitrary but finite.
        """
        spans = [_span_arcs(self, self.encoder[:, span], self.frame[span]) for span in self._spans()]
        return [torch.cat(log_probabilities, 1) for log_probabilities in zip(*spans, strict=True)]

    def posteriors(self, arcs: Sequence[Tensor]) -> Posteriors:
        """Return the posteriors of ``arcs``, the results of ``log_probabilities``."""
        arcs = arcs_with_penalty(self.settings, arcs, self.frame_counts)
        lengths = self.frame_counts, self.label_counts
        if self.settings.durations:
            return posteriors_of_durations(self.settings, arcs, *lengths)
        blank, label = arcs
        return posteriors_by_diagonals(blank, label, *lengths)

    def arcs(self, hidden: Tensor) -> list[Tensor]:
        """Return the log-probabilities (B, t, P) of the arcs of t frames with the ``hidden`` units."""
        symbol_logits, duration_logits = self._logits(hidden)
        log_p = symbol_logits.log_softmax(-1)
        targets = self.targets[:, None, :, None].expand(-1, log_p.shape[1], -1, -1)
        arcs = [log_p[..., self.settings.blank], log_p.gather(-1, targets)[..., 0]]
        if self.settings.durations:  # Without durations, the tensor is empty. A graph cannot contain it.
            arcs += duration_logits.log_softmax(-1).unbind(-1)
        return arcs

    def gradients(self, factors: Sequence[Tensor], upstream: Tensor) -> Gradients:
        """Return the gradients of the inputs for the upstream gradients (B,).

        ``factors`` are the results of ``gradient_factors``.
        """
        wide = self.settings.wide
        masks = self._symbol_masks()
        cell_weight, *differences = factors
        factors = [cell_weight * upstream[:, None, None], *differences]
        encoder, prediction = [], torch.zeros_like(self.prediction)
        weight = torch.zeros_like(self.weight, dtype=wide)
        bias = torch.zeros_like(self.bias, dtype=wide)
        for span in self._spans():
            span_factors = [factor[:, span, :, None] for factor in factors]
            span_sums = _span_gradients(self, self.encoder[:, span], self.frame[span], masks, span_factors)
            encoder.append(span_sums.encoder)
            prediction = prediction + span_sums.prediction
            weight = weight + span_sums.weight
            bias = bias + span_sums.bias
        return Gradients(torch.cat(encoder, 1), prediction, weight * self.settings.scale, bias=bias)

    def part_of_gradients(
        self, hidden: Tensor, frame: Tensor, masks: tuple[Tensor, ...], factors: Sequence[Tensor]
    ) -> Gradients:
        """Return the sums of the gradients over the cells of the frames (t,).

        The gradient of the weight is not multiplied by the scale of dropout yet.
        """
        wide = self.settings.wide
        gradient = self._logit_gradient(hidden, masks, factors)
        bias = gradient.sum((0, 1, 2), dtype=wide)
        weight = gradient.flatten(0, 2).t() @ hidden.flatten(0, 2)
        slope = self.slope_(hidden)
        if self.settings.activation != "relu":  # Dropped units of relu have the slope 0 already.
            slope = self.dropout.drop(slope, frame)
        unit_gradient = (gradient @ self.weight).to(wide) * slope
        return Gradients(unit_gradient.sum(2), unit_gradient.sum(1), weight.to(wide), bias=bias)

    def _symbol_masks(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return masks, 1 or 0, of the blank (V,), the next label (B, 1, P, V) and all other symbols."""
        wide = self.settings.wide
        symbol = indices(len(self.weight) - len(self.settings.durations), self.weight)
        is_blank = (symbol == self.settings.blank).to(wide)
        is_label = (symbol == self.targets[:, None, :, None]).to(wide) * (1 - is_blank)
        return is_blank, is_label, 1 - is_blank - is_label

    def _logit_gradient(self, hidden: Tensor, masks: tuple[Tensor, ...], factors: Sequence[Tensor]) -> Tensor:
        """Return the gradient (B, t, P, V + K) over the logits.

        ``factors``, each (B, t, P, 1), are the results of ``gradient_factors`` for the cells of the span.
        """
        is_blank, is_label, is_other = masks
        symbol_logits, _ = self._logits(hidden)
        cell_weight, blank, label, *durations = factors
        gradient = symbol_logits.softmax(-1) * is_other + blank * is_blank + label * is_label
        if durations:
            gradient = torch.cat((gradient, *durations), -1)
        return (gradient * cell_weight).to(self.settings.dtype)

    def _spans(self) -> list[slice]:
        """Return slices of frames with about ``chunk`` cells of all utterances together."""
        batch, frames, positions = self.shape
        step = max(1, self.settings.chunk // (batch * positions))
        return [slice(start, min(start + step, frames)) for start in range(0, frames, step)]

    def hidden(self, encoder: Tensor, frame: Tensor) -> Tensor:
        """Return the hidden units (B, t, P, H) of the frames (t,) after dropout.

        The weight contains the scale of dropout.
        """
        sums = encoder[:, :, None] + self.prediction[:, None]
        hidden = ACTIVATIONS[self.settings.activation](sums)
        return self.dropout.drop(hidden, frame).to(self.settings.dtype)

    def _logits(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of symbols (…, V) and of durations (…, K) for hidden units (…, H)."""
        logits = F.linear(hidden, self.weight, self.bias)
        return self.settings.split_logits(logits.to(self.settings.wide))


@GraphFunction
def _span_arcs(joint: StaticJoint, encoder: Tensor, frame: Tensor) -> list[Tensor]:
    """Return the log-probabilities (B, t, P) of the arcs of the frames (t,)."""
    return joint.arcs(joint.hidden(encoder, frame))


@GraphFunction
def _span_gradients(
    joint: StaticJoint, encoder: Tensor, frame: Tensor, masks: tuple[Tensor, ...], factors: Sequence[Tensor]
) -> Gradients:
    """Return the sums of the gradients over the cells of the frames (t,)."""
    return joint.part_of_gradients(joint.hidden(encoder, frame), frame, masks, factors)
