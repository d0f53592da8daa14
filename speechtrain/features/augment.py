"""Augment: everything that a model does to its input in training only, set from one YAML.

Legend: B rows, S samples, T frames, F features of a frame.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speechtrain.errors import ConfigError
from speechtrain.features.specaugment import SpecAugment


def _range(
    name: str, given: list[float] | None, nothing: float, positive: bool = False
) -> tuple[float, float]:
    values = [nothing, nothing] if given is None else [float(value) for value in given]
    if len(values) != 2 or values[0] > values[1]:
        raise ConfigError(f"Augment.{name} is {values}; it takes two rising numbers, or null for none")
    if positive and values[0] <= 0:
        raise ConfigError(f"Augment.{name} is {values}; its numbers must be above 0")
    return values[0], values[1]


class Augment(nn.Module):
    """Noise, vocal tract length perturbation and SpecAugment; nothing at all by default.

    A model calls ``waveform``, then its front end with ``warp`` and with ``spectrogram`` as the
    mask. Each of them does nothing in evaluation. ``speed`` is read by the data layer, which
    resamples before batches are planned; here it is an attribute only, (1, 1) for none.

    ``noise_db`` is the range of signal-to-noise ratios, uniform in decibels; ``noise_probability``
    the share of utterances that get noise; ``noise_tilt`` from 0 (white) to 1 lets its spectrum lean
    to low or high frequencies. ``warp`` w draws factors uniform in 1 ± w. The rest is SpecAugment's.

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
    ) -> None:
        super().__init__()
        for name, value in (("noise_probability", noise_probability), ("noise_tilt", noise_tilt)):
            if not 0.0 <= value <= 1.0:
                raise ConfigError(f"Augment.{name} is {value}; it must lie between 0 and 1")
        if not 0.0 <= warp < 0.5:
            raise ConfigError(f"Augment.warp is {warp}; it must be 0 or more and below 0.5")
        self.speed = _range("speed", speed, 1.0, positive=True)
        self.noise_db = _range("noise_db", noise_db, 0.0)
        self.noise_probability = noise_probability if noise_db is not None else 0.0
        self.noise_tilt, self.warp_range = noise_tilt, warp
        self.specaugment = SpecAugment(
            freq_masks, freq_width, freq_width_min, time_masks, time_width, time_width_min
        )

    def waveform(self, audio: Tensor, lengths: Tensor) -> Tensor:
        """Audio (B, S) and samples (B,) -> audio with Gaussian noise within each row's length."""
        if not self.training or self.noise_probability == 0.0:
            return audio
        rows, samples = audio.shape
        valid = torch.arange(samples, device=audio.device) < lengths[:, None]
        power = (audio * valid).square().sum(1) / lengths.clamp(min=1)
        draws = torch.rand(3, rows, device=audio.device)
        low, high = self.noise_db
        # 10^(-dB/20) by exp, which every device has.
        level = power.sqrt() * torch.exp((low + (high - low) * draws[0]) * -0.11512925464970229)
        level = level * (draws[1] < self.noise_probability)
        noise = torch.randn_like(audio)
        if self.noise_tilt:
            lean = (self.noise_tilt * (2.0 * draws[2] - 1.0))[:, None]
            noise = (noise + lean * F.pad(noise[:, :-1], (1, 0))) * (1.0 + lean.square()).rsqrt()
        return audio + noise * level[:, None] * valid

    def warp(self, rows: int, device: torch.device) -> Tensor | None:
        """Vocal tract length factors (B,) of a batch, or none."""
        if not self.training or self.warp_range == 0.0:
            return None
        return 1.0 + self.warp_range * (2.0 * torch.rand(rows, device=device) - 1.0)

    def spectrogram(self, features: Tensor, lengths: Tensor) -> Tensor:
        """Features (B, T, F) and frames (B,) -> features with SpecAugment's masks."""
        masked: Tensor = self.specaugment(features, lengths)
        return masked
