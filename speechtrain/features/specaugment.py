"""SpecAugment: bands of frequency and time set to zero in training.

Legend: B rows, T frames, F features of a frame, N masks of an axis.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from speechtrain.errors import ConfigError


def _rounded(x: Tensor) -> Tensor:
    return (x + 0.5).floor()


class SpecAugment(nn.Module):
    """Zero random bands of frequency and time, drawn for each utterance, in training only.

    Park et al. (2019), as in two reference systems. Adaptive (MLPerf RNN-T: 2 frequency masks of 0 to
    20 bins, 10 time masks of 0 to 3 % of the utterance's own frames): a ``time_width`` below 1 is a
    fraction of the utterance, and with ``time_masks`` below 1 the number of time masks is
    ``round(time_masks × frames)``. Fixed (Intel: 2 masks of 6 features, 2 of 6 frames): widths and
    their minima are equal. Widths are uniform from minimum to maximum, both included; starts are
    uniform over all positions where the mask fits, with the last row and column.

    Draws use the device's global generator, and the host reads nothing back.
    """

    def __init__(
        self,
        freq_masks: int = 2,
        freq_width: int = 20,
        freq_width_min: int = 0,
        time_masks: float = 10,
        time_width: float = 0.03,
        time_width_min: int = 0,
    ) -> None:
        super().__init__()
        of_freq = {"freq_masks": freq_masks, "freq_width": freq_width, "freq_width_min": freq_width_min}
        of_time = {"time_masks": time_masks, "time_width": time_width, "time_width_min": time_width_min}
        for name, value in (of_freq | of_time).items():
            if value < 0:
                raise ConfigError(f"{name} is {value}; it must be 0 or more")
        for name, value in (("time_masks", time_masks), ("time_width", time_width)):
            if value > 1 and value != int(value):
                raise ConfigError(f"{name} is {value}; it must be a whole number or below 1")
        if freq_width_min > freq_width or (time_width >= 1 and time_width_min > time_width):
            raise ConfigError("freq_width_min or time_width_min exceeds its maximum; lower it")
        self.freq_masks, self.freq_width, self.freq_width_min = freq_masks, freq_width, freq_width_min
        self.time_masks, self.time_width, self.time_width_min = time_masks, time_width, time_width_min

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Set the masked features of (B, T, F) with frames (B,) to 0."""
        if not self.training:
            return x
        rows, frames, width = x.shape
        if self.freq_masks:
            sizes = torch.full((rows, 1), float(width), device=x.device)
            limits = sizes.clamp(max=float(self.freq_width))
            keep = self._keep(width, self.freq_masks, sizes, limits=limits, minimum=self.freq_width_min)
            x = x * keep[:, None, :].to(x.dtype)
        if self.time_masks:
            sizes = lengths[:, None].float()
            adaptive = _rounded(sizes * self.time_width)
            limits = adaptive if self.time_width < 1 else sizes.clamp(max=float(self.time_width))
            if self.time_masks < 1:
                count = int(frames * self.time_masks + 0.5)  # of the widest row; the others use fewer
                used = torch.arange(count, device=x.device) < _rounded(sizes * self.time_masks)
                limits = limits * used
            else:
                count = int(self.time_masks)
            keep = self._keep(frames, count, sizes, limits=limits, minimum=self.time_width_min)
            x = x * keep[:, :, None].to(x.dtype)
        return x

    def _keep(self, axis: int, masks: int, sizes: Tensor, limits: Tensor, minimum: int) -> Tensor:
        """True (B, axis) outside of all masks. Sizes (B, 1) are the rows', limits (B, 1 or N) the masks'."""
        draws = torch.rand(2, sizes.shape[0], masks, device=sizes.device)
        least = limits.clamp(max=float(minimum))
        # rand < 1, but its product can round up to the bound.
        widths = torch.minimum(least + (draws[0] * (limits - least + 1.0)).floor(), limits)
        room = sizes - widths
        starts = torch.minimum((draws[1] * (room + 1.0)).floor(), room)[..., None]
        position = torch.arange(axis, device=sizes.device)
        inside = (position >= starts) & (position < starts + widths[..., None])
        return inside.sum(1) == 0
