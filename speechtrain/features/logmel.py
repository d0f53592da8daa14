"""LogMel converts waveforms to normalised log-mel frames, on the device of the waveforms.

The steps in which published front ends differ are in ``front_ends.py``, with one class for each ``form``.

The result of a row does not depend on its padding: the ends are extended at the first and last sample of the
row, statistics cover the columns of the row, and the dither of evaluation is a function of the samples.
Output shapes depend on input shapes only, and the host does not read any tensor.

Legend: B rows, S samples, K frequency bins, M mel bins, C columns, T output frames, F features of an output
frame. A column is the log-mel values of one window. Splicing concatenates ``splice`` columns to one frame.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from speechtrain.compute_policy import PLAIN, ComputePolicy, PolicyAware
from speechtrain.counter_rng import DITHER_PERIOD, uniform_at
from speechtrain.errors import ConfigError
from speechtrain.features.front_ends import FRONT_ENDS, quotient
from speechtrain.features.mel import mel_bank, slaney_hertz, slaney_mel, warp_frequencies
from speechtrain.features.silence import trim_silence
from speechtrain.features.statistics import NORMALISATIONS
from speechtrain.nn.full_precision import full_precision
from speechtrain.nn.stack_time import stack_time
from speechtrain.torch_private import MovedModule

_DITHER_SEED = 0xD17E


@functools.cache
def _dither_table() -> Tensor:
    """Return DITHER_PERIOD standard normal samples, which are equal on every machine.

    They are computed by the Box-Muller transform in float64 on the host.
    """
    index = np.arange(DITHER_PERIOD)
    radius = np.sqrt(-2.0 * np.log1p(-uniform_at(_DITHER_SEED, 0, index)))
    angle = 2.0 * np.pi * uniform_at(_DITHER_SEED, 1, index)
    samples = radius * np.cos(angle)
    return torch.from_numpy(samples.astype("f4"))


def no_mask(frames: Tensor, lengths: Tensor) -> Tensor:
    """Return ``frames``. This is the mask of ``LogMel`` without SpecAugment."""
    return frames


class LogMel(MovedModule, PolicyAware):
    """Computes normalised, spliced log-mel features of a batch of waveforms, in fp32 for every precision.

    A GPU may round the inputs of the mel filters' matmul (``nn.full_precision``).

    The order is: trim silence, dither, pre-emphasis, power spectrum, mel, logarithm, normalise each bin of an
    utterance, mask (SpecAugment), splice, pad the feature axis. With ``splice_first``, columns are spliced
    before they are normalised and masked (Intel's older model).

    The attribute ``features`` is the number of values of an output frame, F. ``width`` and ``hop`` are the
    samples of a window and from one column to the next.

    The policy selects the transform and the number of columns that are transformed at once.

    Raises ConfigError for arguments that do not fit together.
    """

    window: Tensor  # (n_fft,) the window, followed by zeros
    bank: Tensor  # (K, M) the mel filters
    edges: Tensor  # (M + 2,) the edges of the mel filters in hertz
    frequencies: Tensor  # (K,) the frequencies of the bins in hertz
    basis: Tensor  # (samples of the window, 2 · K) cosines and sines, for devices without FFT
    noise: Tensor  # the table of dither

    def __init__(
        self,
        sample_rate: int = 16000,  # Hz
        window_seconds: float = 0.02,  # length of a window
        hop_seconds: float = 0.01,  # from one column to the next
        n_fft: int = 512,  # samples of a Fourier transform. A window is padded to it
        mels: int = 80,  # M
        f_min: float = 0.0,  # lower edge of the lowest mel bin, in Hz
        f_max: float | None = None,  # upper edge of the highest mel bin, in Hz. None: half the sample rate
        preemphasis: float = 0.97,  # each sample is reduced by this factor times the sample before
        dither: float = 1e-5,  # standard deviation of the noise that is added to samples
        form: str = "dali",  # published front end, a name in FRONT_ENDS
        padding: str = "reflect",  # content before and after a waveform: reflect | constant (zeros)
        log_floor: float = 1e-20,  # smallest energy of the logarithm (MLPerf 1e-20, NeMo 2^-24)
        normalise: str = "all",  # columns that give mean and deviation, a name in NORMALISATIONS
        splice: int = 3,  # columns of an output frame
        splice_first: bool = False,  # whether columns are spliced before they are normalised
        pad_features_to: int = 0,  # features are padded with zeros to a multiple of it. 0: no padding
        trim_silence_db: float | None = None,  # ``decibels`` of ``trim_silence``. None: no trimming
    ) -> None:
        super().__init__()
        self.sample_rate = sample_rate
        self.width = round(window_seconds * sample_rate)
        self.hop = round(hop_seconds * sample_rate)
        self.n_fft = n_fft
        self.mels = mels
        self.f_min = f_min
        self.f_max = sample_rate / 2 if f_max is None else f_max
        self.preemphasis = preemphasis
        self.dither = dither
        self.form = form
        self.padding = padding
        self.log_floor = log_floor
        self.normalise = normalise
        self.splice = splice
        self.splice_first = splice_first
        self.pad_features_to = pad_features_to
        self.trim_silence_db = trim_silence_db
        self._policy = PLAIN
        self._check()
        self.front_end = FRONT_ENDS[form](
            width=self.width,
            hop=self.hop,
            n_fft=n_fft,
            preemphasis=preemphasis,
            padding=padding,
            log_floor=log_floor,
        )
        if self.front_end.left < 0:
            raise ConfigError(f"window_seconds is below hop_seconds, and form={form} cannot skip samples")
        self._normalised = NORMALISATIONS[normalise]
        self.features = splice * mels  # F
        if pad_features_to:
            self.features = math.ceil(self.features / pad_features_to) * pad_features_to
        for name, constant in self._constants().items():
            self.register_buffer(name, constant, persistent=False)

    @property
    def frame_seconds(self) -> float:
        """Seconds from one output frame to the next."""
        return self.hop * self.splice / self.sample_rate

    def frames(self, samples: int) -> int:
        """Return the number of output frames of ``samples`` samples. If silence is trimmed, it is a bound."""
        return -(-self._columns(samples) // self.splice)  # rounded up

    def forward(
        self,
        audio: Tensor,
        lengths: Tensor,
        *,
        keys: Tensor | None = None,
        warp: Tensor | None = None,
        mask: Callable[[Tensor, Tensor], Tensor] = no_mask,
    ) -> tuple[Tensor, Tensor]:
        """Map waveforms (B, S) of ``lengths`` (B,) to features (B, T, F) and their lengths (B,).

        T is ``frames(S)``, and zeros follow each row's end.

        - In training, the global generator draws the dither. In evaluation, ``keys`` (B,) int64 select it
          (``Batch.keys``), and without keys no dither is added.
        - ``warp`` (B,) has the factor of vocal tract length of each row.
        - ``mask`` is SpecAugment, called as ``mask(frames, lengths)``. Its input is the normalised columns
          (B, C, M), or the spliced frames with ``splice_first``.
        """
        with full_precision(audio.device):
            audio = audio.float()
            if self.trim_silence_db is not None:
                audio, lengths = trim_silence(audio, lengths, self.trim_silence_db)
            signal = self.front_end.signal(self._dithered(audio, keys), lengths)
            x = self._log_mel_columns(signal, self._columns(audio.shape[1]), warp)
            return self._finish(x, self.front_end.columns(lengths), mask)

    def _columns(self, samples: int) -> int:
        """Return C for waveforms (B, S). It is at least 1, while a short row may have no column."""
        return max(1, self.front_end.columns(samples))

    def _dithered(self, audio: Tensor, keys: Tensor | None) -> Tensor:
        """Return audio (B, S) with dither, as ``forward`` explains."""
        if self.training and self.dither != 0.0:
            return audio + self.dither * torch.randn_like(audio)
        if keys is None or self.dither == 0.0:
            return audio
        # The dither of sample s is entry (key + s) of a fixed table, which costs one read. A hash and
        # Box-Muller on the device would cost twenty operations.
        samples = torch.arange(audio.shape[1], device=audio.device)
        entries = (samples + keys[:, None]) & (DITHER_PERIOD - 1)  # The period is a power of 2.
        noise = self.noise.gather(0, entries.flatten())
        return audio + self.dither * noise.view_as(audio)

    def _log_mel_columns(self, signal: Tensor, columns: int, warp: Tensor | None) -> Tensor:
        """Return the first ``columns`` log-mel columns (B, C, M) of a signal of ``FrontEnd.signal``.

        ``warp`` (B,) changes the mel filters.
        """
        bank = self.bank.expand(signal.shape[0], -1, -1)
        if warp is not None:
            warped_edges = warp_frequencies(self.edges, warp, self.sample_rate / 2)
            bank = mel_bank(warped_edges, self.frequencies)
        if self._policy.spectrum == "conv":  # A strided convolution needs neither windows nor blocks.
            spectrum = F.conv1d(signal[:, None], self.basis.t()[:, None], stride=self.hop)
            power = self._power(spectrum.transpose(1, 2)[:, :columns])
            return self.front_end.logarithm(torch.matmul(power, bank))
        windows = signal.unfold(1, self.n_fft, self.hop)
        return self._log_mel_by_blocks(windows[:, :columns], bank)

    def _log_mel_by_blocks(self, windows: Tensor, bank: Tensor) -> Tensor:
        """Return the log-mel columns (B, C, M) of windows (B, C, n_fft).

        They are computed in blocks that fit the cache: whole rows, or a part of one long row. ``bank`` is
        (B, K, M).
        """
        rows, columns, _ = windows.shape
        block = self._policy.feature_frames or rows * columns
        block_columns = min(block, columns)
        block_rows = block // block_columns
        row_blocks = []
        for row in range(0, rows, block_rows):
            row_windows = windows[row : row + block_rows]
            row_bank = bank[row : row + block_rows]
            blocks = []
            for column in range(0, columns, block_columns):
                power = self._power_of_windows(row_windows[:, column : column + block_columns])
                blocks.append(self.front_end.logarithm(torch.matmul(power, row_bank)))
            row_blocks.append(torch.cat(blocks, dim=1))
        return torch.cat(row_blocks)

    def _power_of_windows(self, windows: Tensor) -> Tensor:
        """Return the power spectrum (B, C, K) of windows (B, C, n_fft)."""
        if self._policy.spectrum == "fft":
            squares = torch.view_as_real(torch.fft.rfft(windows * self.window)).square()
            return squares[..., 0] + squares[..., 1]
        return self._power(torch.matmul(windows[..., : self.width], self.basis))

    def _power(self, spectrum: Tensor) -> Tensor:
        """Return the power (B, C, K) of a spectrum (B, C, 2 · K): real parts, then imaginary parts."""
        squares = spectrum.square()
        bins = self.frequencies.numel()
        return squares[..., :bins] + squares[..., bins:]

    def _finish(
        self, x: Tensor, counts: Tensor, mask: Callable[[Tensor, Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Normalise, mask, splice and pad columns (B, C, M), of which the first ``counts`` (B,) are a row's.

        Returns the output frames (B, T, F) and their number (B,).
        """
        is_valid = torch.arange(x.shape[1], device=x.device) < counts[:, None]
        weight = is_valid[:, :, None].to(x.dtype)  # (B, C, 1): 1 or 0
        lengths = quotient(counts + self.splice - 1, self.splice)
        if self.splice_first:
            # Each column of a frame has its own mean and deviation.
            x = stack_time(x, self.splice)
            x = x.view(*x.shape[:2], self.splice, self.mels)
            weight = stack_time(weight, self.splice)[..., None]  # (B, T, splice, 1)
            x = self._normalised(x, weight, self.front_end.over_deviation)
            x = mask(x.flatten(2), lengths)
        else:
            x = self._normalised(x, weight, self.front_end.over_deviation)
            x = stack_time(mask(x, counts), self.splice)
        padding = self.features - x.shape[2]
        return F.pad(x, (0, padding)), lengths

    def normalised_columns(self, x: Tensor) -> Tensor:
        """Return columns (B, C, M) normalised one by one. ``normalise`` is a name in OF_COLUMNS."""
        return self._normalised(x, torch.ones_like(x[..., :1]), self.front_end.over_deviation)

    def _constants(self) -> dict[str, Tensor]:
        """Return the buffers by their names. They are computed in float64 and returned in fp32."""
        device = torch.get_default_device()
        with torch.device("cpu"):  # On the meta device, ``arange`` would import the compiler, in 1 s.
            window = self.front_end.window()
            bins = torch.arange(self.n_fft // 2 + 1, dtype=torch.float64)
            frequencies = bins * (self.sample_rate / self.n_fft)
            mels = torch.linspace(
                slaney_mel(self.f_min), slaney_mel(self.f_max), self.mels + 2, dtype=torch.float64
            )
            edges = slaney_hertz(mels)
            constants = {
                "window": F.pad(window, (0, self.n_fft - self.width)),
                "bank": mel_bank(edges, frequencies),
                "edges": edges,
                "frequencies": frequencies,
            }
            if self._policy.spectrum != "fft":
                constants["basis"] = window[:, None] * self._fourier_basis(bins)
            if self.dither != 0.0:
                constants["noise"] = _dither_table()
            return {name: constant.float().contiguous().to(device) for name, constant in constants.items()}

    def _fourier_basis(self, bins: Tensor) -> Tensor:
        """Return the cosines, then the sines, of ``bins`` (K,) at each sample: (samples, 2 · K)."""
        samples = torch.arange(self.width, dtype=torch.float64)
        angle = samples[:, None] * bins * (2.0 * math.pi / self.n_fft)
        return torch.cat([angle.cos(), angle.sin()], dim=1)

    def after_move(self) -> None:
        if self.window.dtype != torch.float32:  # Module.to(dtype) has rounded the constants.
            for name, constant in self._constants().items():
                setattr(self, name, constant.to(self.window.device))

    def apply_policy(self, policy: ComputePolicy) -> None:
        self._policy = policy
        if policy.spectrum != "fft":
            basis = self._constants()["basis"].to(self.window.device)
            self.register_buffer("basis", basis, persistent=False)

    def _check(self) -> None:
        """Raise ConfigError for the first setting that is not valid."""

        def require(is_valid: bool, problem: str) -> None:
            if not is_valid:
                raise ConfigError(problem)

        choices = {
            "form": FRONT_ENDS,
            "padding": ("reflect", "constant"),
            "normalise": NORMALISATIONS,
        }
        for name, names in choices.items():
            choice, quoted = getattr(self, name), list(map(repr, names))
            listing = f"{', '.join(quoted[:-1])} or {quoted[-1]}"
            require(choice in names, f"{name} is {choice!r}. It must be {listing}")
        require(self.hop > 0, "hop_seconds is shorter than one sample. Raise it")
        require(
            0 < self.width <= self.n_fft,
            f"n_fft is {self.n_fft}, and window_seconds covers {self.width} samples. It must be 1 to n_fft",
        )
        require(self.n_fft % 2 == 0, f"n_fft is {self.n_fft}. It must be even")
        require(
            0.0 <= self.f_min < self.f_max <= self.sample_rate / 2,
            f"f_min and f_max are {self.f_min} and {self.f_max} Hz. f_min must be below f_max, both from "
            f"0 to {self.sample_rate / 2} Hz, half the sample rate",
        )
        require(self.log_floor > 0.0, f"log_floor is {self.log_floor}. It must be above 0")
        require(self.splice >= 1, f"splice is {self.splice}. It must be 1 or more")
        require(self.mels >= 1, f"mels is {self.mels}. It must be 1 or more")
        require(self.pad_features_to >= 0, f"pad_features_to is {self.pad_features_to}. It must be 0 or more")
