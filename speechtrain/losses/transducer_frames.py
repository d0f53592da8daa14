"""The posteriors of a lattice by a recursion over its frames. ``transducer_recursion`` has the recursion.

Within a frame, a path enters at a position and then emits labels. With L(t, u), the sum of the
log-probabilities of the labels before position u in frame t, all positions of a frame are one logcumsumexp:

    enter(t, u) = alpha(t - 1, u) + blank(t - 1, u)
    alpha(t, u) = L(t, u) + logsumexp of enter(t, v) - L(t, v) over v <= u

The differences of the sums L need float64 for the precision of fp32.

If the lattice is turned by 180 degrees, its end is the beginning, and its backward variables are the forward
variables. So one loop computes both. Turning maps each cell to its *image*, the first cell to the last one.
An arc then leads the other way: it leaves the image of the cell into which it led, and leads into the image
of the cell that it left.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from speechtrain.losses.transducer_lattice import NEVER, indices, inside_mask
from speechtrain.losses.transducer_recursion import HIGHEST_LOSS, Posteriors


def posteriors_by_frames(
    blank: Tensor, label: Tensor, frame_counts: Tensor, label_counts: Tensor
) -> Posteriors:
    """Return the posteriors in float64.

    ``blank`` and ``label`` (B, T, P) are the log-probabilities of the blank and of the next label.
    ``frame_counts`` and ``label_counts`` (B,) are the lengths of the utterances.
    """
    # An impossible class has the log-probability -inf, and inf - inf would be NaN.
    blank = blank.clamp(min=NEVER).double()
    label = label.clamp(min=NEVER).double()
    _, frames, positions = blank.shape
    image = _turned_cells(frames, positions, frame_counts, label_counts)
    # The arcs into each cell, of the lattice and of the turned lattice.
    blank_into = torch.stack((F.pad(blank, (0, 0, 1, -1)), _turned(blank, image)))  # from the previous frame
    label_into = torch.stack((F.pad(label, (1, -1)), _turned(label, image)))  # from the previous position
    alpha, turned_beta = _forward_variables(blank_into, label_into)
    beta = _turned(turned_beta, image)

    log_likelihood = beta[:, 0, 0]
    log_occupancy = alpha + beta - beta[:, :1, :1]
    beta_after_label = F.pad(beta, (-1, 1))
    log_label_share = label + beta_after_label - beta
    is_inside = inside_mask(blank.shape, frame_counts, label_counts)
    is_before_last = indices(positions, blank) < label_counts[:, None]
    has_label = is_inside & is_before_last[:, None]
    posteriors = Posteriors(
        loss=(-log_likelihood).masked_fill(frame_counts == 0, 0),
        occupancy=log_occupancy.exp().masked_fill(~is_inside, 0),
        label_share=log_label_share.exp().masked_fill(~has_label, 0),
    )
    return posteriors.without_impossible(posteriors.loss > HIGHEST_LOSS)


def _turned_cells(frames: int, positions: int, frame_counts: Tensor, label_counts: Tensor) -> Tensor:
    """Return for each cell the flat index (B, T · P) of its image in the lattice turned by 180 degrees.

    The first cell and the last cell of an utterance are images of one another. Cells outside the lattice of
    the utterance have arbitrary images.
    """
    last_frame = frame_counts[:, None] - 1
    last_position = label_counts[:, None]
    turned_frame = (last_frame - indices(frames, frame_counts)).clamp(min=0)
    turned_position = (last_position - indices(positions, label_counts)).clamp(min=0)
    turned = turned_frame[:, :, None] * positions + turned_position[:, None, :]
    return turned.flatten(1)


def _turned(cells: Tensor, image: Tensor) -> Tensor:
    """Return the values ``cells`` (B, T, P) in the order of the turned lattice."""
    return cells.flatten(1).gather(1, image).view(cells.shape)


def _forward_variables(blank_into: Tensor, label_into: Tensor) -> Tensor:
    """Return the forward variables (2, B, T, P) of the lattice and of the turned lattice.

    The arguments (2, B, T, P) are the log-probabilities of the arcs into each cell. The value of a label into
    position 0 has no effect.
    """
    label_sums = label_into.cumsum(-1)  # L
    # Before the first frame, alpha - L is 0 in position 0, where paths begin, and there is no other way.
    alpha_minus_sums = torch.full_like(label_sums[:, :, 0], -torch.inf)  # (2, B, P)
    alpha_minus_sums[..., 0] = 0
    sums_before_first = torch.zeros_like(label_sums[:, :, :1])
    previous_sums = torch.cat((sums_before_first, label_sums[:, :, :-1]), 2)
    # enter(t, u) - L(t, u) is (alpha - L)(t - 1, u) plus three terms, which are summed here for all frames.
    # So an iteration has one addition.
    steps = blank_into - label_sums + previous_sums
    frames = []
    for t in range(blank_into.shape[2]):
        alpha_minus_sums = torch.logcumsumexp(alpha_minus_sums + steps[:, :, t], -1)
        frames.append(alpha_minus_sums)
    return torch.stack(frames, 2) + label_sums
