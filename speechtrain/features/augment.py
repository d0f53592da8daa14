"""Augment changes the input of a model at random, in training only. One YAML file configures all changes.

Legend: B rows, S samples, T frames, F features of a frame.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speechtrain.errors import ConfigError
from speechtrain.features.specaugment import SpecAugment
from speechtrain.files import FilePath


class Augment(nn.Module):
    """Noise, vocal tract length perturbation and SpecAugment. By default, all of them are off.

    A model calls ``waveform``, then its front end with ``warp`` and with ``spectrogram`` as the mask. In
    evaluation, none of these methods changes anything.

    - ``speed`` is the range of speed factors, (1, 1) for none. Only the data layer reads it, because
      recordings are resampled before batches are planned.
    - ``noise_db`` is the range of signal-to-noise ratios of Gaussian noise, uniform in decibels.
      ``noise_probability`` is the fraction of utterances that get noise. ``noise_tilt`` from 0 (white) to 1
      tilts the spectrum of the noise to low or high frequencies.
    - ``warp`` w draws the factors of vocal tract length uniformly from 1 − w to 1 + w.
    - ``noise``, ``rooms``, ``recorded_noise_db``, ``recorded_probability`` and ``silence`` are for the data
      layer, as ``speed`` (see ``Acoustics``).
    - SpecAugment explains the other arguments.

    Raises ConfigError for values out of range.
    """

    def __init__(
        self,
        speed: list[float] | None = None,
        noise_db: list[float] | None = None,
        noise_probability: float = 1.0,
        noise_tilt: float = 0.0,
        warp: float = 0.0,
        freq_masks: int = 0,
        freq_width: int = 20,
        freq_width_min: int = 0,
        time_masks: float = 0,
        time_width: float = 0.03,
        time_width_min: int = 0,
        rect_masks: int = 0,
        rect_time: int = 5,
        rect_freq: int = 20,
        noise: FilePath | Any = None,
        rooms: FilePath | Any = None,
        recorded_noise_db: list[float] | None = None,
        recorded_probability: float = 0.5,
        silence: float = 0.0,
    ) -> None:
        super().__init__()
        shares = {
            "noise_probability": noise_probability,
            "noise_tilt": noise_tilt,
            "recorded_probability": recorded_probability,
        }
        for name, number in shares.items():
            if not 0.0 <= number <= 1.0:
                raise ConfigError(f"{name} is {number}. It must be from 0 to 1")
        if not 0.0 <= silence <= 10.0:
            raise ConfigError(f"silence is {silence}. It must be from 0 to 10 seconds")
        if not 0.0 <= warp < 0.5:
            raise ConfigError(f"warp is {warp}. It must be 0 or more and below 0.5")
        self.speed = _range("speed", speed, 1.0, is_positive=True)
        self.noise_db = _range("noise_db", noise_db, 0.0)
        _range("recorded_noise_db", recorded_noise_db, 0.0)
        self.noise_probability = noise_probability if noise_db is not None else 0.0
        self.noise_tilt, self.warp_range = noise_tilt, warp
        self.specaugment = SpecAugment(
            freq_masks,
            freq_width,
            freq_width_min,
            time_masks=time_masks,
            time_width=time_width,
            time_width_min=time_width_min,
            rect_masks=rect_masks,
            rect_time=rect_time,
            rect_freq=rect_freq,
        )

    def waveform(self, audio: Tensor, lengths: Tensor) -> Tensor:
        """Return audio (B, S) with Gaussian noise. ``lengths`` (B,) are samples, beyond which noise is 0."""
        if not self.training or self.noise_probability == 0.0:
            return audio
        rows, samples = audio.shape
        is_valid = torch.arange(samples, device=audio.device) < lengths[:, None]
        power = (audio * is_valid).square().sum(1) / lengths.clamp(min=1)
        # for the decibels, the choice of rows and the tilt
        numbers = torch.rand(3, rows, device=audio.device)
        low, high = self.noise_db
        decibels = low + (high - low) * numbers[0]
        # The amplitude ratio 10^(-dB/20) is exp(-dB · ln(10)/20). Every device supports exp.
        level = power.sqrt() * torch.exp(decibels * -0.11512925464970229)
        level = level * (numbers[1] < self.noise_probability)
        noise = self._noise(audio, numbers[2])
        return audio + noise * level[:, None] * is_valid

    def _noise(self, audio: Tensor, tilt_numbers: Tensor) -> Tensor:
        """Return noise (B, S) of power 1 in the type of ``audio`` (B, S).

        ``tilt_numbers`` (B,), uniform in [0, 1), decide the tilt of each row's spectrum.
        """
        noise = torch.randn_like(audio)
        if self.noise_tilt:
            tilt = (self.noise_tilt * (2.0 * tilt_numbers - 1.0))[:, None]
            delayed = F.pad(noise[:, :-1], (1, 0))
            noise = (noise + tilt * delayed) * (1.0 + tilt.square()).rsqrt()
        return noise

    def warp(self, rows: int, device: torch.device) -> Tensor | None:
        """Return random factors of vocal tract length (B,) for a batch, or None if they are off."""
        if not self.training or self.warp_range == 0.0:
            return None
        numbers = torch.rand(rows, device=device)
        return 1.0 + self.warp_range * (2.0 * numbers - 1.0)

    def spectrogram(self, features: Tensor, lengths: Tensor) -> Tensor:
        """Return features (B, T, F) of ``lengths`` (B,) with the masks of SpecAugment."""
        masked: Tensor = self.specaugment(features, lengths)
        return masked


def _range(
    name: str, bounds: list[float] | None, default: float, is_positive: bool = False
) -> tuple[float, float]:
    """Return the lower and the upper bound of the argument ``name``, which are ``default`` without bounds.

    Raises ConfigError for bounds that are not a range, or not above 0 if ``is_positive``.
    """
    numbers = [default, default] if bounds is None else [float(bound) for bound in bounds]
    if len(numbers) != 2 or numbers[0] > numbers[1]:
        raise ConfigError(f"{name} is {numbers}. It must be two ascending numbers, or null for none")
    if is_positive and numbers[0] <= 0:
        raise ConfigError(f"{name} is {numbers}. Both numbers must be above 0")
    return numbers[0], numbers[1]
