"""The posteriors of a lattice whose arcs have durations (TDT). ``transducer_recursion`` has the other forms.

A blank of duration d > 0 leads from cell (t, u) to (t + d, u), and a label of duration d to (t + d, u + 1).
``p(d)`` is the log-probability of the duration in the cell:

    beta(t, u) = logsumexp over d of blank(t, u) + p(d) + beta(t + d, u)
                            and of label(t, u) + p(d) + beta(t + d, u + 1)

Paths end in an additional frame after the last one, in position U, where beta is 0. The share of an arc is
the softmax of these terms, which compares only near cells. The occupancies follow from the shares, from the
first cell on: a cell gives each of its arcs a share of its occupancy. These are sums of products without
cancellation, so fp32 is exact enough.

Cells are ordered by diagonals, the cells with t + u = d. R is the longest duration plus 1. A blank leads 1 to
R - 1 diagonals on, and a label 1 to R. So each cell has a table of 2R arcs: entry r < R is the blank that
leads r + 1 diagonals on, and entry R + r is the label that leads r + 1 diagonals on. Arcs that do not exist
have the log-probability ``NEVER`` and the share 0.

Source: Xu et al., "Efficient sequence transduction by jointly predicting tokens and durations" (ICML 2023).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from speechtrain.losses.transducer_lattice import NEVER, Settings, indices, inside_mask, skewed, straight
from speechtrain.losses.transducer_recursion import HIGHEST_LOSS, Posteriors

_IMPOSSIBLE = -1e25
"""The log-probability of an impossible class, instead of -inf, because inf - inf would be NaN.

It is far above ``NEVER``. So a loss shows whether there is no path, or only paths of impossible classes.
"""
_HIGHEST_POSSIBLE_LOSS = 1e24


def posteriors_of_durations(
    settings: Settings, arcs: Sequence[Tensor], frame_counts: Tensor, label_counts: Tensor
) -> Posteriors:
    """Return the posteriors in the type of ``arcs``.

    ``arcs`` are the log-probabilities (B, T, P) of blank, next label and each duration. ``frame_counts`` and
    ``label_counts`` (B,) are the lengths of the utterances.
    """
    blank, label, *durations = [log_p.clamp(min=_IMPOSSIBLE) for log_p in arcs]
    _, frames, positions = blank.shape
    reach = settings.reach
    table = _table_of_arcs(settings, blank, label, durations, frame_counts, label_counts)
    arcs_by_diagonal = _by_diagonals(table)
    continues = 1 - _path_ends(blank, frame_counts, label_counts)
    loss, shares = _shares(arcs_by_diagonal, continues, reach)

    has_no_path = (frame_counts == 0) | (loss > HIGHEST_LOSS)
    begins = (indices(positions, loss) == 0) & ~has_no_path[:, None]
    occupancy_by_diagonal = _occupancy(shares, begins.to(loss.dtype), reach)
    is_inside = inside_mask(blank.shape, frame_counts, label_counts)
    label_shares = shares[:, :, reach:]
    posteriors = Posteriors(
        loss=loss.masked_fill(has_no_path, 0),
        occupancy=_lattice_values(occupancy_by_diagonal, frames) * is_inside,
        label_share=_lattice_values(label_shares.sum(2), frames),
        duration_shares=_duration_shares(settings, shares, frames),
    )
    return posteriors.without_impossible(posteriors.loss > _HIGHEST_POSSIBLE_LOSS)


def _table_of_arcs(
    settings: Settings,
    blank: Tensor,
    label: Tensor,
    durations: Sequence[Tensor],
    frame_counts: Tensor,
    label_counts: Tensor,
) -> Tensor:
    """Return the log-probabilities (B, 2R, T, P) of the arcs of each cell."""
    _, frames, positions = blank.shape
    frames_left = (frame_counts[:, None] - indices(frames, frame_counts))[..., None]  # (B, T, 1)
    position = indices(positions, label_counts)
    last_position = label_counts[:, None, None]
    is_before_last = position < last_position
    is_last = position == last_position
    no_arc = torch.full_like(blank, NEVER)
    blanks = [no_arc] * settings.reach
    labels = [no_arc] * settings.reach
    for d, log_p in zip(settings.durations, durations, strict=True):
        log_p = log_p - settings.sigma
        has_label = (frames_left > d) & is_before_last
        labels[d] = (label + log_p).masked_fill(~has_label, NEVER)
        if d:  # A blank without duration does not exist.
            ends_path = (frames_left == d) & is_last
            has_blank = (frames_left > d) | ends_path
            blanks[d - 1] = (blank + log_p).masked_fill(~has_blank, NEVER)
    return torch.stack([*blanks, *labels], 1)


def _by_diagonals(table: Tensor) -> Tensor:
    """Return the table (B, 2R, T, P) of arcs by diagonals, (T + P, B, 2R, P), with the additional frame."""
    batch, arcs, frames, positions = table.shape
    with_end_frame = F.pad(table, (0, 0, 0, 1), value=NEVER)
    by_diagonal = skewed(with_end_frame.flatten(0, 1), NEVER)  # (B · 2R, T + P, P)
    by_utterance = by_diagonal.view(batch, arcs, frames + positions, positions)
    return by_utterance.permute(2, 0, 1, 3).contiguous()


def _path_ends(cells: Tensor, frame_counts: Tensor, label_counts: Tensor) -> Tensor:
    """Return by diagonals (T + P, B, P) a 1 for the cells in which paths end, else 0."""
    _, frames, positions = cells.shape
    is_end_frame = indices(frames + 1, frame_counts) == frame_counts[:, None]
    is_last_position = indices(positions, label_counts) == label_counts[:, None]
    is_end = is_end_frame[:, :, None] & is_last_position[:, None, :]
    return skewed(is_end.to(cells.dtype), 0).transpose(0, 1)


def _shares(arcs_by_diagonal: Tensor, continues: Tensor, reach: int) -> tuple[Tensor, Tensor]:
    """Return the loss (B,) and the shares (T + P, B, 2R, P) of all arcs, from the last diagonal back.

    ``continues`` (T + P, B, P) is 0 for the cells in which paths end, else 1.
    """
    batch, _, positions = arcs_by_diagonal.shape[1:]
    # The backward variables (B, R, P) of the next R diagonals, less ``subtracted`` (B,).
    next_betas = arcs_by_diagonal.new_full((batch, reach, positions), NEVER)
    subtracted = torch.zeros_like(next_betas[:, 0, 0])
    log_shares = []
    for d in reversed(range(len(arcs_by_diagonal))):
        log_share, beta = _diagonal_shares(arcs_by_diagonal[d], next_betas)
        log_shares.append(log_share)
        beta = beta * continues[d]  # A path that has ended has the log-probability 0.
        next_betas = torch.cat((beta[:, None], next_betas[:, :-1]), 1)
        # The variables stay small within 4 diagonals. Shifting each diagonal would be a fifth of all
        # operations.
        if d % 4 == 0:
            next_betas, subtracted = _shifted_to_zero(next_betas, subtracted)
    log_likelihood = next_betas[:, 0, 0] + subtracted
    return -log_likelihood, torch.stack(log_shares[::-1]).exp()


def _diagonal_shares(arcs: Tensor, next_betas: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-shares (B, 2R, P) of the arcs of a diagonal, and its backward variables (B, P).

    ``arcs`` (B, 2R, P) are their log-probabilities. ``next_betas`` (B, R, P) are the backward variables of
    the diagonals to which they lead.
    """
    betas_of_next_position = F.pad(next_betas, (-1, 1), value=NEVER)
    paths = arcs + torch.cat((next_betas, betas_of_next_position), 1)
    log_share = paths.log_softmax(1)
    # Gaudi lacks logsumexp. log_softmax subtracts it from each path, so also from the highest one.
    beta = paths.amax(1) - log_share.amax(1)
    return log_share, beta


def _shifted_to_zero(betas: Tensor, subtracted: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``betas`` (B, R, P) less the highest one of each utterance, and ``subtracted`` (B,) plus this.

    An utterance without a path keeps its variables.
    """
    highest = betas.amax((1, 2))
    highest = highest * (highest > -HIGHEST_LOSS)
    return betas - highest[:, None, None], subtracted + highest


def _occupancy(shares: Tensor, begins: Tensor, reach: int) -> Tensor:
    """Return the occupancy (T + P, B, P) of the cells by diagonals, from the first diagonal on.

    ``begins`` (B, P) is the probability that a path begins in a cell of the first diagonal.
    """
    # The occupancy (B, R, P) of this diagonal and of the R − 1 diagonals after it, as far as arcs of earlier
    # diagonals lead there.
    next_occupancies = F.pad(begins[:, None], (0, 0, 0, reach - 1))
    diagonals = []
    for share in shares.unbind():
        occupancy = next_occupancies[:, 0]
        diagonals.append(occupancy)
        flow = occupancy[:, None] * share  # (B, 2R, P)
        by_blank = flow[:, :reach]
        by_label = F.pad(flow[:, reach:], (1, -1))  # A label leads to the next position.
        later_occupancies = F.pad(next_occupancies[:, 1:], (0, 0, 0, 1))
        next_occupancies = later_occupancies + by_blank + by_label
    return torch.stack(diagonals)


def _duration_shares(settings: Settings, shares: Tensor, frames: int) -> tuple[Tensor, ...]:
    """Return for each duration the sum (B, T, P) of the shares of the blank and the label that have it."""
    duration_shares = []
    for d in settings.durations:
        share = shares[:, :, settings.reach + d]  # of the label, which leads d + 1 diagonals on
        if d:
            share = share + shares[:, :, d - 1]  # of the blank, which leads d diagonals on
        duration_shares.append(_lattice_values(share, frames))
    return tuple(duration_shares)


def _lattice_values(diagonals: Tensor, frames: int) -> Tensor:
    """Return values of diagonals (T + P, B, P) as values of the lattice (B, T, P)."""
    return straight(diagonals.transpose(0, 1), frames)
