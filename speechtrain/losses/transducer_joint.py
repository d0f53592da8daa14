"""What both forms of the joint of the transducer loss share: parameters, penalty, factors of the gradient.

``RaggedJoint`` and ``StaticJoint`` compute the joint in the cells of the lattice, forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from speechtrain.losses.transducer_dropout import Dropout, NoDropout
from speechtrain.losses.transducer_lattice import Inputs, Settings, indices, lattice_shape
from speechtrain.losses.transducer_recursion import Posteriors

ACTIVATIONS = {"relu": torch.relu_, "tanh": torch.tanh_}


class JointNetwork:
    """The output layer and the dropout of the joint, and the numbers of frames and labels of a batch."""

    def __init__(self, settings: Settings, inputs: Inputs) -> None:
        self.settings = settings
        self.frame_counts, self.label_counts = inputs.frame_counts, inputs.label_counts
        self.shape = lattice_shape(inputs)
        self.weight = (inputs.weight.to(settings.wide) * settings.scale).to(settings.dtype)
        self.bias = inputs.bias.to(settings.dtype)
        self.dropout: Dropout | NoDropout = NoDropout()
        if settings.dropped_numbers:
            batch, _, width = inputs.encoder.shape
            self.dropout = Dropout(settings, batch, width, seed_halves=inputs.seed_halves)

    def slope_(self, hidden: Tensor) -> Tensor:
        """Overwrite hidden units by the slope of the activation, computed from its output.

        A dropped unit of tanh is 0, and gets the slope 1. The caller must set this slope to 0. The operations
        are in place, because a new tensor takes three times as long.
        """
        if self.settings.activation == "relu":
            return hidden.gt_(0)
        return hidden.square_().neg_().add_(1)


def arcs_with_penalty(settings: Settings, arcs: Sequence[Tensor], frame_counts: Tensor) -> Sequence[Tensor]:
    """Return ``arcs``, each (B, T, P), with the delay penalty on labels, for utterances of T frames (B,).

    A label that leaves frame t gets ``delay_penalty`` * ((T - 1) / 2 - t) (Kang et al., 2023).
    """
    if not settings.delay_penalty:
        return arcs
    blank, label, *durations = arcs
    # The lazy device computes the product of integers and 0.5 in float64.
    middle = (frame_counts.to(label.dtype) - 1) * 0.5
    frames_to_middle = middle[:, None] - indices(label.shape[1], label)  # (B, T)
    label = label + settings.delay_penalty * frames_to_middle[:, :, None]
    return [blank, label, *durations]


def gradient_factors(settings: Settings, posteriors: Posteriors, arcs: Sequence[Tensor]) -> list[Tensor]:
    """Return the factors from which the gradient over the logits of each cell is computed, each (B, T, P).

    The first factor is the weight of the cell. The other factors are the differences of softmax and share for
    blank, next label and each duration. The gradient over a logit is the weight times the logit's difference.
    The share of all other symbols is 0, so their difference is their softmax.

    ``arcs`` are the log-probabilities (B, T, P) of blank, next label and each duration, without penalty. The
    differences are computed in full precision, because their terms cancel.
    """
    blank, label, *durations = arcs
    label_share = posteriors.label_share
    # FastEmit multiplies the label share of each cell, but not the blank share. The sum of a cell's shares is
    # then ``emphasis`` instead of 1. The cell's weight is multiplied by it, and the shares are divided by it.
    emphasis = 1 + settings.fastemit * label_share
    factors = [
        posteriors.occupancy * emphasis,
        blank.exp() - (1 - label_share) / emphasis,
        label.exp() - (1 + settings.fastemit) * label_share / emphasis,
    ]
    for log_p, duration_share in zip(durations, posteriors.duration_shares, strict=True):
        factors.append(log_p.exp() - duration_share)
    return [factor.to(settings.wide) for factor in factors]
