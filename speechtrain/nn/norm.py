"""Normalisation over a batch with padding."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from speechtrain.nn.full_precision import at_least_fp32


class MaskedBatchNorm(nn.Module):
    """BatchNorm over the valid frames of a batch, with the state keys of ``nn.BatchNorm1d``.

    Frames beyond a row's length do not count, and their output is 0. AIDK's BatchNorm on input features
    counts padding frames, so its statistics depend on the padding of a batch.

    Without gradients, as in a frozen encoder, the norm computes in training as in evaluation.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, features: int, momentum: float = 0.1, eps: float = 1e-5) -> None:
        super().__init__()
        self.momentum, self.eps = momentum, eps
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_var", torch.ones(features))
        self.register_buffer("num_batches_tracked", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Normalise frames (B, T, F) of rows with ``lengths`` (B,). The statistics are fp32 or wider."""
        uses_batch = self.training and torch.is_grad_enabled()
        wide = at_least_fp32(x)
        is_valid = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
        mask = is_valid[..., None].to(wide.dtype)
        count = mask.sum().clamp(min=1.0)
        mean = (wide * mask).sum((0, 1)) / count if uses_batch else self.running_mean
        centred = wide - mean  # the only copy of the frames that backward needs
        variance = self.running_var
        if uses_batch:
            variance = (centred.square() * mask).sum((0, 1)) / count
            with torch.no_grad():
                # The trainer skips the update of a batch whose statistics are not finite. So they are not
                # added here either.
                unbiased = variance * count / (count - 1).clamp(min=1.0)
                is_finite = mean.isfinite() & unbiased.isfinite()
                self.running_mean.lerp_(torch.where(is_finite, mean, self.running_mean), self.momentum)
                self.running_var.lerp_(torch.where(is_finite, unbiased, self.running_var), self.momentum)
                self.num_batches_tracked += 1
        scale = torch.rsqrt(variance + self.eps) * self.weight
        y = (centred * scale + self.bias) * mask
        return y.to(x.dtype)
