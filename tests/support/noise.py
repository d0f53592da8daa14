"""Batches of noise."""

from __future__ import annotations

import torch

from speechtrain.batch import Batch


def batch(samples: int) -> Batch:
    lengths = torch.tensor([samples, samples // 2])
    audio = 0.1 * torch.randn(2, samples, generator=torch.Generator().manual_seed(samples))
    one = torch.ones(2, dtype=torch.int64)
    return Batch(audio, lengths, one[:, None], one, torch.ones(2), one, ("a", "b"), ("a", "b"))
