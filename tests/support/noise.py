"""Batches of noise."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from speechtrain.batch import Batch


def batch(*samples: int, labels: Sequence[Sequence[int]] = ()) -> Batch:
    """Return a row of noise for each number of samples, with its labels. By default it has one label."""
    rows, lengths = len(samples), torch.tensor(samples)
    audio = 0.1 * torch.randn(rows, max(samples), generator=torch.Generator().manual_seed(max(samples)))
    ids = [torch.tensor(row, dtype=torch.int64) for row in labels or [[1]] * rows]
    names = tuple(f"cut{row}" for row in range(rows))
    return Batch(
        audio=audio * (torch.arange(max(samples)) < lengths[:, None]),
        audio_lengths=lengths,
        labels=pad_sequence(ids, batch_first=True),
        label_lengths=torch.tensor([len(row) for row in ids]),
        weight=torch.ones(rows),
        keys=torch.arange(rows),
        ids=names,
        texts=names,
    )
