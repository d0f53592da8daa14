"""The posteriors of a lattice by a recursion over its diagonals. ``transducer_recursion`` has the recursion.

Diagonal d has the cells with t + u = d. Every arc leads to the next diagonal, so a path has one cell on each,
and the variables of a diagonal may be normalised: their logsumexp is subtracted. They then stay small, and
fp32 is exact enough. The loss is the sum of what was subtracted, and the occupancy of a diagonal is the
softmax of alpha + beta.

If the padded lattice is turned by 180 degrees, its backward variables are forward variables. So one loop
computes both.

Gaudi needs this form, because it has no float64 and no logcumsumexp. In float64, the recursion of
``transducer_frames`` takes half of the time for short utterances, and as long for long ones
(docs/benchmarks/loss.md).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from speechtrain.compute_policy import GraphFunction, equal_parts
from speechtrain.losses.transducer_lattice import NEVER, indices, inside_mask, skewed, straight
from speechtrain.losses.transducer_recursion import HIGHEST_LOSS, Posteriors


def posteriors_by_diagonals(
    blank: Tensor, label: Tensor, frame_counts: Tensor, label_counts: Tensor
) -> Posteriors:
    """Return the posteriors in the type of the arguments.

    ``blank`` and ``label`` (B, T, P) are the log-probabilities of the blank and of the next label.
    ``frame_counts`` and ``label_counts`` (B,) are the lengths of the utterances.
    """
    frames = blank.shape[1]
    is_last = _is_last_cell(blank, frame_counts, label_counts)
    has_blank, has_label = _has_arcs(is_last, frame_counts, label_counts)
    # An impossible class has the log-probability -inf, and inf - inf would be NaN.
    blank = blank.clamp(min=NEVER).masked_fill(~has_blank, NEVER)
    label = label.clamp(min=NEVER).masked_fill(~has_label, NEVER)
    ends = skewed(is_last.to(blank.dtype), 0)
    blank_into, label_into, continues = _arcs_into(skewed(blank, NEVER), skewed(label, NEVER), ends)
    alpha, turned_beta, turned_totals, turned_log_odds = _normalised_variables(
        blank_into, label_into, continues
    )

    log_occupancy = alpha + turned_beta.flip(1, 2)
    occupancy = straight(log_occupancy.softmax(-1), frames)
    is_inside = inside_mask(occupancy.shape, frame_counts, label_counts)
    # In the turned lattice, the two arcs into a cell are the two arcs that leave its image.
    label_share = straight(turned_log_odds.flip(1, 2).sigmoid(), frames)
    loss = -_log_likelihood(turned_totals, turned_beta, frame_counts, label_counts)
    posteriors = Posteriors(
        loss=loss.masked_fill(frame_counts == 0, 0),
        occupancy=occupancy * is_inside,
        label_share=label_share * has_label,
    )
    return posteriors.without_impossible(posteriors.loss > HIGHEST_LOSS)


def _is_last_cell(cells: Tensor, frame_counts: Tensor, label_counts: Tensor) -> Tensor:
    """Return a mask (B, T, P) of the last cell of each utterance. The paths end with its blank."""
    _, frames, positions = cells.shape
    is_last_frame = indices(frames, frame_counts) == frame_counts[:, None] - 1
    is_last_position = indices(positions, label_counts) == label_counts[:, None]
    return is_last_frame[:, :, None] & is_last_position[:, None, :]


def _has_arcs(is_last: Tensor, frame_counts: Tensor, label_counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return masks (B, T, P): the cells that a blank leaves, and the cells that a label leaves."""
    _, frames, positions = is_last.shape
    frame = indices(frames, frame_counts)[:, None]
    position = indices(positions, label_counts)
    last_frame = frame_counts[:, None, None] - 1
    last_position = label_counts[:, None, None]
    has_blank = (frame < last_frame) & (position <= last_position)
    has_label = (frame <= last_frame) & (position < last_position)
    return has_blank | is_last, has_label


def _arcs_into(blank: Tensor, label: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the arcs into each cell from the previous diagonal, for the lattice and the turned lattice.

    ``blank`` and ``label`` (B, D, P) are the log-probabilities of the arcs that leave each cell. ``ends``
    (B, D, P) is 1 for the last cells, else 0.

    The results are (2, B, D, P): the log-probabilities of the blank and of the label into each cell, and
    whether the ways to the cell continue ways to the previous diagonal, as 1 or 0. In the cell where paths
    begin it is 0. The blank "into" this cell has the log-probability 0, or in the turned lattice the one of
    the blank with which paths end.
    """
    diagonal = indices(ends.shape[1], ends)[:, None]
    position = indices(ends.shape[2], ends)
    is_first_cell = diagonal + position == 0
    begins = is_first_cell.to(ends.dtype).expand_as(ends)  # A write into a slice would break the graph.
    blank_of_previous = F.pad(blank, (0, 0, 1, -1), value=NEVER)
    label_of_previous = F.pad(label, (1, -1, 1, -1), value=NEVER)
    blank_into = blank_of_previous * (1 - begins)
    return (
        torch.stack((blank_into, blank.flip(1, 2))),
        torch.stack((label_of_previous, label.flip(1, 2))),
        1 - torch.stack((begins, ends.flip(1, 2))),
    )


def _normalised_variables(
    blank_into: Tensor, label_into: Tensor, continues: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the recursion over the results of ``_arcs_into``. Return four tensors (B, D, P).

    They are the normalised variables of the lattice, and for the turned lattice the normalised variables, the
    variables before their normalisation, and the log-odds of the label against the blank into each cell.
    """
    steps = blank_into.shape[2]
    # A device records each part of the diagonals as a graph. Equal parts share one graph, so the last part is
    # padded.
    count, size = equal_parts(steps)
    padding = (0, 0, 0, count * size - steps)
    blank_into = F.pad(blank_into, padding)
    label_into = F.pad(label_into, padding)
    continues = F.pad(continues, padding)
    variables = torch.zeros_like(blank_into[:, :, 0])  # (2, B, P) of one diagonal
    parts = []
    for start in range(0, steps, size):
        part = slice(start, start + size)
        *results, variables = _part_of_diagonals(
            blank_into[:, :, part], label_into[:, :, part], continues[:, :, part], variables
        )
        parts.append(results)
    alpha, beta, totals, log_odds = zip(*parts, strict=True)
    return (
        torch.cat(alpha, 1)[:, :steps],
        torch.cat(beta, 1)[:, :steps],
        torch.cat(totals, 1)[:, :steps],
        torch.cat(log_odds, 1)[:, :steps],
    )


@GraphFunction
def _part_of_diagonals(
    blank_into: Tensor, label_into: Tensor, continues: Tensor, variables: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the four results of ``_normalised_variables`` for d diagonals, each (B, d, P).

    ``variables`` (2, B, P) are those of the diagonal before. The fifth result (2, B, P) are those of the last
    diagonal, for the next call.
    """
    alphas, betas, totals, by_labels, by_blanks = [], [], [], [], []
    for d in range(blank_into.shape[2]):
        # blank_into + continues * variables
        by_blank = torch.addcmul(blank_into[:, :, d], continues[:, :, d], variables)
        by_label = label_into[:, :, d] + F.pad(variables, (1, -1), value=NEVER)
        total = torch.logaddexp(by_blank, by_label)
        variables = total.log_softmax(-1)  # the total less its logsumexp over the diagonal
        alphas.append(variables[0])
        betas.append(variables[1])
        totals.append(total[1])
        by_labels.append(by_label[1])
        by_blanks.append(by_blank[1])
    log_odds = torch.stack(by_labels, 1) - torch.stack(by_blanks, 1)
    return torch.stack(alphas, 1), torch.stack(betas, 1), torch.stack(totals, 1), log_odds, variables


def _log_likelihood(
    turned_totals: Tensor, turned_beta: Tensor, frame_counts: Tensor, label_counts: Tensor
) -> Tensor:
    """Return the log-likelihood (B,): the sum of what the normalisation has subtracted.

    The arguments (B, D, P) are the variables before and after the normalisation. Their difference is the same
    in all cells of a diagonal. Cells without a path have variables near ``NEVER``, whose difference is not
    exact, so the mean over the cells is taken, weighted by the probabilities exp(``turned_beta``).
    """
    difference = turned_totals - turned_beta
    weighted = difference * turned_beta.exp()
    subtracted = weighted.sum(-1).flip(1)  # (B, D)
    last_diagonal = frame_counts[:, None] - 1 + label_counts[:, None]
    is_padding = indices(subtracted.shape[1], subtracted) > last_diagonal
    return subtracted.masked_fill(is_padding, 0).sum(-1)
