"""Finds by trial on which samples the frames of an encoder depend."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Encode = Callable[[Tensor], Tensor]
"""Maps audio (1, S) to frames (1, T, W)."""


def dependence(encode: Encode, audio: Tensor, block: int) -> Tensor:
    """Return whether frame t changes if the samples of a block of ``audio`` (1, S) change: (blocks, T).

    A block has ``block`` samples. The last one may be shorter.
    """
    frames = encode(audio)
    rows = []
    for start in range(0, audio.shape[1], block):
        changed = audio.clone()
        changed[:, start : start + block] += 0.1 * torch.randn(changed[:, start : start + block].shape)
        difference = (encode(changed) - frames).abs().amax(2)[0]
        rows.append(difference > 0)
    return torch.stack(rows)


def last_blocks(depends: Tensor) -> list[int]:
    """Return the last block on which each frame depends, for the result (blocks, T) of ``dependence``."""
    blocks = torch.arange(len(depends))[:, None]
    return torch.where(depends, blocks, -1).amax(0).tolist()
