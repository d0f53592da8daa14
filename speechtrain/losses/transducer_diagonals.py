"""The posteriors of a lattice by a recursion over its diagonals. ``transducer_recursion`` has the recursion.

Diagonal d has the cells with t + u = d. Every arc leads to the next diagonal, so a path has one cell on each,
and the variables of a diagonal may be normalised: their logsumexp is subtracted. They then stay small, and
fp32 is exact enough. The loss is minus the sum of what was subtracted, and the occupancy of a diagonal is the
softmax of alpha + beta.

One loop computes alpha and beta. If the lattice is turned by 180 degrees, its backward variables are forward
variables. ``transducer_frames`` turns the lattice of each utterance. Here the padded lattice is turned, with
its padding, because a flip has no index that depends on data. A turned lattice begins on another diagonal for
each utterance.

Gaudi needs this form, because it has no float64 and no logcumsumexp. In float64, the recursion of
``transducer_frames`` takes half of the time for short utterances, and as long for long ones
(docs/benchmarks/loss.md).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from speechtrain.compute_policy import GraphFunction, equal_parts
from speechtrain.losses.transducer_lattice import NEVER, indices, inside_mask, skewed, straight
from speechtrain.losses.transducer_recursion import HIGHEST_LOSS, Posteriors


class _Arcs(NamedTuple):
    """The arcs that lead into each cell from the previous diagonal, of the lattice and of the turned lattice.

    Each tensor is (2, B, D, P), with the lattice first. Paths begin in one cell, which has no arcs into it.
    There ``has_past`` is 0, so that no variables of the previous diagonal are added, and ``blank`` is the
    variable itself: 0 in the lattice, and the blank with which paths end in the turned lattice.
    """

    blank: Tensor  # the log-probability of the blank into the cell
    label: Tensor  # the log-probability of the label into the cell
    has_past: Tensor  # 1, or 0 in the cell in which paths begin


class _Variables(NamedTuple):
    """The results of the recursion, in the order of the lattice."""

    alpha: Tensor  # (B, D, P) the normalised forward variables
    beta: Tensor  # (B, D, P) the normalised backward variables
    subtracted: Tensor  # (B, D) what the normalisation of beta has subtracted on each diagonal
    label_log_odds: Tensor  # (B, D, P) the log-odds of the label against the blank that leave the cell


def posteriors_by_diagonals(
    blank: Tensor, label: Tensor, frame_counts: Tensor, label_counts: Tensor
) -> Posteriors:
    """Return the posteriors in the type of the arguments.

    ``blank`` and ``label`` (B, T, P) are the log-probabilities of the blank and of the next label.
    ``frame_counts`` and ``label_counts`` (B,) are the lengths of the utterances.
    """
    frames = blank.shape[1]
    is_last_cell = _is_last_cell(blank, frame_counts, label_counts)
    has_blank, has_label = _has_arcs(is_last_cell, frame_counts, label_counts)
    # An impossible class has the log-probability -inf, and inf - inf would be NaN.
    blank = blank.clamp(min=NEVER).masked_fill(~has_blank, NEVER)
    label = label.clamp(min=NEVER).masked_fill(~has_label, NEVER)
    ends = skewed(is_last_cell.to(blank.dtype), 0)
    variables = _recursion(_arcs_into_cells(skewed(blank, NEVER), skewed(label, NEVER), ends))

    log_occupancy = variables.alpha + variables.beta
    occupancy = straight(log_occupancy.softmax(-1), frames)
    # A cell has two arcs, and p / (p + q) is the sigmoid of log(p) - log(q).
    label_share = straight(variables.label_log_odds.sigmoid(), frames)
    loss = -_log_likelihood(variables.subtracted, frame_counts, label_counts)
    posteriors = Posteriors(
        loss=loss.masked_fill(frame_counts == 0, 0),
        occupancy=occupancy * inside_mask(occupancy.shape, frame_counts, label_counts),
        label_share=label_share * has_label,
    )
    return posteriors.without_impossible(posteriors.loss > HIGHEST_LOSS)


def _is_last_cell(cells: Tensor, frame_counts: Tensor, label_counts: Tensor) -> Tensor:
    """Return a mask (B, T, P) of the last cell of each utterance. The paths end with its blank."""
    _, frames, positions = cells.shape
    is_last_frame = indices(frames, frame_counts) == frame_counts[:, None] - 1
    is_last_position = indices(positions, label_counts) == label_counts[:, None]
    return is_last_frame[:, :, None] & is_last_position[:, None, :]


def _has_arcs(is_last_cell: Tensor, frame_counts: Tensor, label_counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return masks (B, T, P): the cells that a blank leaves, and the cells that a label leaves."""
    _, frames, positions = is_last_cell.shape
    frame = indices(frames, frame_counts)[:, None]
    position = indices(positions, label_counts)
    last_frame = frame_counts[:, None, None] - 1
    last_position = label_counts[:, None, None]
    has_next_frame = (frame < last_frame) & (position <= last_position)
    has_next_position = (frame <= last_frame) & (position < last_position)
    return has_next_frame | is_last_cell, has_next_position


def _arcs_into_cells(blank: Tensor, label: Tensor, ends: Tensor) -> _Arcs:
    """Return the arcs into each cell.

    ``blank`` and ``label`` (B, D, P) are the log-probabilities of the arcs that leave each cell. ``ends``
    (B, D, P) is 1 for the last cell of each utterance, else 0.
    """
    diagonal = indices(ends.shape[1], ends)[:, None]
    position = indices(ends.shape[2], ends)
    is_first_cell = diagonal + position == 0
    begins = is_first_cell.to(ends.dtype).expand_as(ends)  # A write into a slice would break the graph.
    # A blank comes from the same position of the previous diagonal, a label from the position before.
    blank_of_previous = F.pad(blank, (0, 0, 1, -1), value=NEVER)
    label_of_previous = F.pad(label, (1, -1, 1, -1), value=NEVER)
    blank_into = blank_of_previous * (1 - begins)  # 0 in the first cell
    # Turning reverses the arcs: the arcs that leave a cell lead into its image.
    turned_blank_into = blank.flip(1, 2)
    turned_label_into = label.flip(1, 2)
    turned_begins = ends.flip(1, 2)
    return _Arcs(
        blank=torch.stack((blank_into, turned_blank_into)),
        label=torch.stack((label_of_previous, turned_label_into)),
        has_past=1 - torch.stack((begins, turned_begins)),
    )


def _recursion(arcs: _Arcs) -> _Variables:
    """Run the recursion in parts of equal length, and turn the results of the turned lattice back."""
    diagonals = arcs.blank.shape[2]
    # A device that records graphs records one for each length of a part. So all parts have one length, and
    # the last one is padded.
    count, length = equal_parts(diagonals)
    padding = (0, 0, 0, count * length - diagonals)
    blank, label, has_past = (F.pad(values, padding) for values in arcs)
    past = torch.zeros_like(blank[:, :, 0])  # (2, B, P). The first diagonal has no past, so it is not read.
    parts_of_variables = []
    parts_of_turned_totals = []
    parts_of_turned_log_odds = []
    for start in range(0, diagonals, length):
        part = slice(start, start + length)
        part_variables, part_totals, part_log_odds, past = _part_of_diagonals(
            blank[:, :, part], label[:, :, part], has_past[:, :, part], past
        )
        parts_of_variables.append(part_variables)
        parts_of_turned_totals.append(part_totals)
        parts_of_turned_log_odds.append(part_log_odds)
    variables = torch.cat(parts_of_variables, 2)[:, :, :diagonals]
    alpha = variables[0]  # The lazy device lacks the operation that unpacks a tensor.
    turned_beta = variables[1]
    turned_totals = torch.cat(parts_of_turned_totals, 1)[:, :diagonals]
    turned_log_odds = torch.cat(parts_of_turned_log_odds, 1)[:, :diagonals]
    turned_subtracted = _subtracted(turned_totals, turned_beta)
    return _Variables(
        alpha=alpha,
        beta=turned_beta.flip(1, 2),
        subtracted=turned_subtracted.flip(1),
        # The arcs into a cell of the turned lattice are the arcs that leave its image.
        label_log_odds=turned_log_odds.flip(1, 2),
    )


@GraphFunction
def _part_of_diagonals(
    blank: Tensor, label: Tensor, has_past: Tensor, past: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the recursion over d diagonals. The first three arguments (2, B, d, P) are a part of ``_Arcs``.

    ``past`` (2, B, P) are the normalised variables of the diagonal before. The results are:

    - (2, B, d, P) the normalised variables,
    - (B, d, P) the variables of the turned lattice before their normalisation,
    - (B, d, P) the log-odds of the label against the blank into each cell of the turned lattice,
    - (2, B, P) the normalised variables of the last diagonal, for the next part.
    """
    variables = []
    turned_totals = []
    turned_by_blank = []
    turned_by_label = []
    for d in range(blank.shape[2]):
        by_blank = torch.addcmul(blank[:, :, d], has_past[:, :, d], past)  # blank + has_past * past
        by_label = label[:, :, d] + F.pad(past, (1, -1), value=NEVER)
        total = torch.logaddexp(by_blank, by_label)
        past = total.log_softmax(-1)  # the total less its logsumexp over the diagonal
        variables.append(past)
        turned_totals.append(total[1])
        turned_by_blank.append(by_blank[1])
        turned_by_label.append(by_label[1])
    turned_log_odds = torch.stack(turned_by_label, 1) - torch.stack(turned_by_blank, 1)
    return torch.stack(variables, 2), torch.stack(turned_totals, 1), turned_log_odds, past


def _subtracted(totals: Tensor, normalised: Tensor) -> Tensor:
    """Return what the normalisation has subtracted on each diagonal, (B, D).

    The arguments (B, D, P) are the variables before and after it. Their difference is the same in all cells
    of a diagonal. But where no path leads, the variables are near ``NEVER``, and the difference is not exact.
    So the result is the mean of the differences, weighted by the probabilities exp(``normalised``).
    """
    difference = totals - normalised
    probability = normalised.exp()
    return (difference * probability).sum(-1)


def _log_likelihood(subtracted: Tensor, frame_counts: Tensor, label_counts: Tensor) -> Tensor:
    """Return the log-likelihood (B,), the sum of ``subtracted`` (B, D) up to the last cell's diagonal."""
    last_diagonal = frame_counts[:, None] - 1 + label_counts[:, None]
    is_padding = indices(subtracted.shape[1], subtracted) > last_diagonal
    return subtracted.masked_fill(is_padding, 0).sum(-1)
