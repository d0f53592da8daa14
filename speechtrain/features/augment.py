"""Augment: all changes of a model's input that apply in training only, configured by one YAML file.

Legend: B rows, S samples, T frames, F features of a frame.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speechtrain.errors import ConfigError
from speechtrain.features.specaugment import SpecAugment


def _range(name: str, given: list[float] | None, usual: float, positive: bool = False) -> tuple[float, float]:
    values = [usual, usual] if given is None else [float(value) for value in given]
    if len(values) != 2 or values[0] > values[1]:
        raise ConfigError(f"{name} is {values}; it must be two ascending numbers, or null for none")
    if positive and values[0] <= 0:
        raise ConfigError(f"{name} is {values}; both numbers must be above 0")
    return values[0], values[1]


class Augment(nn.Module):
    """Noise, vocal tract length perturbation and SpecAugment; all of them are off by default.

    A model calls ``waveform``, then its front end with ``warp`` and with ``spectrogram`` as the
    mask. None of them changes anything in evaluation. The data layer reads ``speed``, since it
    resamples before it plans batches; here ``speed`` is an attribute only, (1, 1) for none.

    ``noise_db`` is the range of signal-to-noise ratios, uniform in decibels; ``noise_probability`` is
    the share of utterances that get noise; ``noise_tilt`` from 0 (white) to 1 tilts its spectrum to low
    or high frequencies. ``warp`` w draws factors uniform in 1 ± w. SpecAugment defines the rest.

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
                raise ConfigError(f"{name} is {value}; it must be from 0 to 1")
        if not 0.0 <= warp < 0.5:
            raise ConfigError(f"warp is {warp}; it must be 0 or more and below 0.5")
        self.speed = _range("speed", speed, 1.0, positive=True)
        self.noise_db = _range("noise_db", noise_db, 0.0)
        self.noise_probability = noise_probability if noise_db is not None else 0.0
        self.noise_tilt, self.warp_range = noise_tilt, warp
        self.specaugment = SpecAugment(
            freq_masks,
            freq_width,
            freq_width_min,
            time_masks=time_masks,
            time_width=time_width,
            time_width_min=time_width_min,
        )

    def waveform(self, audio: Tensor, lengths: Tensor) -> Tensor:
        """Add Gaussian noise to audio (B, S) within each row's length (B,), in samples."""
        if not self.training or self.noise_probability == 0.0:
            return audio
        rows, samples = audio.shape
        valid = torch.arange(samples, device=audio.device) < lengths[:, None]
        power = (audio * valid).square().sum(1) / lengths.clamp(min=1)
        draws = torch.rand(3, rows, device=audio.device)
        low, high = self.noise_db
        # 10^(-dB/20) by exp, which every device supports.
        level = power.sqrt() * torch.exp((low + (high - low) * draws[0]) * -0.11512925464970229)
        level = level * (draws[1] < self.noise_probability)
        noise = torch.randn_like(audio)
        if self.noise_tilt:
            lean = (self.noise_tilt * (2.0 * draws[2] - 1.0))[:, None]
            noise = (noise + lean * F.pad(noise[:, :-1], (1, 0))) * (1.0 + lean.square()).rsqrt()
        return audio + noise * level[:, None] * valid

    def warp(self, rows: int, device: torch.device) -> Tensor | None:
        """Draw the vocal tract length factors (B,) of a batch; None without warp."""
        if not self.training or self.warp_range == 0.0:
            return None
        return 1.0 + self.warp_range * (2.0 * torch.rand(rows, device=device) - 1.0)

    def spectrogram(self, features: Tensor, lengths: Tensor) -> Tensor:
        """Apply SpecAugment's masks to features (B, T, F) with frames (B,)."""
        masked: Tensor = self.specaugment(features, lengths)
        return masked
