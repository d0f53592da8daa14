"""The recursion of the transducer loss, and the loss and the posteriors of a lattice.

Each cell (t, u) has a forward variable alpha, the logarithm of the probability of all ways to the cell, and a
backward variable beta, the same of all ways from the cell to the end. ``blank`` and ``label`` are the
log-probabilities of the arcs that leave a cell:

    alpha(t, u) = logaddexp(alpha(t - 1, u) + blank(t - 1, u), alpha(t, u - 1) + label(t, u - 1))
    beta(t, u)  = logaddexp(beta(t + 1, u) + blank(t, u), beta(t, u + 1) + label(t, u))

They begin with alpha(0, 0) = 0 and beta(T - 1, U) = blank(T - 1, U), with which every path ends. The results
follow from them:

    loss              = -beta(0, 0)
    occupancy(t, u)   = exp(alpha(t, u) + beta(t, u) - beta(0, 0))
    label_share(t, u) = exp(label(t, u) + beta(t, u + 1) - beta(t, u))

With durations, an arc leads d frames on, and both sums have a term for each duration.

An utterance has no path if it has no frames, or if no durations fit its frames and labels. Its loss is 0. If
it has paths, and each of them needs an impossible class, its loss is +inf. In both cases it has no gradient.

Three modules compute this:

- ``transducer_frames`` goes from frame to frame in float64, on CPUs and GPUs.
- ``transducer_diagonals`` goes from diagonal to diagonal in fp32, on devices without float64.
- ``transducer_durations`` is for arcs with durations, on all devices.

Source: Graves, "Sequence transduction with recurrent neural networks" (2012), section 2.4.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, inf

HIGHEST_LOSS = 5e29
"""A higher loss contains the log-probability ``NEVER`` at least once.

It is half of -``NEVER``, because the other terms of a loss are far smaller.
"""


class Posteriors(NamedTuple):
    """The loss, and the posterior probabilities of cells and arcs if the labels are known.

    The share of an arc is the probability that a path continues by the arc, if it passes through its cell.
    """

    loss: Tensor  # (B,)
    occupancy: Tensor  # (B, T, P) probability that a path passes through the cell, 0 outside the lattice
    label_share: Tensor  # (B, T, P) the share of the next label
    duration_shares: tuple[Tensor, ...] = ()  # for each duration: (B, T, P) the sum of shares of its arcs

    def without_impossible(self, is_impossible: Tensor) -> Posteriors:
        """Return the posteriors in which the utterances ``is_impossible`` (B,) have no gradient.

        Their loss is +inf, and their occupancy is 0. Their label shares may be inf or NaN, so they become 0.
        Duration shares are results of a softmax, which are finite.
        """
        is_impossible_cell = is_impossible[:, None, None]
        return Posteriors(  # torch.compile of torch 2.7 does not trace _replace.
            loss=self.loss.masked_fill(is_impossible, inf),
            occupancy=self.occupancy.masked_fill(is_impossible_cell, 0),
            label_share=self.label_share.masked_fill(is_impossible_cell, 0),
            duration_shares=self.duration_shares,
        )
