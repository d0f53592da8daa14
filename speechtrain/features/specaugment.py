"""SpecAugment sets bands of frequency and time, and rectangles, to zero in training.

Legend: B rows, T frames, F features of a frame, N masks of one kind.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from speechtrain.errors import ConfigError


class SpecAugment(nn.Module):
    """Sets random bands (Park et al., 2019) and rectangles (DeVries and Taylor, 2017) to zero in training.

    - ``freq_masks`` and ``time_masks`` are the numbers of masks of an utterance. If ``time_masks`` is below
      1, the number is ``round(time_masks × frames)``.
    - ``freq_width`` (features) and ``time_width`` (frames) are the largest widths of a mask. A ``time_width``
      below 1 is a fraction of the utterance. The names with ``_min`` are the smallest widths.
    - ``rect_masks`` is the number of rectangles of an utterance. Each has at most ``rect_time`` frames and
      ``rect_freq`` features.

    Two reference systems are special cases. MLPerf's RNN-T, whose settings are the defaults, has 2 frequency
    masks of 0 to 20 bins, and 10 time masks of 0 to 3 % of the frames. Intel's has 2 masks of exactly 6
    features and 2 masks of exactly 6 frames.

    Widths are uniform from the smallest (0 for a rectangle) to the largest width, both included. Starts are
    uniform over all positions at which the mask fits before the end of the utterance. The numbers are of the
    device's global generator, and the host does not read any tensor.
    """

    def __init__(
        self,
        freq_masks: int = 2,
        freq_width: int = 20,
        freq_width_min: int = 0,
        time_masks: float = 10,
        time_width: float = 0.03,
        time_width_min: int = 0,
        rect_masks: int = 0,
        rect_time: int = 5,
        rect_freq: int = 20,
    ) -> None:
        super().__init__()
        freq_settings = {"freq_masks": freq_masks, "freq_width": freq_width, "freq_width_min": freq_width_min}
        time_settings = {"time_masks": time_masks, "time_width": time_width, "time_width_min": time_width_min}
        rect_settings = {"rect_masks": rect_masks, "rect_time": rect_time, "rect_freq": rect_freq}
        for name, number in (freq_settings | time_settings | rect_settings).items():
            if number < 0:
                raise ConfigError(f"{name} is {number}. It must be 0 or more")
        for name, number in (("time_masks", time_masks), ("time_width", time_width)):
            if number > 1 and number != int(number):
                raise ConfigError(f"{name} is {number}. It must be a whole number or below 1")
        if freq_width_min > freq_width or (time_width >= 1 and time_width_min > time_width):
            raise ConfigError("freq_width_min or time_width_min exceeds its maximum. Lower it")
        self.freq_masks, self.freq_width, self.freq_width_min = freq_masks, freq_width, freq_width_min
        self.time_masks, self.time_width, self.time_width_min = time_masks, time_width, time_width_min
        self.rect_masks, self.rect_time, self.rect_freq = rect_masks, rect_time, rect_freq

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Return features (B, T, F) of ``lengths`` (B,) with 0 in all masks."""
        if not self.training:
            return x
        if self.freq_masks:
            is_unmasked = self._unmasked_features(x)
            x = x * is_unmasked[:, None, :].to(x.dtype)
        if self.time_masks:
            is_unmasked = self._unmasked_frames(x.shape[1], lengths)
            x = x * is_unmasked[:, :, None].to(x.dtype)
        if self.rect_masks:
            x = x * self._outside_rectangles(x, lengths).to(x.dtype)
        return x

    def _unmasked_features(self, x: Tensor) -> Tensor:
        """Return True (B, F) for each feature of (B, T, F) that no frequency mask covers."""
        rows, _, width = x.shape
        sizes = torch.full((rows, 1), float(width), device=x.device)
        limits = sizes.clamp(max=float(self.freq_width))
        masks = _bands(width, self.freq_masks, sizes, limits=limits, minimum=self.freq_width_min)
        return masks.sum(1) == 0

    def _unmasked_frames(self, frames: int, lengths: Tensor) -> Tensor:
        """Return True (B, T) for each frame that no time mask covers. Rows have ``lengths`` (B,) frames."""
        sizes = lengths[:, None].float()
        if self.time_width < 1:
            limits = _rounded(sizes * self.time_width)
        else:
            limits = sizes.clamp(max=float(self.time_width))
        count = int(self.time_masks)
        if self.time_masks < 1:
            # All rows have the masks of a row of T frames. The masks that a shorter row has too many get the
            # width 0.
            count = int(frames * self.time_masks + 0.5)
            is_used = torch.arange(count, device=lengths.device) < _rounded(sizes * self.time_masks)
            limits = limits * is_used
        masks = _bands(frames, count, sizes, limits=limits, minimum=self.time_width_min)
        return masks.sum(1) == 0

    def _outside_rectangles(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Return True (B, T, F) for each value of (B, T, F) that no rectangle covers."""
        rows, frames, width = x.shape
        heights = torch.full((rows, 1), float(width), device=x.device)
        freq_limits = heights.clamp(max=float(self.rect_freq))
        freq_bands = _bands(width, self.rect_masks, heights, limits=freq_limits, minimum=0)
        sizes = lengths[:, None].float()
        time_limits = sizes.clamp(max=float(self.rect_time))
        time_bands = _bands(frames, self.rect_masks, sizes, limits=time_limits, minimum=0)
        # A product of matrices counts the rectangles of each value without a tensor (B, N, T, F).
        counts = torch.bmm(time_bands.float().transpose(1, 2), freq_bands.float())
        return counts == 0


def _bands(axis: int, masks: int, sizes: Tensor, limits: Tensor, minimum: int) -> Tensor:
    """Return True (B, N, ``axis``) for each position that a random mask covers.

    ``axis`` is the size of the axis, T or F. ``masks`` is N. ``sizes`` (B, 1) are the lengths of the rows
    along the axis. ``limits`` (B, 1 or N) and ``minimum`` are the largest and the smallest width of a mask.
    """
    numbers = torch.rand(2, sizes.shape[0], masks, device=sizes.device)
    least_widths = limits.clamp(max=float(minimum))
    # The numbers are below 1, but a rounded product can reach the bound.
    extra_widths = (numbers[0] * (limits - least_widths + 1.0)).floor()
    widths = torch.minimum(least_widths + extra_widths, limits)
    latest_starts = sizes - widths
    starts = (numbers[1] * (latest_starts + 1.0)).floor()
    starts = torch.minimum(starts, latest_starts)[..., None]
    ends = starts + widths[..., None]
    position = torch.arange(axis, device=sizes.device)
    return (position >= starts) & (position < ends)


def _rounded(x: Tensor) -> Tensor:
    """Return ``x`` rounded to whole numbers, halves up."""
    return (x + 0.5).floor()
