"""Trimming the silence at both ends of recordings. Legend: B rows, S samples."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def trim_silence(
    audio: Tensor, lengths: Tensor, decibels: float = -60.0, window: int = 2048
) -> tuple[Tensor, Tensor]:
    """Return audio (B, S) without leading and trailing silence, padded with zeros, and its lengths (B,).

    A position is silent if the mean power of the last ``window`` samples is below the row's maximum of this
    power by more than −``decibels``. The result starts one window before the first position that is not
    silent. A row of zeros does not change (NVIDIA DALI, NonsilentRegion with its defaults).
    """
    samples = audio.shape[1]
    position = torch.arange(samples, device=audio.device)
    is_valid = position < lengths[:, None]
    is_loud = _is_loud(audio, is_valid, decibels, window)
    first_loud = torch.where(is_loud, position, samples).amin(1)
    end = torch.where(is_loud, position + 1, 0).amax(1)
    start = (first_loud - (window - 1)).clamp(min=0)
    new_lengths = (end - start).clamp(min=0)
    source = (position + start[:, None]).clamp(max=samples - 1)
    return audio.gather(1, source) * (position < new_lengths[:, None]), new_lengths


def _is_loud(audio: Tensor, is_valid: Tensor, decibels: float, window: int) -> Tensor:
    """Return whether each position (B, S) is valid and not silent, as ``trim_silence`` defines it."""
    squares = (audio.float() * is_valid).square()
    power = _moving_sum(squares, window) * is_valid
    threshold = power.max(1, keepdim=True).values * 10.0 ** (decibels / 10.0)
    is_loud: Tensor = (power >= threshold) & is_valid
    return is_loud


def _moving_sum(values: Tensor, window: int) -> Tensor:
    """Return the sum of the last ``window`` values at each position of (B, S).

    The sum over a window is the sum over its second half plus the sum over its first half, so 2048 values
    need eleven additions. In fp32, sums of positive numbers are precise enough for −60 dB. A difference of
    cumulative sums would not be.
    """
    if window == 1:
        return values
    half = window // 2
    half_sum = _moving_sum(values, half)
    total = half_sum + _delayed(half_sum, half)
    if window > 2 * half:
        total = total + _delayed(values, 2 * half)
    return total


def _delayed(values: Tensor, count: int) -> Tensor:
    """Return values (B, S) ``count`` positions later, with zeros before the first."""
    return F.pad(values, (count, 0))[:, : values.shape[1]]
