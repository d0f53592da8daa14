"""Augment makes all changes of a model's input that apply in training only. One YAML file configures them.

Legend: B rows, S samples, T frames, F features of a frame.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speechtrain.errors import ConfigError
from speechtrain.features.specaugment import SpecAugment


def _range(
    name: str, bounds: list[float] | None, default: float, positive: bool = False
) -> tuple[float, float]:
    numbers = [default, default] if bounds is None else [float(bound) for bound in bounds]
    if len(numbers) != 2 or numbers[0] > numbers[1]:
        raise ConfigError(f"{name} is {numbers}. It must be two ascending numbers, or null for none")
    if positive and numbers[0] <= 0:
        raise ConfigError(f"{name} is {numbers}. Both numbers must be above 0")
    return numbers[0], numbers[1]


class Augment(nn.Module):
    """Noise, vocal tract length perturbation and SpecAugment. By default, all of them are off.

    A model calls ``waveform``, then its front end with ``warp`` and with ``spectrogram`` as the mask. None of
    these changes anything in evaluation. ``speed`` is an attribute only, (1, 1) for none. The data layer
    reads it, since it resamples before it plans batches.

    ``noise_db`` is the range of signal-to-noise ratios, uniform in decibels. ``noise_probability`` is the
    share of utterances that get noise. ``noise_tilt`` from 0 (white) to 1 tilts the noise's spectrum to low
    or high frequencies. ``warp`` w draws factors uniform in 1 ± w. SpecAugment defines the other arguments.

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
        for name, share in (("noise_probability", noise_probability), ("noise_tilt", noise_tilt)):
            if not 0.0 <= share <= 1.0:
                raise ConfigError(f"{name} is {share}. It must be from 0 to 1")
        if not 0.0 <= warp < 0.5:
            raise ConfigError(f"warp is {warp}. It must be 0 or more and below 0.5")
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
        decibels = low + (high - low) * draws[0]
        # 10^(-dB/20) is computed by exp, which every device supports.
        level = power.sqrt() * torch.exp(decibels * -0.11512925464970229)
        level = level * (draws[1] < self.noise_probability)
        noise = self._noise(audio, draws[2])
        return audio + noise * level[:, None] * valid

    def _noise(self, audio: Tensor, draws: Tensor) -> Tensor:
        """Draw noise (B, S) like ``audio``. Uniform draws (B,) tilt its spectrum, and its power stays 1."""
        noise = torch.randn_like(audio)
        if self.noise_tilt:
            tilt = (self.noise_tilt * (2.0 * draws - 1.0))[:, None]
            delayed = F.pad(noise[:, :-1], (1, 0))
            noise = (noise + tilt * delayed) * (1.0 + tilt.square()).rsqrt()
        return noise

    def warp(self, rows: int, device: torch.device) -> Tensor | None:
        """Draw the vocal tract length factors (B,) of a batch. Returns None without warp."""
        if not self.training or self.warp_range == 0.0:
            return None
        draws = torch.rand(rows, device=device)
        return 1.0 + self.warp_range * (2.0 * draws - 1.0)

    def spectrogram(self, features: Tensor, lengths: Tensor) -> Tensor:
        """Apply SpecAugment's masks to features (B, T, F) with frames (B,)."""
        masked: Tensor = self.specaugment(features, lengths)
        return masked
