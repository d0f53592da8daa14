"""Contrastive loss of wav2vec 2.0 over the masked frames of each utterance, in static shapes.

Legend: B rows, M masked frames of a row (surplus included), K negatives, D width, G code groups.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from speechtrain.compute_policy import scale_scalar
from speechtrain.nn.full_precision import at_least_fp32, full_precision

EXCLUDED = -(2.0**30)
"""The summand of an excluded negative's score. Its softmax is 0, as with −inf, and all values are finite."""


class Contrastive(NamedTuple):
    """Sums over the frames of weight 1, each () fp32. Only ``loss`` has a gradient."""

    loss: Tensor  # cross-entropy, nats
    correct: Tensor  # frames whose positive scores highest, fairseq's ``corr``
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
    """Return the loss of finding each masked frame's target among K negatives (Baevski et al. 2020, eq. 3).

    ``context`` and ``targets`` are (B, M, D), ``ids`` (B, M, G) are the targets' codes, ``negatives``
    (B, M, K) are positions in [0, M), and ``weight`` (B, M) is 1 or 0. Scores are cosines divided by
    ``temperature``. Negatives with the positive's code are excluded from the softmax. All tensors are
    fp32 or wider under any autocast. A GPU may round the inputs of the matmul (``nn.full_precision``).

    One matmul scores all pairs of an utterance, and the K drawn pairs are gathered from its output. This
    avoids fairseq's (K + 1, B, M, D) broadcast. A row's loss equals the loss in dynamic shapes, because
    surplus frames are never drawn and have weight 0. The cosine divides by the root of |x|² + 1e-16.
    ``torch.cosine_similarity`` clamps each norm at 1e-8, and the Gaudi port clamps the product of the
    norms. The results differ only for vectors of nearly zero length.
    """
    with full_precision(context.device):
        context, targets, weight = (at_least_fp32(x) for x in (context, targets, weight))
        scores = torch.matmul(_unit(context) / temperature, _unit(targets).transpose(1, 2))  # (B, M, M)
        positive = scores.diagonal(dim1=1, dim2=2)[..., None]
        same_code = _same_code(ids).to(scores.dtype)
        index = negatives.long()
        negative = (scores + EXCLUDED * same_code).gather(2, index)
        logits = torch.cat([positive, negative], 2)  # (B, M, 1 + K), the target is class 0
        loss = -(F.log_softmax(logits, 2)[..., 0] * weight).sum()
        correct, shared, distinct = _weighted_counts(positive, negative, same_code, index, weight)
    return Contrastive(loss, correct, shared, distinct, frames=weight.sum())


@torch.no_grad()
def _weighted_counts(
    positive: Tensor, negative: Tensor, same_code: Tensor, index: Tensor, weight: Tensor
) -> list[Tensor]:
    """Count the correct frames, the negatives with their positive's code and the codes of the utterances."""
    is_correct = _is_correct(positive, negative, weight.dtype)
    shared = same_code.gather(2, index).sum(2)
    is_first_of_code = same_code.tril(-1).sum(2) == 0
    per_frame = (is_correct, shared, is_first_of_code)
    return [(count.to(weight.dtype) * weight).sum() for count in per_frame]


def _is_correct(positive: Tensor, negative: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 1 for the frames (B, M) whose positive scores highest, but 0 if all scores are equal."""
    # Comparisons are used because argmax and argmin would be additional reductions.
    is_best = (negative > positive).sum(2) == 0
    is_worst = (negative < positive).sum(2) == 0
    return is_best.to(dtype) * (1 - is_worst.to(dtype))


def _unit(x: Tensor) -> Tensor:
    """Return the vectors (…, D) scaled to length 1."""
    # 1e-16 is added because the gradient of a clamp is a torch.where. Larger sums are not changed by it.
    squared_length = (x * x).sum(-1, keepdim=True)
    return x * (squared_length + 1e-16).rsqrt()


def _same_code(ids: Tensor) -> Tensor:
    """Return whether two masked frames of an utterance have the same code in every group, (B, M, M)."""
    same = ids[:, :, None, 0] == ids[:, None, :, 0]
    for group in range(1, ids.shape[2]):
        same = same & (ids[:, :, None, group] == ids[:, None, :, group])
    return same


def nats_to_bits(nats: Tensor) -> Tensor:
    """Convert nats () to bits, the unit of logged losses. Chance among 101 is log2(101) = 6.658."""
    return scale_scalar(nats, 1 / math.log(2))
