"""Mel filters on Slaney's scale, and the warped frequencies of vocal tract length perturbation.

Legend: B rows, K frequency bins, M mel bins, N frequencies.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def slaney_hertz(mel: Tensor) -> Tensor:
    """Convert mel to hertz on Slaney's scale: linear to 1000 Hz (15 mel), then 27 mel per factor of 6.4."""
    linear = mel.clamp(max=15.0) * (200.0 / 3.0)
    exponent = (mel - 15.0).clamp(min=0.0) * (math.log(6.4) / 27.0)
    return linear * torch.exp(exponent)


def slaney_mel(hertz: float) -> float:
    """Convert hertz to mel on Slaney's scale (Auditory Toolbox, 1998), the inverse of ``slaney_hertz``."""
    if hertz < 1000.0:
        return hertz * 3.0 / 200.0
    mel_above_15 = math.log(hertz / 1000.0) * 27.0 / math.log(6.4)
    return 15.0 + mel_above_15


def mel_bank(edges: Tensor, frequencies: Tensor) -> Tensor:
    """Return the weights (..., K, M) of triangular mel filters, whose area over hertz is 1.

    ``edges`` (..., M + 2) are frequencies in ascending order. Filter m rises from edge m to edge m + 1 and
    falls to edge m + 2. ``frequencies`` (K,) are the frequencies of the bins of the spectrum.
    """
    low = edges[..., None, :-2]
    peak = edges[..., None, 1:-1]
    high = edges[..., None, 2:]
    frequency = frequencies[:, None]
    rising = (frequency - low) / (peak - low)
    falling = (high - frequency) / (high - peak)
    return torch.minimum(rising, falling).clamp(min=0.0) * (2.0 / (high - low))


def warp_frequencies(hertz: Tensor, warp: Tensor, nyquist: float) -> Tensor:
    """Return frequencies (B, N) for vocal tract length perturbation, from ``hertz`` (N,) and ``warp`` (B,).

    The mapping is piecewise linear (Jaitly and Hinton, 2013, equation 1). Up to a pivot, frequencies are
    multiplied by ``warp``. From there to ``nyquist``, which does not change, the mapping is linear. The
    pivot and its image are at most 0.6 · nyquist, which is 4800 Hz at 16 kHz.
    """
    factor = warp.to(hertz.dtype)[:, None]
    image_of_pivot = 0.6 * nyquist * factor.clamp(max=1.0)
    pivot = image_of_pivot / factor
    slope = (nyquist - factor * pivot) / (nyquist - pivot)
    below_pivot = factor * torch.minimum(hertz, pivot)
    above_pivot = slope * (hertz - pivot).clamp(min=0.0)
    return below_pivot + above_pivot
