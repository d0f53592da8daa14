"""The posteriors of the transducer loss with durations (TDT)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

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


def posteriors_of_durations(
    settings: Settings, arcs: Sequence[Tensor], frame_counts: Tensor, label_counts: Tensor
) -> Posteriors:
    """Return the posteriors of utterances with ``frame_counts`` (B,) frames and ``label_counts`` (B,) labels.

    ``arcs`` are the log-probabilities (B, T, P) of blank, next label and each duration.

    A recursion over the diagonals d = t + u, from the last one back, computes the shares of arcs. From the
    shares, a recursion over the diagonals from the first one on computes the occupancy.

    The share of an arc is a softmax over the arcs of its cell, which compares only near cells. Occupancies
    are sums of products of shares, without cancellation. So fp32 is exact enough.

    A cell has 2R arcs: first the blanks that lead 1 to R diagonals on, then the labels that lead 1 to R
    diagonals on. Arcs that do not exist have the share 0. A blank of duration d leads d diagonals on, and a
    label of duration d leads d + 1 diagonals on.
    """
    batch, frames, positions = arcs[0].shape
    reach = settings.reach
    onward, continues = _arcs_of_durations(settings, arcs, frame_counts, label_counts)
    loss, shares = _shares_backward(onward, continues, reach)
    has_no_path = (frame_counts == 0) | (loss > HIGHEST_LOSS)
    begins = (indices(positions, loss) == 0) & ~has_no_path[:, None]
    diagonal_occupancy = _occupancy_forward(shares, begins.to(loss.dtype), reach)

    inside = inside_mask((batch, frames, positions), frame_counts, label_counts)
    occupancy = _lattice_values(diagonal_occupancy, frames) * inside
    label_share = _lattice_values(shares[:, :, reach:].sum(2), frames)
    duration_shares = _duration_shares(settings, shares, frames)
    return Posteriors(loss.masked_fill(has_no_path, 0), occupancy, label_share, duration_shares)


def _arcs_of_durations(
    settings: Settings, arcs: Sequence[Tensor], frame_counts: Tensor, label_counts: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities (T + P, B, 2R, P) of all arcs by diagonals, and which cells continue.

    The second tensor (T + P, B, P) is 0 for the cells in which paths end, else 1. These cells are in an
    additional frame of the lattice, after the last frame of the utterance.
    """
    batch, frames, positions = arcs[0].shape
    last_position = label_counts[:, None, None]
    cell_arcs = torch.stack(_cell_arcs(settings, arcs, frame_counts, last_position), 1)  # (B, 2R, T, P)
    padded = F.pad(cell_arcs, (0, 0, 0, 1), value=NEVER)  # the additional frame
    diagonal_arcs = skewed(padded.flatten(0, 1), NEVER)  # (B · 2R, T + P, P)
    onward = diagonal_arcs.view(batch, -1, frames + positions, positions).permute(2, 0, 1, 3)
    is_end_frame = indices(frames + 1, frame_counts)[:, None] == frame_counts[:, None, None]
    is_end = is_end_frame & (indices(positions, frame_counts) == last_position)
    continues = 1 - skewed(is_end.to(arcs[0].dtype), 0)
    return onward.contiguous(), continues.transpose(0, 1)


def _cell_arcs(
    settings: Settings, arcs: Sequence[Tensor], frame_counts: Tensor, last_position: Tensor
) -> list[Tensor]:
    """Return the log-probabilities (B, T, P) of each of a cell's 2R arcs: the blanks, then the labels.

    ``last_position`` (B, 1, 1) is the position after all labels.
    """
    blank, label, *durations = arcs
    frames_left = (frame_counts[:, None] - indices(blank.shape[1], frame_counts))[..., None]
    position = indices(blank.shape[2], frame_counts)
    no_label, is_after_labels = position >= last_position, position == last_position
    no_arc = torch.full_like(blank, NEVER)
    blanks, labels = [no_arc] * settings.reach, [no_arc] * settings.reach
    for d, log_p in zip(settings.durations, durations, strict=True):
        log_p = log_p - settings.sigma
        labels[d] = (label + log_p).masked_fill((frames_left <= d) | no_label, NEVER)
        if d:  # A blank without duration does not exist.
            ends_path = (frames_left == d) & is_after_labels
            is_arc = (frames_left > d) | ends_path
            blanks[d - 1] = (blank + log_p).masked_fill(~is_arc, NEVER)
    return blanks + labels


def _shares_backward(onward: Tensor, continues: Tensor, reach: int) -> tuple[Tensor, Tensor]:
    """Return the loss (B,) and the shares (T + P, B, 2R, P) from the results of ``_arcs_of_durations``."""
    batch, _, positions = onward.shape[1:]
    # The backward variables (B, R, P) of the R diagonals after the present one, less ``subtracted`` (B,).
    window = onward.new_full((batch, reach, positions), NEVER)
    subtracted, log_shares = torch.zeros_like(window[:, 0, 0]), list[Tensor]()
    for d in reversed(range(len(onward))):
        log_share, beta = _diagonal_shares(onward[d], window)
        log_shares.append(log_share)
        beta = beta * continues[d]  # A path that has ended has the log-probability 0.
        window = torch.cat((beta[:, None], window[:, :-1]), 1)
        # For each diagonal, this would be a fifth of all operations. Within 4 diagonals, the numbers stay
        # small.
        if d % 4 == 0:
            window, subtracted = _shifted_to_zero(window, subtracted)
    log_likelihood = window[:, 0, 0] + subtracted
    return -log_likelihood, torch.stack(log_shares[::-1]).exp()


def _diagonal_shares(onward: Tensor, window: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-shares (B, 2R, P) of the arcs of a diagonal, and its backward variables (B, P).

    ``onward`` (B, 2R, P) are the log-probabilities of the arcs. ``window`` (B, R, P) are the backward
    variables of the diagonals that the arcs lead to. A label leads to the next position.
    """
    after_label = F.pad(window, (-1, 1), value=NEVER)
    paths = onward + torch.cat((window, after_label), 1)
    log_share = paths.log_softmax(1)
    # Gaudi lacks logsumexp. log_softmax subtracts it from all paths, also from the most likely path.
    logsumexp = paths.amax(1) - log_share.amax(1)
    return log_share, logsumexp


def _shifted_to_zero(window: Tensor, subtracted: Tensor) -> tuple[Tensor, Tensor]:
    """Subtract the highest number of each utterance from ``window`` (B, R, P). Add it to ``subtracted`` (B,).

    The highest number is then 0. An utterance without a path keeps its numbers.
    """
    highest = window.amax((1, 2))
    highest = highest * (highest > -HIGHEST_LOSS)
    return window - highest[:, None, None], subtracted + highest


def _occupancy_forward(shares: Tensor, begins: Tensor, reach: int) -> Tensor:
    """Return the occupancy (T + P, B, P) of the cells by diagonals.

    ``begins`` (B, P) is the probability that a path begins in a cell of the first diagonal.
    """
    # The occupancy (B, R, P) of the present diagonal and of the R − 1 diagonals after it, as far as arcs from
    # earlier diagonals lead there.
    window = F.pad(begins[:, None], (0, 0, 0, reach - 1))
    diagonals = []
    for share in shares.unbind():
        diagonal = window[:, 0]
        diagonals.append(diagonal)
        flow = diagonal[:, None] * share  # (B, 2R, P) the probability that a path continues by the arc
        next_window = F.pad(window[:, 1:], (0, 0, 0, 1))
        by_blank, by_label = flow[:, :reach], F.pad(flow[:, reach:], (1, -1))
        window = next_window + by_blank + by_label
    return torch.stack(diagonals)


def _duration_shares(settings: Settings, shares: Tensor, frames: int) -> tuple[Tensor, ...]:
    """Return for each duration the sum (B, T, P) of the shares of the blank and the label that have it."""
    duration_shares = []
    for d in settings.durations:
        share = shares[:, :, settings.reach + d]  # of the label
        if d:
            share = share + shares[:, :, d - 1]  # of the blank
        duration_shares.append(_lattice_values(share, frames))
    return tuple(duration_shares)


def _lattice_values(diagonals: Tensor, frames: int) -> Tensor:
    """Return values of diagonals (T + P, B, P) as values of the lattice (B, T, P)."""
    return straight(diagonals.transpose(0, 1), frames)
