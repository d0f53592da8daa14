"""Contrastive loss of wav2vec 2.0 over the masked frames of each utterance, in static shapes.

Legend: B rows, M masked frames of a row, K negatives, D width, G code groups. If a row has fewer masked
frames than M, the others are surplus frames, which have the weight 0.
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
"""It is added to the score of an excluded negative, whose softmax is then 0. Unlike −inf, it is finite."""


class Contrastive(NamedTuple):
    """Sums over the frames of weight 1, each () fp32 or wider. Only ``loss`` has a gradient."""

    loss: Tensor  # cross-entropy, in nats
    correct: Tensor  # number of frames whose positive has the highest score, fairseq's ``corr``
    shared: Tensor  # number of negatives with the code of their positive, at most ``frames`` × K
    distinct: Tensor  # number of different codes in each utterance, summed over the utterances
    frames: Tensor  # number of masked frames


def contrastive_loss(
    context: Tensor,
    targets: Tensor,
    ids: Tensor,
    negatives: Tensor,
    weight: Tensor,
    temperature: Tensor | float = 0.1,
) -> Contrastive:
    """Return the loss of finding each masked frame's target among K negatives (Baevski et al. 2020, eq. 3).

    - ``context`` and ``targets`` are (B, M, D).
    - ``ids`` (B, M, G) are the codes of the targets.
    - ``negatives`` (B, M, K) are the indices, from 0 to M − 1, of the targets that are the negatives.
    - ``weight`` (B, M) is 1 or 0.

    Scores are cosines divided by ``temperature``. Negatives with the code of the positive are excluded from
    the softmax. All tensors are fp32 or wider under any autocast. A GPU may round the inputs of the matmul
    (``nn.full_precision``).

    One matmul computes the scores of all pairs of an utterance. The K negatives of each frame are gathered
    from its output. This avoids fairseq's (K + 1, B, M, D) broadcast. Surplus frames do not change the loss,
    because they are never negatives of other frames.

    The cosine divides by the root of |x|² + 1e-16. ``torch.cosine_similarity`` clamps each norm at 1e-8, and
    the Gaudi port clamps the product of the norms. The results differ only for vectors of nearly zero length.
    """
    with full_precision(context.device):
        context, targets, weight = (at_least_fp32(x) for x in (context, targets, weight))
        scores = torch.matmul(_unit(context) / temperature, _unit(targets).transpose(1, 2))  # (B, M, M)
        positive_score = scores.diagonal(dim1=1, dim2=2)[..., None]  # (B, M, 1)
        is_same_code = _is_same_code(ids).to(scores.dtype)
        negatives = negatives.long()
        negative_scores = (scores + EXCLUDED * is_same_code).gather(2, negatives)  # (B, M, K)
        logits = torch.cat([positive_score, negative_scores], 2)
        positive_log_p = F.log_softmax(logits, 2)[..., 0]
        loss = -(positive_log_p * weight).sum()
        correct, shared, distinct = _weighted_counts(
            positive_score, negative_scores, is_same_code, negatives, weight
        )
    return Contrastive(loss, correct, shared, distinct, frames=weight.sum())


@torch.no_grad()
def _weighted_counts(
    positive_score: Tensor, negative_scores: Tensor, is_same_code: Tensor, negatives: Tensor, weight: Tensor
) -> list[Tensor]:
    """Return the sums ``correct``, ``shared`` and ``distinct`` of ``Contrastive``."""
    is_correct = _is_correct(positive_score, negative_scores, weight.dtype)
    shared = is_same_code.gather(2, negatives).sum(2)
    # A code is counted in the first frame that has it.
    is_first_of_code = is_same_code.tril(-1).sum(2) == 0
    counts = (is_correct, shared, is_first_of_code)
    return [(count.to(weight.dtype) * weight).sum() for count in counts]


def _is_correct(positive_score: Tensor, negative_scores: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 1 for the frames (B, M) whose positive has the highest score, else 0.

    A frame whose scores are all equal has 0, because its positive does not stand out.
    """
    # Comparisons are used because argmax and argmin would be additional reductions.
    is_best = (negative_scores > positive_score).sum(2) == 0
    is_worst = (negative_scores < positive_score).sum(2) == 0
    return is_best.to(dtype) * (1 - is_worst.to(dtype))


def _unit(x: Tensor) -> Tensor:
    """Return the vectors (…, D) scaled to length 1."""
    # 1e-16 is added instead of a clamp, whose gradient is a torch.where. It does not change larger sums.
    squared_length = (x * x).sum(-1, keepdim=True)
    return x * (squared_length + 1e-16).rsqrt()


def _is_same_code(ids: Tensor) -> Tensor:
    """Return whether two masked frames of an utterance have the same code in every group: (B, M, M)."""
    same = ids[:, :, None, 0] == ids[:, None, :, 0]
    for group in range(1, ids.shape[2]):
        same = same & (ids[:, :, None, group] == ids[:, None, :, group])
    return same


def nats_to_bits(nats: Tensor) -> Tensor:
    """Convert nats () to bits, the unit of logged losses.

    A model that guesses among the positive and 100 negatives has a loss of log2(101) = 6.658 bits.
    """
    return scale_scalar(nats, 1 / math.log(2))
