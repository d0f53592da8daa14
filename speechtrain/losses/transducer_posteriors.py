"""The loss and the posteriors of a lattice, from the log-probabilities of its arcs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from speechtrain.compute_policy import GraphFunction, equal_parts
from speechtrain.losses.transducer_durations import posteriors_of_durations
from speechtrain.losses.transducer_lattice import (
    HIGHEST_LOSS,
    NEVER,
    Posteriors,
    Settings,
    indices,
    inside_mask,
    skewed,
    straight,
)


def posteriors_of_arcs(
    settings: Settings, arcs: Sequence[Tensor], frame_counts: Tensor, label_counts: Tensor, is_static: bool
) -> Posteriors:
    """Return the posteriors of utterances with ``frame_counts`` (B,) frames and ``label_counts`` (B,) labels.

    ``arcs`` are the log-probabilities (B, T, P) of blank, next label and each duration. An utterance with an
    impossible label has the loss +inf, and an occupancy of 0, so that it has no gradient.
    """
    # The log-probability of an impossible class, whose bias is -inf, becomes finite.
    arcs = [log_p.clamp(min=NEVER) for log_p in arcs]
    if settings.durations:
        if not is_static:
            arcs = [log_p.double() for log_p in arcs]
        posteriors = posteriors_of_durations(settings, arcs, frame_counts, label_counts)
        is_impossible = _has_impossible_label(arcs[1], frame_counts, label_counts)
    else:
        recursion = _posteriors_by_diagonals if is_static else posteriors_by_frames
        posteriors = recursion(arcs[0], arcs[1], frame_counts, label_counts)
        is_impossible = posteriors.loss > HIGHEST_LOSS
    is_impossible_cell = is_impossible[:, None, None]
    return Posteriors(  # torch.compile of torch 2.7 does not trace _replace.
        loss=posteriors.loss.masked_fill(is_impossible, torch.inf),
        occupancy=posteriors.occupancy.masked_fill(is_impossible_cell, 0),
        label_share=posteriors.label_share.masked_fill(is_impossible_cell, 0),
        duration_shares=posteriors.duration_shares,
    )


def _has_impossible_label(label: Tensor, frame_counts: Tensor, label_counts: Tensor) -> Tensor:
    """Return whether each utterance (B,) has a label that is impossible in all of its frames.

    ``label`` (B, T, P) is the log-probability of the next label.
    """
    _, frames, positions = label.shape
    has_frame = (indices(frames, frame_counts) < frame_counts[:, None])[..., None]
    has_label = indices(positions, label_counts) < label_counts[:, None]
    highest = label.masked_fill(~has_frame, NEVER).amax(1)
    return ((highest <= NEVER) & has_label).any(1) & (frame_counts > 0)


def posteriors_by_frames(
    blank: Tensor, label: Tensor, frame_counts: Tensor, label_counts: Tensor
) -> Posteriors:
    """Return the posteriors, by a recursion over the frames of the lattice.

    All label arcs within a frame are one logcumsumexp. The recursion is in float64, so differences of
    cumulative sums still have the precision of fp32. The backward variable beta is the forward variable alpha
    of the lattice turned by 180 degrees, so one loop computes both.
    """
    blank, label = blank.double(), label.double()
    batch, frames, positions = blank.shape
    turned_cells = _turned_cells(frames, positions, frame_counts, label_counts)
    alpha, turned_beta = _forward_by_frames(*_arcs_into_frames(blank, label, turned_cells))
    beta = _turned(turned_beta, turned_cells)

    inside = inside_mask((batch, frames, positions), frame_counts, label_counts)
    log_likelihood = beta[:, 0, 0]
    log_occupancy = alpha + beta - beta[:, :1, :1]
    has_label = indices(positions, blank) < label_counts[:, None]
    has_label_arc = inside & has_label[:, None]
    next_beta = F.pad(beta, (-1, 1))  # of the next position
    log_share = label + next_beta - beta
    return Posteriors(
        loss=(-log_likelihood).masked_fill(frame_counts == 0, 0),
        occupancy=log_occupancy.exp().masked_fill(~inside, 0),
        label_share=log_share.exp().masked_fill(~has_label_arc, 0),
    )


def _arcs_into_frames(blank: Tensor, label: Tensor, turned_cells: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of the blank arc and of the label arc into each cell.

    Each is (2, B, T, P), for the lattice and for the turned lattice. A blank leads from the previous frame,
    and a label from the previous position. The value for a label into position 0 has no effect.
    """
    by_blank = torch.stack((F.pad(blank, (0, 0, 1, -1)), _turned(blank, turned_cells)))
    by_label = torch.stack((F.pad(label, (1, -1)), _turned(label, turned_cells)))
    return by_blank, by_label


def _turned_cells(frames: int, positions: int, frame_counts: Tensor, label_counts: Tensor) -> Tensor:
    """Return for each cell the flat index (B, T · P) of its image in the lattice turned by 180 degrees."""
    turned_frame = (frame_counts[:, None] - 1 - indices(frames, frame_counts)).clamp(min=0)
    turned_position = (label_counts[:, None] - indices(positions, label_counts)).clamp(min=0)
    return (turned_frame[:, :, None] * positions + turned_position[:, None, :]).flatten(1)


def _turned(cells: Tensor, turned_cells: Tensor) -> Tensor:
    """Return the values ``cells`` (B, T, P) in the order of the lattice turned by 180 degrees."""
    return cells.flatten(1).gather(1, turned_cells).view(cells.shape)


def _forward_by_frames(by_blank: Tensor, by_label: Tensor) -> Tensor:
    """Return the forward variables (2, B, T, P) from the results of ``_arcs_into_frames``.

    The base of a cell is the log-probability of a path that emits all labels up to the cell in the cell's
    frame. Within a frame, the forward variable minus the base is the logcumsumexp, over positions, of the
    paths that enter the frame.
    """
    base = by_label.cumsum(-1)
    start = torch.full_like(base[:, :, :1], -torch.inf)
    start[..., 0] = 0
    previous_base = torch.cat((torch.zeros_like(start), base[:, :, :-1]), 2)
    # Three terms lead from the previous frame to a frame: the blank arcs are added, the frame's base is
    # subtracted, and the previous frame's base is added. They are summed here for all frames, so that an
    # iteration has only one addition.
    steps = by_blank - base + previous_base
    forward_minus_base = start[:, :, 0]  # (2, B, P) of one frame
    frames = []
    for t in range(by_blank.shape[2]):
        forward_minus_base = torch.logcumsumexp(forward_minus_base + steps[:, :, t], -1)
        frames.append(forward_minus_base)
    return torch.stack(frames, 2) + base


def _posteriors_by_diagonals(
    blank: Tensor, label: Tensor, frame_counts: Tensor, label_counts: Tensor
) -> Posteriors:
    """Return the posteriors, by a recursion over the diagonals d = t + u of the lattice.

    A path crosses each diagonal once, so the variables of a diagonal can be normalised. They then stay small,
    so fp32 is exact enough, and the occupancy is a softmax. One loop computes the forward variable alpha, and
    the backward variable beta, which is the forward variable of the padded lattice turned by 180 degrees.
    """
    batch, frames, positions = blank.shape
    no_blank, no_label, is_last = _arc_masks(frames, positions, frame_counts, label_counts)
    blank = skewed(blank.masked_fill(no_blank, NEVER), NEVER)
    label = skewed(label.masked_fill(no_label, NEVER), NEVER)
    arcs = _arcs_into_diagonals(blank, label, skewed(is_last.to(blank.dtype), 0))
    alpha, beta, totals, log_odds = _normalised_diagonals(*arcs)

    inside = inside_mask((batch, frames, positions), frame_counts, label_counts)
    log_occupancy = alpha + beta.flip(1, 2)
    occupancy = straight(log_occupancy.softmax(-1), frames) * inside
    label_share = straight(log_odds.flip(1, 2).sigmoid(), frames) * ~no_label
    last_diagonal = frame_counts[:, None] - 1 + label_counts[:, None]
    loss = _loss_of_diagonals(totals, beta, last_diagonal)
    return Posteriors(loss.masked_fill(frame_counts == 0, 0), occupancy, label_share)


def _loss_of_diagonals(totals: Tensor, beta: Tensor, last_diagonal: Tensor) -> Tensor:
    """Return the loss (B,): minus the sum of all logarithms that the normalisation has subtracted.

    ``totals`` and ``beta`` (B, D, P) are the variables before and after normalisation. Their difference is
    the same logarithm in all cells of a diagonal, but it is not exact in cells without a path, whose
    variables are about ``NEVER``. So the logarithm is computed as the mean over the cells with the weights
    exp(``beta``), whose sum is 1. Diagonals after ``last_diagonal`` (B, 1) are padding.
    """
    weighted = (totals - beta) * beta.exp()
    subtracted = weighted.sum(-1).flip(1)
    is_padding = indices(subtracted.shape[1], subtracted) > last_diagonal
    return -subtracted.masked_fill(is_padding, 0).sum(-1)


def _arc_masks(
    frames: int, positions: int, frame_counts: Tensor, label_counts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return masks (B, T, P): cells without a blank arc, cells without a label arc, and the last cells.

    The last cell of an utterance has a blank arc, with which its paths end.
    """
    frame = indices(frames, frame_counts)[:, None]
    position = indices(positions, label_counts)
    last_frame, last_position = frame_counts[:, None, None] - 1, label_counts[:, None, None]
    is_last = (frame == last_frame) & (position == last_position)
    no_blank = ((frame >= last_frame) | (position > last_position)) & ~is_last
    no_label = (frame > last_frame) | (position >= last_position)
    return no_blank, no_label, is_last


def _arcs_into_diagonals(blank: Tensor, label: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the arcs into each cell from the previous diagonal, for the lattice and the turned lattice.

    ``blank`` and ``label`` (B, D, P) are the log-probabilities of the arcs from each cell. ``ends`` (B, D, P)
    is 1 for the last cells, else 0. The results are (2, B, D, P): the log-probabilities of the blank arc and
    of the label arc, and a factor of the variables of the previous diagonal.

    No arc leads to the first cell of a path. There the factor is 0, so the sum of blank arc and previous
    variable is the value of the blank arc alone: log-probability 0 in the lattice, and the blank with which
    the path ends in the turned lattice. In all other cells the factor is 1.
    """
    diagonal, position = indices(ends.shape[1], ends), indices(ends.shape[2], ends)
    is_first = diagonal[:, None] + position == 0
    begins = is_first.to(ends.dtype).expand_as(ends)  # A write into a slice would break the recorded graph.
    previous_blank = F.pad(
        blank, (0, 0, 1, -1), value=NEVER
    )  # of the previous diagonal, in the same position
    by_blank = torch.stack((previous_blank * (1 - begins), blank.flip(1, 2)))
    previous_label = F.pad(label, (1, -1, 1, -1), value=NEVER)  # of the previous diagonal and position
    by_label = torch.stack((previous_label, label.flip(1, 2)))
    return by_blank, by_label, 1 - torch.stack((begins, ends.flip(1, 2)))


def _normalised_diagonals(
    by_blank: Tensor, by_label: Tensor, factors: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the recursion over the results of ``_arcs_into_diagonals``.

    Returns four tensors (B, D, P). The first two are the variables of the lattice and of the turned lattice,
    normalised over each diagonal. The others are, for the turned lattice, the variables before normalisation
    and the log-odds of label against blank.
    """
    diagonal = torch.zeros_like(by_blank[:, :, 0])
    steps = by_blank.shape[2]
    # Each part is one recorded graph. All parts have ``size`` diagonals, so the last part needs padding.
    count, size = equal_parts(steps)
    padding = count * size - steps
    if padding:
        by_blank = F.pad(by_blank, (0, 0, 0, padding))
        by_label = F.pad(by_label, (0, 0, 0, padding))
        factors = F.pad(factors, (0, 0, 0, padding))
    parts = []
    for start in range(0, steps, size):
        part = slice(start, start + size)
        *results, diagonal = _diagonals_part(
            by_blank[:, :, part], by_label[:, :, part], factors[:, :, part], diagonal
        )
        parts.append(results)
    alpha, beta, totals, log_odds = (torch.cat(pieces, 1)[:, :steps] for pieces in zip(*parts, strict=True))
    return alpha, beta, totals, log_odds


@GraphFunction
def _diagonals_part(
    by_blank: Tensor, by_label: Tensor, factors: Tensor, diagonal: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the four results of ``_normalised_diagonals`` for d diagonals, each (B, d, P).

    ``diagonal`` (2, B, P) are the variables of the diagonal before the d diagonals. The fifth result
    (2, B, P) are the variables of the last diagonal, for the next call.
    """
    columns = []
    for d in range(by_blank.shape[2]):
        paths_by_blank = torch.addcmul(by_blank[:, :, d], factors[:, :, d], diagonal)
        paths_by_label = by_label[:, :, d] + F.pad(diagonal, (1, -1), value=NEVER)
        total = torch.logaddexp(paths_by_blank, paths_by_label)
        diagonal = total.log_softmax(-1)
        columns.append((diagonal[0], diagonal[1], total[1], paths_by_label[1], paths_by_blank[1]))
    alpha, beta, totals, labels, blanks = (torch.stack(column, 1) for column in zip(*columns, strict=True))
    return alpha, beta, totals, labels - blanks, diagonal
