"""Contrastive loss of wav2vec 2.0 over the masked frames of each utterance, in static shapes.

Legend: B rows, M masked frames of a row (surplus included), K negatives, D width, G code groups.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from speechtrain.compute_policy import scaled
from speechtrain.nn.full_precision import at_least_fp32, full_precision

EXCLUDED = -(2.0**30)
"""Added to an excluded negative's score: its softmax is exactly 0, as with −inf, and every value finite."""


class Contrastive(NamedTuple):
    """Sums over the frames of weight 1, each () fp32. Only ``loss`` has a gradient."""

    loss: Tensor  # cross-entropy, nats
    correct: Tensor  # frames whose positive scores highest; upstream's ``corr``
    shared: Tensor  # negatives with the same code as their positive, out of ``frames`` × K
    distinct: Tensor  # number of different codes in each utterance, summed over the utterances
    frames: Tensor  # masked frames


def contrastive_loss(
    context: Tensor,
    targets: Tensor,
    ids: Tensor,
    negatives: Tensor,
    weight: Tensor,
    temperature: Tensor | float = 0.1,
) -> Contrastive:
    """Loss of finding each masked frame's target among K others (Baevski et al. 2020, equation 3).

    ``context`` and ``targets`` (B, M, D), ``ids`` (B, M, G) of the targets' codes, ``negatives``
    (B, M, K) positions in [0, M), ``weight`` (B, M) 1 or 0. Scores are cosines over ``temperature``.
    Negatives with the positive's code are excluded from the softmax. All is fp32 or wider under any autocast.

    One matrix product scores all pairs of an utterance, and the K drawn pairs are gathered from it:
    upstream's (K + 1, B, M, D) broadcast is not needed. A row's loss equals that of dynamic shapes, since
    surplus frames are never drawn and have weight 0. The cosine divides by the root of |x|² + 1e-16;
    ``torch.cosine_similarity`` clamps each norm at 1e-8, and the Gaudi port clamps the product of the
    norms. The results differ only for vectors of nearly zero length.
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
            # counts by comparison; argmax and argmin would be additional reductions
            best = (others > positive).sum(2) == 0
            worst = (others < positive).sum(2) == 0
            correct = best.to(weight.dtype) * (1 - worst.to(weight.dtype))
            shared = same.gather(2, index).sum(2)
            first = same.tril(-1).sum(2) == 0
            counted = (x.to(weight.dtype) * weight for x in (correct, shared, first))
            correct, shared, distinct = (x.sum() for x in counted)
    return Contrastive(loss, correct, shared, distinct=distinct, frames=weight.sum())


def _unit(x: Tensor) -> Tensor:
    # added, not clamped: the gradient of clamp is a torch.where; in other sums 1e-16 rounds away
    return x * ((x * x).sum(-1, keepdim=True) + 1e-16).rsqrt()


def _same_code(ids: Tensor) -> Tensor:
    """Whether two masked frames of an utterance have the same code in every group: (B, M, M)."""
    same = ids[:, :, None, 0] == ids[:, None, :, 0]
    for group in range(1, ids.shape[2]):
        same = same & (ids[:, :, None, group] == ids[:, None, :, group])
    return same


def bits(nats: Tensor) -> Tensor:
    """Convert nats () to bits, the unit of logged losses: chance among 101 is log2(101) = 6.658."""
    return scaled(nats, 1 / math.log(2))
