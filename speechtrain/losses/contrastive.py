"""Contrastive loss of wav2vec 2.0 over the masked frames of each utterance, in static shapes.

Legend: B rows, M masked frames of a row (surplus included), K negatives, D width, G code groups.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from speechtrain.compute_policy import times
from speechtrain.nn.autocast import at_least_fp32, full_precision

EXCLUDED = -(2.0**30)
"""Added to the score of a negative that is no negative: its softmax is exactly 0, as with −inf, and
nothing that is not finite enters the graph."""


class Contrastive(NamedTuple):
    """Sums over the frames of weight 1, () fp32 each. Only ``loss`` has a gradient."""

    loss: Tensor  # cross-entropy, nats
    correct: Tensor  # frames whose positive scores highest; upstream's ``corr``
    shared: Tensor  # negatives that carry their positive's code; of ``frames`` × K
    distinct: Tensor  # distinct codes of each utterance: a frame can be told from ``distinct`` − 1 others
    frames: Tensor  # masked frames


def contrastive_loss(
    context: Tensor,
    targets: Tensor,
    ids: Tensor,
    negatives: Tensor,
    weight: Tensor,
    temperature: Tensor | float = 0.1,
) -> Contrastive:
    """Tell each masked frame's target from K others of its utterance (Baevski et al. 2020, equation 3).

    ``context`` and ``targets`` (B, M, D), ``ids`` (B, M, G) of the targets' codes, ``negatives``
    (B, M, K) positions in [0, M), ``weight`` (B, M) 1 or 0. Scores are cosines over ``temperature``.
    Negatives that carry the positive's exact code are left out of the softmax. fp32 whatever the
    autocast (fp64 stays).

    All pairs of an utterance are scored by one matrix product and the K drawn are gathered from it:
    upstream's (K + 1, B, M, D) broadcast never exists. A row's loss equals the dynamic one, since
    surplus frames are never drawn and weigh nothing. The cosine divides by the root of
    |x|² + 1e-16, where ``torch.cosine_similarity`` clamps each norm at 1e-8 and the Gaudi port the
    product of the norms: they differ for vectors of nearly no length only.
    """
    with full_precision(context.device):
        context, targets, weight = (at_least_fp32(x) for x in (context, targets, weight))
        scores = torch.matmul(_unit(context) / temperature, _unit(targets).transpose(1, 2))  # (B, M, M)
        positive = scores.diagonal(dim1=1, dim2=2)[..., None]
        same = _same_code(ids).to(scores.dtype)
        index = negatives.long()
        others = (scores + EXCLUDED * same).gather(2, index)
        logits = torch.cat([positive, others], 2)  # (B, M, 1 + K), the target is class 0
        loss = -(F.log_softmax(logits, 2)[..., 0] * weight).sum()
        with torch.no_grad():
            # counts by comparison, where argmax and argmin would be reductions of their own
            best = (others > positive).sum(2) == 0
            worst = (others < positive).sum(2) == 0
            correct = best.to(weight.dtype) * (1 - worst.to(weight.dtype))
            shared = same.gather(2, index).sum(2)
            first = same.tril(-1).sum(2) == 0
            sums = [(x.to(weight.dtype) * weight).sum() for x in (correct, shared, first)]
    return Contrastive(loss, sums[0], sums[1], sums[2], weight.sum())


def _unit(x: Tensor) -> Tensor:
    # added, not clamped: the gradient of clamp is a torch.where, and 1e-16 vanishes in the sum otherwise
    return x * ((x * x).sum(-1, keepdim=True) + 1e-16).rsqrt()


def _same_code(ids: Tensor) -> Tensor:
    """Whether two masked frames of an utterance carry the same code in every group: (B, M, M)."""
    same = ids[:, :, None, 0] == ids[:, None, :, 0]
    for group in range(1, ids.shape[2]):
        same = same & (ids[:, :, None, group] == ids[:, None, :, group])
    return same


def bits(nats: Tensor) -> Tensor:
    """Nats () in bits, as losses are logged: chance among 101 is log2(101) = 6.658."""
    return times(nats, 1 / math.log(2))
