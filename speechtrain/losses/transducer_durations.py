"""The posteriors of a lattice whose arcs have durations (TDT). ``transducer_recursion`` has the other forms.

A blank of duration d > 0 leads from cell (t, u) to (t + d, u), and a label of duration d to (t + d, u + 1).
``p(d)`` is the log-probability of the duration in the cell:

    beta(t, u) = logsumexp over d of blank(t, u) + p(d) + beta(t + d, u)
                            and of label(t, u) + p(d) + beta(t + d, u + 1)

Paths end in an additional frame after the last one, the end frame, in position U, where beta is 0.

The share of an arc is the softmax of these terms over the arcs of the cell. The betas of a softmax are of
diagonals that are at most R apart, so they differ little. The occupancies follow from the shares, from the
first cell on: a cell gives each of its arcs a share of its occupancy. These are sums of products without
cancellation. So fp32 is exact enough.

Cells are ordered by diagonals, the cells with t + u = d. A blank of duration d leads d diagonals on, and a
label d + 1. R, the reach, is the longest duration plus 1. So a cell has a table of 2R arcs: the blanks that
lead 1 to R diagonals on, of which the last never exists, and then the labels that lead 1 to R diagonals on.
Arcs that do not exist have the log-probability ``NEVER`` and the share 0.

With the end frame, a lattice has T + 1 frames and T + P diagonals.

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
_DIAGONALS_OF_A_SHIFT = 4


def posteriors_of_durations(
    settings: Settings, arcs: Sequence[Tensor], frame_counts: Tensor, label_counts: Tensor
) -> Posteriors:
    """Return the posteriors in the type of ``arcs``.

    ``arcs`` are the log-probabilities (B, T, P) of blank, next label and each duration. ``frame_counts`` and
    ``label_counts`` (B,) are the lengths of the utterances.
    """
    blank, label, *durations = [log_p.clamp(min=_IMPOSSIBLE) for log_p in arcs]
    frames, reach = blank.shape[1], settings.reach
    table = _table_of_arcs(settings, blank, label, durations, frame_counts, label_counts)
    path_ends = _path_ends(blank, frame_counts, label_counts)
    loss, shares = _loss_and_shares(_by_diagonals(table), path_ends, reach)

    has_no_path = (frame_counts == 0) | (loss > HIGHEST_LOSS)
    is_inside = inside_mask(blank.shape, frame_counts, label_counts)
    is_occupied = is_inside & ~has_no_path[:, None, None]
    label_shares = shares[:, :, reach:]
    posteriors = Posteriors(
        loss=loss.masked_fill(has_no_path, 0),
        occupancy=_of_frames(_occupancy(shares, reach), frames) * is_occupied,
        label_share=_of_frames(label_shares.sum(2), frames),
        duration_shares=_duration_shares(settings, shares, frames),
    )
    return posteriors.without_impossible(posteriors.loss > _HIGHEST_POSSIBLE_LOSS)


def _entry_of_blank(duration: int) -> int:
    """Return the entry of the table of arcs. A blank leads ``duration`` diagonals on, at least 1."""
    return duration - 1


def _entry_of_label(duration: int, reach: int) -> int:
    """Return the entry of the table of arcs. A label leads ``duration`` + 1 diagonals on."""
    return reach + duration


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
    is_before_last = position < last_position  # (B, 1, P)
    is_last = position == last_position
    no_arc = torch.full_like(blank, NEVER)
    table = [no_arc] * (2 * settings.reach)
    for duration, log_p in zip(settings.durations, durations, strict=True):
        log_p = log_p - settings.sigma
        stays_in_utterance = frames_left > duration
        has_label = stays_in_utterance & is_before_last
        label_arc = (label + log_p).masked_fill(~has_label, NEVER)
        table[_entry_of_label(duration, settings.reach)] = label_arc
        if duration == 0:  # A blank without duration does not exist.
            continue
        leads_to_end_frame = frames_left == duration
        ends_path = leads_to_end_frame & is_last
        has_blank = stays_in_utterance | ends_path
        blank_arc = (blank + log_p).masked_fill(~has_blank, NEVER)
        table[_entry_of_blank(duration)] = blank_arc
    return torch.stack(table, 1)


def _by_diagonals(table: Tensor) -> Tensor:
    """Return the table (B, 2R, T, P) of arcs by diagonals, (T + P, B, 2R, P)."""
    batch, arcs, frames, positions = table.shape
    with_end_frame = F.pad(table, (0, 0, 0, 1), value=NEVER)
    # ``skewed`` takes one leading axis.
    by_diagonal = skewed(with_end_frame.flatten(0, 1), NEVER)  # (B · 2R, T + P, P)
    by_utterance = by_diagonal.view(batch, arcs, frames + positions, positions)
    # The recursion reads one diagonal at a time, so its values must be neighbours in memory.
    return by_utterance.permute(2, 0, 1, 3).contiguous()


def _path_ends(cells: Tensor, frame_counts: Tensor, label_counts: Tensor) -> Tensor:
    """Return by diagonals (T + P, B, P) a 1 for the cells in which paths end, else 0.

    ``cells`` (B, T, P) has the shape of the lattice and the type of the result.
    """
    _, frames, positions = cells.shape
    is_end_frame = indices(frames + 1, frame_counts) == frame_counts[:, None]
    is_last_position = indices(positions, label_counts) == label_counts[:, None]
    is_end = is_end_frame[:, :, None] & is_last_position[:, None, :]
    return skewed(is_end.to(cells.dtype), 0).transpose(0, 1)


def _of_frames(diagonals: Tensor, frames: int) -> Tensor:
    """Return values by diagonals (T + P, B, P) as values of the lattice (B, T, P), without the end frame."""
    return straight(diagonals.transpose(0, 1), frames)


def _loss_and_shares(arcs_by_diagonal: Tensor, path_ends: Tensor, reach: int) -> tuple[Tensor, Tensor]:
    """Return the loss (B,) and the shares (T + P, B, 2R, P) of all arcs, from the last diagonal back.

    ``path_ends`` (T + P, B, P) is 1 for the cells in which paths end, else 0.
    """
    batch, _, positions = arcs_by_diagonal.shape[1:]
    is_no_end = 1 - path_ends
    # The betas (B, R, P) of the next R diagonals. So that they stay small, a number of each utterance is
    # subtracted from all of them, ``subtracted`` (B,).
    next_betas = arcs_by_diagonal.new_full((batch, reach, positions), NEVER)
    subtracted = torch.zeros_like(next_betas[:, 0, 0])
    log_shares = []
    for d in reversed(range(len(arcs_by_diagonal))):
        log_share, beta = _diagonal_shares(arcs_by_diagonal[d], next_betas)
        log_shares.append(log_share)
        # In the cell in which paths end, beta is 0. Less ``subtracted`` this is 0 too: before this cell, the
        # loop has met no path, so nothing is subtracted yet.
        beta = beta * is_no_end[d]
        next_betas = torch.cat((beta[:, None], next_betas[:, :-1]), 1)
        # Betas grow little in 4 diagonals. A diagonal has 9 operations, and a shift has 5.
        if d % _DIAGONALS_OF_A_SHIFT == 0:
            next_betas, subtracted = _shifted(next_betas, subtracted)
    log_likelihood = next_betas[:, 0, 0] + subtracted
    return -log_likelihood, torch.stack(log_shares[::-1]).exp()


def _diagonal_shares(arcs: Tensor, next_betas: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-shares (B, 2R, P) of the arcs of a diagonal, and its backward variables (B, P).

    ``arcs`` (B, 2R, P) are their log-probabilities. ``next_betas`` (B, R, P) are the backward variables of
    the diagonals to which they lead.
    """
    betas_after_label = F.pad(next_betas, (-1, 1), value=NEVER)  # of the next position
    terms = arcs + torch.cat((next_betas, betas_after_label), 1)
    log_share = terms.log_softmax(1)
    # Beta is the logsumexp of the terms, which Gaudi lacks. log_softmax subtracts it from every term. The
    # difference is taken at the highest term, where it is exact.
    beta = terms.amax(1) - log_share.amax(1)
    return log_share, beta


def _shifted(betas: Tensor, subtracted: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``betas`` (B, R, P) less the highest one of each utterance, and ``subtracted`` (B,) plus this.

    The betas of an utterance stay as they are while no path leads on from any of the cells.
    """
    highest = betas.amax((1, 2))
    has_path = highest > -HIGHEST_LOSS
    shift = highest * has_path
    return betas - shift[:, None, None], subtracted + shift


def _occupancy(shares: Tensor, reach: int) -> Tensor:
    """Return the occupancy (T + P, B, P) of the cells by diagonals, from the first diagonal on.

    ``shares`` (T + P, B, 2R, P) are the shares of the arcs. All paths begin in the first cell. Utterances
    without a path have arbitrary occupancies.
    """
    _, batch, _, positions = shares.shape
    first_cell = shares.new_ones(batch, 1, 1)
    # The occupancies (B, R, P) of this diagonal and of the R - 1 diagonals after it, as far as they come from
    # diagonals before this one.
    next_occupancies = F.pad(first_cell, (0, positions - 1, 0, reach - 1))
    diagonals = []
    for share in shares.unbind():
        occupancy = next_occupancies[:, 0]
        diagonals.append(occupancy)
        flow = occupancy[:, None] * share  # (B, 2R, P)
        flow_by_blank = flow[:, :reach]
        flow_by_label = F.pad(flow[:, reach:], (1, -1))  # A label leads to the next position.
        # The next diagonal comes first now, and the last one of the R diagonals is new.
        later_occupancies = F.pad(next_occupancies[:, 1:], (0, 0, 0, 1))
        next_occupancies = later_occupancies + flow_by_blank + flow_by_label
    return torch.stack(diagonals)


def _duration_shares(settings: Settings, shares: Tensor, frames: int) -> tuple[Tensor, ...]:
    """Return for each duration the sum (B, T, P) of the shares of the blank and the label that have it."""
    duration_shares = []
    for duration in settings.durations:
        share = shares[:, :, _entry_of_label(duration, settings.reach)]
        if duration > 0:
            share = share + shares[:, :, _entry_of_blank(duration)]
        duration_shares.append(_of_frames(share, frames))
    return tuple(duration_shares)
