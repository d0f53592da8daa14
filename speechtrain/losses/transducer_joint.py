"""The joint network of the transducer loss: its settings on the device, and the gradient over its logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from speechtrain.losses.transducer_dropout import dropout_of_inputs
from speechtrain.losses.transducer_lattice import Inputs, Joint, Posteriors, lattice_shape

ACTIVATIONS = {"relu": torch.relu_, "tanh": torch.tanh_}


class Walk:
    """Computes the joint in the cells of the lattice, forward and backward."""

    def __init__(self, joint: Joint, inputs: Inputs) -> None:
        self.joint, self.frames, self.symbols = joint, inputs.frames, inputs.symbols
        self.shape = lattice_shape(inputs)
        self.weight = (inputs.weight.to(joint.wide) * joint.scale).to(joint.dtype)
        self.bias = inputs.bias.to(joint.dtype)
        self.dropout = dropout_of_inputs(joint, inputs)


def logit_differentials(joint: Joint, posteriors: Posteriors, arcs: Sequence[Tensor]) -> list[Tensor]:
    """Return the factors of each cell's gradient over its logits, each (B, T, P).

    The first one is the weight of the cell. The others are the differences of softmax and share for blank,
    next label and each duration. The gradient over a logit is the weight times its difference. The share of
    all other symbols is 0, so their difference is their softmax.

    ``arcs`` are the log-probabilities (B, T, P) of blank, next label and each duration. The differences are
    computed in full precision, because their terms cancel.
    """
    blank, label, *durations = arcs
    share = posteriors.label_share
    # FastEmit counts label arcs 1 + fastemit times, so cells with label arcs have more weight.
    emphasis = 1 + joint.fastemit * share
    fields = [
        posteriors.occupancy * emphasis,
        blank.exp() - (1 - share) / emphasis,
        label.exp() - (1 + joint.fastemit) * share / emphasis,
    ]
    for log_p, duration_share in zip(durations, posteriors.duration_shares, strict=True):
        fields.append(log_p.exp() - duration_share)
    return [field.to(joint.wide) for field in fields]
