"""LogMel: waveforms to normalised log-mel frames, on the waveforms' device.

Two published front ends in one module (MLPerf RNN-T v1.0, and its torch fall-back, also Intel's and NeMo's).
Form ``parakeet`` is ``torch`` with floor(n/hop) frames (Hugging Face's ``ParakeetFeatureExtractor``):

=================  ===================================  ====================================
detail             form ``dali``                        form ``torch``
=================  ===================================  ====================================
first sample       x0 − c·x0                            x0
Hann window        0.5 − 0.5·cos(2π(n + ½)/N)           0.5 − 0.5·cos(2πn/(N − 1))
frames of n        floor(n/hop) + 1                     ceil(n/hop)
logarithm          ln max(x, floor)                     ln(x + floor)
deviation          population                           sample, plus 1e-5
=================  ===================================  ====================================

No result depends on a row's padding: the borders reflect at the row's own end, statistics cover its own
frames, and the dither of evaluation is a function of the samples. Output shapes depend on input shapes
only, and the host reads nothing back.

Legend: B rows, S samples, T frames, K frequency bins, M mel bins, F features of an output frame.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from speechtrain.compute_policy import ComputePolicy, PolicyAware
from speechtrain.counter_rng import DITHER_PERIOD, uniform_at
from speechtrain.errors import ConfigError
from speechtrain.nn.full_precision import full_precision
from speechtrain.nn.stack_time import stack_time
from speechtrain.torch_private import MovedModule

_DITHER_SEED = 0xD17E


def slaney_hertz(mel: Tensor) -> Tensor:
    """Convert mel to hertz, Slaney's scale: linear up to 1000 Hz (15 mel), then 27 mel per factor of 6.4."""
    linear = mel.clamp(max=15.0) * (200.0 / 3.0)
    return linear * torch.exp((mel - 15.0).clamp(min=0.0) * (math.log(6.4) / 27.0))


def slaney_mel(hertz: float) -> float:
    """Convert hertz to mel, Slaney's scale (Auditory Toolbox, 1998); the inverse of ``slaney_hertz``."""
    if hertz < 1000.0:
        return hertz * 3.0 / 200.0
    return 15.0 + math.log(hertz / 1000.0) * 27.0 / math.log(6.4)


def mel_bank(edges: Tensor, frequencies: Tensor) -> Tensor:
    """Compute triangular filters of unit area over hertz.

    ``edges`` (..., M+2) are the ascending corner frequencies; a filter is 0 at its neighbours' peaks.
    ``frequencies`` (K,) are those of the spectrum's bins. Returns (..., K, M).
    """
    low, peak, high = (edges[..., None, i : edges.shape[-1] - 2 + i] for i in range(3))
    f = frequencies[:, None]
    rising, falling = (f - low) / (peak - low), (high - f) / (high - peak)
    return torch.minimum(rising, falling).clamp(min=0.0) * (2.0 / (high - low))


def warp_frequencies(hertz: Tensor, warp: Tensor, nyquist: float) -> Tensor:
    """Warp frequencies (N,) by each row's factor (B,) -> (B, N), for vocal tract length perturbation.

    Piecewise linear (Jaitly and Hinton, 2013, equation 1): factor ``warp`` up to a pivot of
    0.6·nyquist·min(warp, 1)/warp (4800 Hz at 16 kHz), then linear to the fixed point at nyquist.
    """
    factor = warp.to(hertz.dtype)[:, None]
    pivot = 0.6 * nyquist * factor.clamp(max=1.0) / factor
    slope = (nyquist - factor * pivot) / (nyquist - pivot)
    return factor * torch.minimum(hertz, pivot) + slope * (hertz - pivot).clamp(min=0.0)


def trim_silence(
    audio: Tensor, lengths: Tensor, decibels: float = -60.0, window: int = 2048
) -> tuple[Tensor, Tensor]:
    """Cut leading and trailing silence from each row: (B, S), (B,) -> (B, S), (B,), padded with zeros.

    A position is silent where the mean power of the last ``window`` samples is more than ``-decibels``
    below the row's maximum of this power. The kept part starts one window before the first position that
    is not silent; a row of zeros does not change (NVIDIA DALI, NonsilentRegion with its defaults).
    """
    samples = audio.shape[1]
    position = torch.arange(samples, device=audio.device)
    valid = position < lengths[:, None]
    # A moving sum by doubling: eleven additions of positive numbers, so fp32 is precise enough at
    # -60 dB; a difference of cumulative sums would not be.
    run = (audio.float() * valid).square()
    power, width = torch.zeros_like(run), 0
    for bit in range(window.bit_length()):
        if window >> bit & 1:
            power = power + F.pad(run, (width, 0))[:, :samples]
            width += 1 << bit
        run = run + F.pad(run, (1 << bit, 0))[:, :samples]
    power = power * valid
    threshold = power.max(1, keepdim=True).values * 10.0 ** (decibels / 10.0)
    loud = (power >= threshold) & valid
    begin = (samples - (loud * (samples - position)).max(1).values - (window - 1)).clamp(min=0)
    kept = ((loud * (position + 1)).max(1).values - begin).clamp(min=0)
    source = (position + begin[:, None]).clamp(max=samples - 1)
    return audio.gather(1, source) * (position < kept[:, None]), kept


@functools.cache
def _dither_table() -> Tensor:
    """Standard normal samples (P,), the same on every machine: Box-Muller in float64 on the host."""
    index = np.arange(DITHER_PERIOD)
    radius = np.sqrt(-2.0 * np.log1p(-uniform_at(_DITHER_SEED, 0, index)))
    return torch.from_numpy((radius * np.cos(2.0 * np.pi * uniform_at(_DITHER_SEED, 1, index))).astype("f4"))


class LogMel(MovedModule, PolicyAware):
    """Normalised, spliced log-mel features of a batch of waveforms, in fp32 for every precision.

    Order: trim silence, dither, pre-emphasis, power spectrum, mel, logarithm, normalise per
    utterance and bin, mask (SpecAugment), splice, pad the feature axis. ``splice_first`` splices
    before normalising and masks the spliced frames (Intel's older model).

    ``log_floor`` is the floor of the logarithm in the table above (MLPerf 1e-20, NeMo 2^-24).
    ``padding`` is the content before and after a waveform: ``reflect`` (its reflection) or ``constant``
    (zeros). Features are padded with zeros to a multiple of ``pad_features_to`` (0: no padding).
    The policy selects the transform and the number of frames that are transformed at once.

    Raises ConfigError for arguments that do not fit together.
    """

    window: Tensor
    bank: Tensor
    edges: Tensor
    frequencies: Tensor
    basis: Tensor
    noise: Tensor

    def __init__(
        self,
        sample_rate: int = 16000,
        window_seconds: float = 0.02,
        hop_seconds: float = 0.01,
        n_fft: int = 512,
        mels: int = 80,
        f_min: float = 0.0,
        f_max: float | None = None,
        preemphasis: float = 0.97,
        dither: float = 1e-5,
        form: str = "dali",
        padding: str = "reflect",
        log_floor: float = 1e-20,
        normalise: bool = True,
        splice: int = 3,
        splice_first: bool = False,
        pad_features_to: int = 0,
        trim_silence_db: float | None = None,
    ) -> None:
        super().__init__()
        self.sample_rate, self.n_fft, self.mels = sample_rate, n_fft, mels
        self.hop = round(hop_seconds * sample_rate)
        self.width = round(window_seconds * sample_rate)
        self.f_min, self.f_max = f_min, sample_rate / 2 if f_max is None else f_max
        self.preemphasis, self.dither, self.log_floor = preemphasis, dither, log_floor
        self.form, self.padding = form, padding
        self.normalise, self.splice, self.splice_first = normalise, splice, splice_first
        self.trim_silence_db = trim_silence_db
        self._spectrum, self._block_frames = ComputePolicy().spectrum, ComputePolicy().feature_frames
        self._check()
        self._dali = form == "dali"
        # Samples of a frame before its centre; dali and torch differ for windows of odd width.
        self._left = self.width // 2 if self._dali else (self.width + 1) // 2
        spliced = splice * mels
        self.features = -(-spliced // pad_features_to) * pad_features_to if pad_features_to else spliced
        """F, the width of an output frame, in features."""
        for name, value in self._constants().items():
            self.register_buffer(name, value, persistent=False)

    @property
    def frame_seconds(self) -> float:
        """Seconds from one output frame to the next."""
        return self.hop * self.splice / self.sample_rate

    def frames(self, samples: int) -> int:
        """The output frames of a waveform of ``samples`` (an upper bound where silence is trimmed)."""
        return -(-self._columns(samples) // self.splice)

    def forward(
        self,
        audio: Tensor,
        lengths: Tensor,
        *,
        keys: Tensor | None = None,
        warp: Tensor | None = None,
        mask: Callable[[Tensor, Tensor], Tensor] = lambda frames, lengths: frames,
    ) -> tuple[Tensor, Tensor]:
        """Map waveforms (B, S) and samples (B,) to features (B, T, F) and frames (B,).

        T is ``frames(S)``, and zeros follow each row's end. Dither comes from the global generator in
        training. In evaluation it comes from ``keys`` (B,) int64 (``dither_offset``); without keys
        there is no dither. ``warp`` (B,) holds each row's vocal tract length factor. ``mask`` is called
        as ``mask(frames, lengths)`` with the input of SpecAugment: normalised frames (B, T, M) before
        splicing, or the spliced frames with ``splice_first``.
        """
        with full_precision(audio.device):
            audio = audio.float()
            if self.trim_silence_db is not None:
                audio, lengths = trim_silence(audio, lengths, self.trim_silence_db)
            signal = self._surround(self._emphasise(self._dithered(audio, keys), lengths), lengths)
            columns = self._columns(audio.shape[1])
            start = torch.arange(columns, device=audio.device) * self.hop
            past = self.hop - 1 if self.form == "parakeet" else 0  # it has whole hops only
            last = lengths[:, None] - past
            valid = (start <= last) if self._dali else (start < last)
            return self._finish(self._log_mel(signal, columns, warp), valid, mask)

    def _columns(self, samples: int) -> int:
        if self.form == "parakeet":
            return max(1, samples // self.hop)
        return samples // self.hop + 1 if self._dali else -(-samples // self.hop)

    def _dithered(self, audio: Tensor, keys: Tensor | None) -> Tensor:
        if self.dither == 0.0 or (keys is None and not self.training):
            return audio
        if self.training or keys is None:
            return audio + self.dither * torch.randn_like(audio)
        # A counter-based draw: sample s of an utterance is entry (key + s) of one fixed table. It costs
        # one read; a hash and Box-Muller on the device would cost twenty operations.
        index = (torch.arange(audio.shape[1], device=audio.device) + keys[:, None]) & (DITHER_PERIOD - 1)
        return audio + self.dither * self.noise.gather(0, index.flatten()).view_as(audio)

    def _emphasise(self, audio: Tensor, lengths: Tensor) -> Tensor:
        first = audio[:, :1] if self._dali else torch.zeros_like(audio[:, :1])
        emphasised = audio - self.preemphasis * torch.cat([first, audio[:, :-1]], dim=1)
        return emphasised * (torch.arange(audio.shape[1], device=audio.device) < lengths[:, None])

    def _surround(self, audio: Tensor, lengths: Tensor) -> Tensor:
        """Extend each row at both ends for the border windows: (B, S) -> (B, left + S + n_fft − left)."""
        right = self.n_fft - self._left
        if self.padding == "constant":
            return F.pad(audio, (self._left, right))
        # Reflect at the row's first and last sample, repeatedly where the row is short.
        last = (lengths[:, None] - 1).clamp(min=0)
        period = (2 * last).clamp(min=1)
        before = torch.arange(self._left, 0, -1, device=audio.device) % period
        reach = torch.arange(self.width - self._left, device=audio.device)
        after = (lengths[:, None] + reach) % period
        head = audio.gather(1, torch.minimum(before, period - before))
        tail = audio.gather(1, torch.minimum(after, period - after))
        signal = F.pad(torch.cat([head, audio], dim=1), (0, right))
        return signal.scatter_add(1, self._left + lengths[:, None] + reach, tail)

    def _log_mel(self, signal: Tensor, columns: int, warp: Tensor | None) -> Tensor:
        """Compute log-mel columns (B, T, M) of the extended signal, block by block, to stay in cache."""
        rows = signal.shape[0]
        bank = self.bank.expand(rows, -1, -1)
        if warp is not None:
            warped = warp_frequencies(self.edges, warp, self.sample_rate / 2)
            bank = mel_bank(warped, self.frequencies)
        if self._spectrum == "conv":  # no frames, no blocks: the transform is a strided convolution
            parts = F.conv1d(signal[:, None], self.basis.t()[:, None], stride=self.hop)
            return self._mel(self._power(parts.transpose(1, 2)[:, :columns]), bank)
        frames = signal.unfold(1, self.n_fft, self.hop)[:, :columns]
        block = self._block_frames or rows * columns
        high, wide = max(1, block // max(columns, 1)), min(block, max(columns, 1))
        lines = []
        for r in range(0, rows, high):
            spans = (frames[r : r + high, t : t + wide] for t in range(0, columns, wide))
            line = [self._block(span, bank[r : r + high]) for span in spans]
            lines.append(torch.cat(line, dim=1))
        return torch.cat(lines)

    def _block(self, frames: Tensor, bank: Tensor) -> Tensor:
        if self._spectrum == "fft":
            parts = torch.view_as_real(torch.fft.rfft(frames * self.window)).square()
            return self._mel(parts[..., 0] + parts[..., 1], bank)
        return self._mel(self._power(torch.matmul(frames[..., : self.width], self.basis)), bank)

    def _power(self, parts: Tensor) -> Tensor:
        """Power (B, T, bins) from the real parts, then the imaginary parts, in (B, T, 2 bins)."""
        squares, bins = parts.square(), self.frequencies.numel()
        return squares[..., :bins] + squares[..., bins:]

    def _mel(self, power: Tensor, bank: Tensor) -> Tensor:
        mel = torch.matmul(power, bank)
        return (mel.clamp(min=self.log_floor) if self._dali else mel + self.log_floor).log()

    def _finish(
        self, x: Tensor, valid: Tensor, mask: Callable[[Tensor, Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Normalise, mask, splice and pad: (B, T', M), valid frames (B, T') -> (B, T, F), (B,)."""
        present = valid[:, :, None].to(x.dtype)
        spliced = stack_time(present, self.splice)  # (B, T, k), which parts of a spliced frame are valid
        counts = (spliced[:, :, 0] > 0).sum(1)
        if self.splice_first:
            # Parts beyond the row's last frame do not enter the statistics, and are 0.
            x = stack_time(x, self.splice).view(*spliced.shape, self.mels)
            x = mask(self._normalised(x, spliced[..., None]).flatten(2), counts)
        else:
            x = mask(self._normalised(x, present), valid.sum(1))
            x = stack_time(x, self.splice)
        return F.pad(x, (0, self.features - x.shape[2])), counts

    def _normalised(self, x: Tensor, present: Tensor) -> Tensor:
        """Give dim 1 mean 0 and deviation 1 where ``present``; 0 elsewhere and in constant bins."""
        if not self.normalise:
            return x * present
        # Relative to the first frame, a constant bin is exactly 0 for any rounding of its mean.
        x = (x - x[:, :1]) * present
        count = present.sum(1, keepdim=True).clamp(min=1.0)
        x = (x - x.sum(1, keepdim=True) / count) * present
        squares = x.square().sum(1, keepdim=True)
        if self._dali:
            return x * (squares / count).clamp(min=1e-30).rsqrt()
        return x / ((squares / (count - 1.0).clamp(min=1.0)).sqrt() + 1e-5)

    def _constants(self) -> dict[str, Tensor]:
        """Window, filters and tables, computed in float64 and stored in fp32."""
        n = torch.arange(self.width, dtype=torch.float64)
        phase = (n + 0.5) / self.width if self._dali else n / max(self.width - 1, 1)
        window = 0.5 - 0.5 * torch.cos(2.0 * math.pi * phase)
        bins = torch.arange(self.n_fft // 2 + 1, dtype=torch.float64)
        frequencies = bins * (self.sample_rate / self.n_fft)
        low, high = slaney_mel(self.f_min), slaney_mel(self.f_max)
        edges = slaney_hertz(torch.linspace(low, high, self.mels + 2, dtype=torch.float64))
        constants = {
            "window": F.pad(window, (0, self.n_fft - self.width)),
            "bank": mel_bank(edges, frequencies),
            "edges": edges,
            "frequencies": frequencies,
        }
        if self._spectrum != "fft":
            angle = n[:, None] * bins * (2.0 * math.pi / self.n_fft)
            constants["basis"] = window[:, None] * torch.cat([angle.cos(), angle.sin()], dim=1)
        if self.dither != 0.0:
            constants["noise"] = _dither_table()
        return {name: value.float().contiguous() for name, value in constants.items()}

    def after_move(self) -> None:
        if self.window.dtype != torch.float32:  # Module.to(dtype) has rounded the constants.
            for name, value in self._constants().items():
                setattr(self, name, value.to(self.window.device))

    def apply_policy(self, policy: ComputePolicy) -> None:
        self._spectrum, self._block_frames = policy.spectrum, policy.feature_frames
        if policy.spectrum != "fft":
            self.register_buffer("basis", self._constants()["basis"].to(self.window.device), persistent=False)

    def _check(self) -> None:
        def demand(fits: bool, line: str) -> None:
            if not fits:
                raise ConfigError(line)

        choices = {"form": ("dali", "torch", "parakeet"), "padding": ("reflect", "constant")}
        for name, known in choices.items():
            value, (*others, last) = getattr(self, name), map(repr, known)
            demand(value in known, f"{name} is {value!r}; it must be {', '.join(others)} or {last}")
        demand(self.hop > 0, "hop_seconds is shorter than one sample; raise it")
        demand(
            0 < self.width <= self.n_fft,
            f"n_fft is {self.n_fft}, and window_seconds covers {self.width} samples; it must be 1 to n_fft",
        )
        demand(self.n_fft % 2 == 0, f"n_fft is {self.n_fft}; it must be even")
        demand(
            0.0 <= self.f_min < self.f_max <= self.sample_rate / 2,
            f"f_min and f_max are {self.f_min} and {self.f_max} Hz; f_min must be below f_max, both from "
            f"0 to {self.sample_rate / 2} Hz, half the sample rate",
        )
        demand(self.log_floor > 0.0, f"log_floor is {self.log_floor}; it must be above 0")
        demand(self.splice >= 1, f"splice is {self.splice}; it must be 1 or more")
        demand(self.mels >= 1, f"mels is {self.mels}; it must be 1 or more")
