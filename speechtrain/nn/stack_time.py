"""StackTime: fewer and wider frames. Legend: B rows, T frames, H features, k factor."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speechtrain.errors import ConfigError


def stack_time(x: Tensor, factor: int) -> Tensor:
    """Concatenate each ``factor`` successive frames: (B, T, H) to (B, ceil(T/k), k·H), with zeros beyond T.

    Frame j of the output has the frames kj, kj+1, ..., kj+k−1, in this order. Padding and reshaping copy each
    value once. A concatenation of k shifted copies of the sequence would allocate k² times as many values.
    """
    rows, frames, width = x.shape
    groups = (frames + factor - 1) // factor  # ONNX rounds the quotient of a negative number towards 0.
    padding = groups * factor - frames
    return F.pad(x, (0, 0, 0, padding)).reshape(rows, groups, factor * width)


class StackTime(nn.Module):
    """Stack ``factor`` successive frames of each row into one (MLPerf RNN-T).

    Frames beyond a row's length are set to 0 first, so the last group of a row never contains its padding.
    """

    def __init__(self, factor: int) -> None:
        super().__init__()
        if factor < 1:
            raise ConfigError(f"StackTime.factor is {factor}. It must be 1 or more")
        self.factor = factor

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Stack (B, T, H) with lengths (B,) to (B, ceil(T/k), k·H) with lengths (B,) = ceil(lengths / k)."""
        if self.factor == 1:
            return x, lengths
        is_valid = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
        stacked = stack_time(x * is_valid[:, :, None].to(x.dtype), self.factor)
        return stacked, self.lengths(lengths)

    def lengths(self, lengths: Tensor) -> Tensor:
        """Return the lengths (B,) of the stacked frames: ceil(lengths / k)."""
        return torch.div(lengths + (self.factor - 1), self.factor, rounding_mode="floor")
