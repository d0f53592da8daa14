"""The posteriors of the transducer loss with durations (TDT)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from speechtrain.losses.transducer_lattice import (
    NEVER,
    Joint,
    Posteriors,
    indices,
    inside_mask,
    lattice_field,
    skewed,
)


def posteriors_of_durations(
    joint: Joint, arcs: Sequence[Tensor], frames: Tensor, symbols: Tensor
) -> Posteriors:
    """Return the posteriors with durations.

    A recursion over the diagonals d = t + u, from the last one back, computes the shares of arcs. From the
    shares, a recursion over the diagonals from the first one on computes the occupancy.

    The share of an arc is a softmax over the arcs of its cell, which compares only near cells. Occupancies
    are sums of products of shares, without cancellation. So fp32 is exact enough.

    A cell has 2R arcs: first the blanks that lead 1 to R diagonals on, then the labels that lead 1 to R
    diagonals on. Arcs that do not exist have the share 0. A blank of duration d leads d diagonals on, and a
    label of duration d leads d + 1 diagonals on.
    """
    batch, length, positions = arcs[0].shape
    reach = joint.durations[-1] + 1
    onward, continues = _arcs_of_durations(joint, arcs, frames, symbols)
    loss, shares = _shares_backward(onward, continues, reach)
    has_no_path = (frames == 0) | (loss > -NEVER / 2)
    begins = (indices(positions, loss) == 0) & ~has_no_path[:, None]
    diagonal_occupancy = _occupancy_forward(shares, begins.to(loss.dtype), reach)

    inside = inside_mask((batch, length, positions), frames, symbols)
    occupancy = lattice_field(diagonal_occupancy, length) * inside
    label_share = lattice_field(shares[:, :, reach:].sum(2), length)
    duration_shares = _duration_shares(joint.durations, shares, length)
    return Posteriors(loss.masked_fill(has_no_path, 0), occupancy, label_share, duration_shares)


def _arcs_of_durations(
    joint: Joint, arcs: Sequence[Tensor], frames: Tensor, symbols: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities (T + P, B, 2R, P) of all arcs by diagonals, and which cells continue.

    The second tensor (T + P, B, P) is 0 for the cells in which paths end, else 1. These cells are in an
    additional frame of the lattice, after the last frame of the utterance.
    """
    batch, length, positions = arcs[0].shape
    label_counts = symbols[:, None, None]
    cell_arcs = _cell_arcs(joint, arcs, frames, label_counts)
    padded = F.pad(torch.stack(cell_arcs, 1), (0, 0, 0, 1), value=NEVER)
    onward = skewed(padded.flatten(0, 1), NEVER).view(batch, -1, length + positions, positions)
    is_end_frame = indices(length + 1, frames)[:, None] == frames[:, None, None]
    is_end = is_end_frame & (indices(positions, frames) == label_counts)
    continues = 1 - skewed(is_end.to(arcs[0].dtype), 0)
    return onward.permute(2, 0, 1, 3).contiguous(), continues.transpose(0, 1)


def _cell_arcs(joint: Joint, arcs: Sequence[Tensor], frames: Tensor, label_counts: Tensor) -> list[Tensor]:
    """Return the log-probabilities (B, T, P) of each of a cell's 2R arcs: the blanks, then the labels."""
    blank, label, *durations = arcs
    frames_left = (frames[:, None] - indices(blank.shape[1], frames))[..., None]
    position = indices(blank.shape[2], frames)
    no_label, is_after_labels = position >= label_counts, position == label_counts
    reach = joint.durations[-1] + 1
    no_arc = torch.full_like(blank, NEVER)
    blanks, labels = [no_arc] * reach, [no_arc] * reach
    for d, log_p in zip(joint.durations, durations, strict=True):
        log_p = log_p - joint.sigma
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
    for d in range(len(onward) - 1, -1, -1):
        log_share, beta = _diagonal_shares(onward[d], window)
        log_shares.append(log_share)
        beta = beta * continues[d]  # A path that has ended has the log-probability 0.
        window = torch.cat((beta[:, None], window[:, :-1]), 1)
        # Doing this for each diagonal would be a fifth of all operations.
        if d % 4 == 0:
            window, subtracted = _lower(window, subtracted)
    log_likelihood = window[:, 0, 0] + subtracted
    return -log_likelihood, torch.stack(log_shares[::-1]).exp()


def _diagonal_shares(onward: Tensor, window: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-shares (B, 2R, P) of the arcs of a diagonal, and its backward variables (B, P).

    ``onward`` (B, 2R, P) are the log-probabilities of the arcs. ``window`` (B, R, P) are the backward
    variables of the diagonals that the arcs lead to. A label leads to the next position.
    """
    paths = onward + torch.cat((window, F.pad(window, (-1, 1), value=NEVER)), 1)
    log_share = paths.log_softmax(1)
    return log_share, paths.amax(1) - log_share.amax(1)  # The difference is logsumexp, which Gaudi lacks.


def _lower(window: Tensor, subtracted: Tensor) -> tuple[Tensor, Tensor]:
    """Subtract the highest number of each row from ``window`` (B, R, P), and add it to ``subtracted`` (B,).

    So the numbers stay small.
    """
    highest = window.amax((1, 2))
    highest = highest * (highest > NEVER / 2)  # A row without a path stays.
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
        flow = diagonal[:, None] * share
        window = F.pad(window[:, 1:], (0, 0, 0, 1)) + flow[:, :reach] + F.pad(flow[:, reach:], (1, -1))
    return torch.stack(diagonals)


def _duration_shares(durations: tuple[int, ...], shares: Tensor, frames: int) -> tuple[Tensor, ...]:
    """Return for each duration the share (B, T, P) of the blank and of the label that have it."""
    reach = durations[-1] + 1
    fields = []
    for d in durations:
        share = shares[:, :, reach + d]  # of the label
        if d:
            share = share + shares[:, :, d - 1]  # of the blank
        fields.append(lattice_field(share, frames))
    return tuple(fields)
