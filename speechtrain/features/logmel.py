"""LogMel converts waveforms to normalised log-mel frames, on the device of the waveforms.

The module computes two published front ends, which the setting ``form`` selects: ``dali`` (MLPerf RNN-T v1.0)
and ``torch`` (MLPerf's alternative in torch, also Intel's and NeMo's). They differ in these details, for a
waveform of n samples and a window of N samples. A third form, ``parakeet``, is ``torch`` with floor(n/hop)
frames (Hugging Face's ``ParakeetFeatureExtractor``).

=================  ===================================  ====================================
detail             form ``dali``                        form ``torch``
=================  ===================================  ====================================
first sample       x0 − c·x0                            x0
Hann window        0.5 − 0.5·cos(2π(n + ½)/N)           0.5 − 0.5·cos(2πn/(N − 1))
frames             floor(n/hop) + 1                     ceil(n/hop)
logarithm          ln max(x, floor)                     ln(x + floor)
deviation          population                           sample, plus 1e-5
=================  ===================================  ====================================

sherpa-onnx has the form ``kaldi`` for NeMo's transducers and ``kaldi_hann`` for NeMo's CTC models. They equal
``torch`` with these exceptions. Frames begin half a hop later, so there are floor(n/hop + ½) of them. The
waveform is mirrored at both ends with its first and last sample, before pre-emphasis. The deviation is
population, plus 1e-5. The window of ``kaldi`` is Povey's, (½ − ½·cos(2πn/(N − 1)))^0.85, and the window of
``kaldi_hann`` is ½ − ½·cos(2πn/N). Both are 0 at the first sample, so pre-emphasis for each window, as in
Kaldi, equals pre-emphasis of the waveform.

The result of a row does not depend on its padding: the borders reflect at the first and last sample of the
row, statistics cover the frames of the row, and the dither of evaluation is a function of the samples. Output
shapes depend on input shapes only, and the host does not read any tensor.

Legend: B rows, S samples, K frequency bins, M mel bins, F features of an output frame. A column is a frame
before splicing, which concatenates ``splice`` columns to one output frame. T is the number of columns or of
output frames.
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
from speechtrain.features.mel import mel_bank, slaney_hertz, slaney_mel, warp_frequencies
from speechtrain.features.silence import trim_silence
from speechtrain.nn.full_precision import full_precision
from speechtrain.nn.stack_time import stack_time
from speechtrain.torch_private import MovedModule

_DITHER_SEED = 0xD17E
_LOUD_NATS = 8.0  # 35 dB. The pauses of a usual recording are lower, and its weakest consonants are higher.
_KALDI_FORMS = ("kaldi", "kaldi_hann")


def _loud(x: Tensor, weight: Tensor) -> Tensor:
    """Return 1 for the loud columns of log-mel ``x`` (B, T, ..., M), and 0 for the others.

    ``weight`` (B, T, ..., 1) is 1 for the columns of a row. The result has its shape.
    """
    level = x.mean(-1, keepdim=True)
    loudest = level.masked_fill(weight == 0, -math.inf).max(1, keepdim=True).values
    return weight * (level > loudest - _LOUD_NATS)


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


class LogMel(MovedModule, PolicyAware):
    """Computes normalised, spliced log-mel features of a batch of waveforms, in fp32 for every precision.

    A GPU may round the inputs of the mel filters' matmul (``nn.full_precision``).

    The order is: trim silence, dither, pre-emphasis, power spectrum, mel, logarithm, normalise each bin of an
    utterance, mask (SpecAugment), splice, pad the feature axis. With ``splice_first``, columns are spliced
    before they are normalised and masked (Intel's older model).

    - ``form`` is explained in the module. ``log_floor`` is the floor of the logarithm in the table there
      (MLPerf 1e-20, NeMo 2^-24).
    - ``padding`` is the content before and after a waveform: ``reflect`` (its reflection) or ``constant``
      (zeros).
    - ``normalise`` selects the columns whose mean and deviation normalise a bin: ``all``, ``loud`` or
      ``none``. A column is loud if the mean of its logarithms is at most 8 (35 dB) below the loudest
      column's. So silence around an utterance does not change the features of the utterance.
    - ``splice`` is the number of columns in an output frame.
    - The attribute ``features`` is the number of values of an output frame, F, and ``width`` is the number of
      samples of a window.
    - ``pad_features_to``: features are padded with zeros to a multiple of it. 0 does not pad.
    - ``trim_silence_db`` is the ``decibels`` of ``trim_silence``, and null does not trim.

    The policy selects the transform and the number of columns that are transformed at once.

    Raises ConfigError for arguments that do not fit together.
    """

    window: Tensor  # (n_fft,) the Hann window, followed by zeros
    bank: Tensor  # (K, M) the mel filters
    edges: Tensor  # (M + 2,) the edges of the mel filters in hertz
    frequencies: Tensor  # (K,) the frequencies of the bins in hertz
    basis: Tensor  # (samples of the window, 2 · K) cosines and sines, for devices without FFT
    noise: Tensor  # the table of dither

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
        normalise: str = "all",
        splice: int = 3,
        splice_first: bool = False,
        pad_features_to: int = 0,
        trim_silence_db: float | None = None,
    ) -> None:
        super().__init__()
        self.sample_rate, self.n_fft, self.mels = sample_rate, n_fft, mels
        self.hop = round(hop_seconds * sample_rate)  # samples
        self.width = round(window_seconds * sample_rate)  # samples of the window
        self.f_min = f_min
        self.f_max = sample_rate / 2 if f_max is None else f_max
        self.preemphasis, self.dither, self.log_floor = preemphasis, dither, log_floor
        self.form, self.padding = form, padding
        self.normalise, self.splice, self.splice_first = normalise, splice, splice_first
        self.trim_silence_db = trim_silence_db
        self._spectrum, self._block_frames = ComputePolicy().spectrum, ComputePolicy().feature_frames
        self._check()
        self.features = splice * mels  # F
        if pad_features_to:
            self.features = math.ceil(self.features / pad_features_to) * pad_features_to
        for name, constant in self._constants().items():
            self.register_buffer(name, constant, persistent=False)

    @property
    def _is_dali(self) -> bool:
        return self.form == "dali"

    @property
    def _is_kaldi(self) -> bool:
        return self.form in _KALDI_FORMS

    @property
    def _left(self) -> int:
        """The number of samples of the first window before the waveform. It depends on the form."""
        if self._is_kaldi:
            return self.width // 2 - self.hop // 2
        return self.width // 2 if self._is_dali else (self.width + 1) // 2

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
        mask: Callable[[Tensor, Tensor], Tensor] = lambda frames, lengths: frames,
    ) -> tuple[Tensor, Tensor]:
        """Map waveforms (B, S) of ``lengths`` (B,) to features (B, T, F) and their lengths (B,).

        T is ``frames(S)``, and zeros follow each row's end.

        - In training, the global generator draws the dither. In evaluation, ``keys`` (B,) int64 select it
          (``dither_offset``), and without keys no dither is added.
        - ``warp`` (B,) has the factor of vocal tract length of each row.
        - ``mask`` is SpecAugment, called as ``mask(frames, lengths)``. Its input is the normalised columns
          (B, T, M), or the spliced frames with ``splice_first``.
        """
        with full_precision(audio.device):
            audio = audio.float()
            if self.trim_silence_db is not None:
                audio, lengths = trim_silence(audio, lengths, self.trim_silence_db)
            signal = self._signal(self._dithered(audio, keys), lengths)
            columns = self._columns(audio.shape[1])
            is_valid = self._is_valid_column(columns, lengths)
            return self._finish(self._log_mel(signal, columns, warp), is_valid, mask)

    def _columns(self, samples: int) -> int:
        """Return the number of columns of ``samples`` samples, as the module's docstring explains."""
        if self._is_kaldi:
            return max(1, (samples + self.hop // 2) // self.hop)
        if self.form == "parakeet":
            return max(1, samples // self.hop)
        return samples // self.hop + 1 if self._is_dali else (samples + self.hop - 1) // self.hop

    def _is_valid_column(self, columns: int, lengths: Tensor) -> Tensor:
        """Return whether each column (B, T) belongs to its row, which has ``lengths`` (B,) samples."""
        starts = torch.arange(columns, device=lengths.device) * self.hop
        # Form parakeet has whole hops only. Kaldi's forms round the number of hops.
        margins = {"parakeet": self.hop - 1} | dict.fromkeys(_KALDI_FORMS, (self.hop - 1) // 2)
        margin = margins.get(self.form, 0)
        ends = lengths[:, None] - margin
        return starts <= ends if self._is_dali else starts < ends

    def _dithered(self, audio: Tensor, keys: Tensor | None) -> Tensor:
        """Return audio (B, S) with dither, as ``forward`` explains."""
        if self.dither == 0.0 or (keys is None and not self.training):
            return audio
        if self.training or keys is None:
            return audio + self.dither * torch.randn_like(audio)
        # The dither of sample s is entry (key + s) of a fixed table, which costs one read. A hash and
        # Box-Muller on the device would cost twenty operations. The period is a power of 2.
        entries = torch.arange(audio.shape[1], device=audio.device) + keys[:, None]
        entries = entries & (DITHER_PERIOD - 1)
        noise = self.noise.gather(0, entries.flatten())
        return audio + self.dither * noise.view_as(audio)

    def _signal(self, audio: Tensor, lengths: Tensor) -> Tensor:
        """Return audio (B, S) after pre-emphasis, extended for the windows at both ends: (B, S + n_fft)."""
        is_valid = torch.arange(audio.shape[1], device=audio.device) < lengths[:, None]
        if self._is_kaldi:
            return self._emphasise(self._extend(audio * is_valid, lengths))
        return self._extend(self._emphasise(audio) * is_valid, lengths)

    def _emphasise(self, audio: Tensor) -> Tensor:
        before_first = audio[:, :1] if self._is_dali else torch.zeros_like(audio[:, :1])
        return audio - self.preemphasis * torch.cat([before_first, audio[:, :-1]], dim=1)

    def _extend(self, audio: Tensor, lengths: Tensor) -> Tensor:
        """Return audio (B, S), 0 after the end of each row, extended at both ends of the row."""
        left, right = self._left, self.n_fft - self._left
        if self.padding == "constant":
            return F.pad(audio, (left, right))
        # Reflect at the row's first and last sample, several times if the row is short.
        ends, repeats = lengths[:, None], int(self._is_kaldi)  # Kaldi's forms repeat the last sample.
        period = (2 * (ends - 1 + repeats).clamp(min=0)).clamp(min=1)
        before = torch.arange(-left, 0, device=audio.device) % period
        overhang = torch.arange(self.width - left, device=audio.device)
        after = (ends + overhang) % period
        head = audio.gather(1, torch.minimum(before, period - repeats - before))
        tail = audio.gather(1, torch.minimum(after, period - repeats - after))
        signal = F.pad(torch.cat([head, audio], dim=1), (0, right))
        return signal.scatter_add(1, left + ends + overhang, tail)

    def _log_mel(self, signal: Tensor, columns: int, warp: Tensor | None) -> Tensor:
        """Return the log-mel columns (B, T, M) of a signal (B, S + n_fft). ``columns`` is T.

        ``warp`` (B,) changes the mel filters.
        """
        bank = self.bank.expand(signal.shape[0], -1, -1)
        if warp is not None:
            warped_edges = warp_frequencies(self.edges, warp, self.sample_rate / 2)
            bank = mel_bank(warped_edges, self.frequencies)
        if self._spectrum == "conv":  # A strided convolution needs neither windows nor blocks.
            spectrum = F.conv1d(signal[:, None], self.basis.t()[:, None], stride=self.hop)
            return self._log_mel_of_power(self._power(spectrum.transpose(1, 2)[:, :columns]), bank)
        windows = signal.unfold(1, self.n_fft, self.hop)
        return self._log_mel_by_blocks(windows[:, :columns], bank)

    def _log_mel_by_blocks(self, windows: Tensor, bank: Tensor) -> Tensor:
        """Return the log-mel columns (B, T, M) of windows (B, T, n_fft).

        They are computed in blocks of rows and columns that fit the cache. ``bank`` is (B, K, M).
        """
        rows, columns, _ = windows.shape
        block = self._block_frames or rows * columns
        block_rows, block_columns = max(1, block // max(columns, 1)), min(block, max(columns, 1))
        row_blocks = []
        for row in range(0, rows, block_rows):
            row_windows, row_bank = windows[row : row + block_rows], bank[row : row + block_rows]
            blocks = []
            for column in range(0, columns, block_columns):
                block_windows = row_windows[:, column : column + block_columns]
                blocks.append(self._log_mel_of_windows(block_windows, row_bank))
            row_blocks.append(torch.cat(blocks, dim=1))
        return torch.cat(row_blocks)

    def _log_mel_of_windows(self, windows: Tensor, bank: Tensor) -> Tensor:
        """Return the log-mel columns (B, T, M) of windows (B, T, n_fft)."""
        if self._spectrum == "fft":
            squares = torch.view_as_real(torch.fft.rfft(windows * self.window)).square()
            return self._log_mel_of_power(squares[..., 0] + squares[..., 1], bank)
        spectrum = torch.matmul(windows[..., : self.width], self.basis)
        return self._log_mel_of_power(self._power(spectrum), bank)

    def _power(self, spectrum: Tensor) -> Tensor:
        """Return the power (B, T, K) of a spectrum (B, T, 2 · K): real parts, then imaginary parts."""
        squares, bins = spectrum.square(), self.frequencies.numel()
        return squares[..., :bins] + squares[..., bins:]

    def _log_mel_of_power(self, power: Tensor, bank: Tensor) -> Tensor:
        """Return the log-mel columns (B, T, M) of a power spectrum (B, T, K)."""
        mel = torch.matmul(power, bank)
        mel = mel.clamp(min=self.log_floor) if self._is_dali else mel + self.log_floor
        return mel.log()

    def _finish(
        self, x: Tensor, is_valid: Tensor, mask: Callable[[Tensor, Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Normalise, mask, splice and pad columns (B, T', M). ``is_valid`` (B, T') excludes the padding.

        Returns the output frames (B, T, F) and their number (B,).
        """
        column_weight = is_valid[:, :, None].to(x.dtype)  # 1 or 0
        frame_weights = stack_time(column_weight, self.splice)  # (B, T, splice) of the columns of a frame
        lengths = (frame_weights[:, :, 0] > 0).sum(1)
        if self.splice_first:
            # Columns beyond the row's end are 0 and do not enter the statistics.
            x = stack_time(x, self.splice).view(*frame_weights.shape, self.mels)
            x = mask(self.normalised(x, frame_weights[..., None]).flatten(2), lengths)
        else:
            x = mask(self.normalised(x, column_weight), is_valid.sum(1))
            x = stack_time(x, self.splice)
        return F.pad(x, (0, self.features - x.shape[2])), lengths

    def normalised(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return ``x`` with mean 0 and deviation 1 along axis 1, over elements of ``weight`` 1.

        With ``normalise=loud``, mean and deviation are those of the loud columns. Elements of weight 0 and
        constant bins become 0.
        """
        if self.normalise == "none":
            return x * weight
        counted = _loud(x, weight) if self.normalise == "loud" else weight
        # Without this subtraction, the rounded mean of a constant bin could differ from its values.
        x = (x - x[:, :1]) * weight
        count = counted.sum(1, keepdim=True).clamp(min=1.0)
        x = (x - (x * counted).sum(1, keepdim=True) / count) * weight
        squares = (x * counted).square().sum(1, keepdim=True)
        if self._is_dali:
            return x * (squares / count).clamp(min=1e-30).rsqrt()
        variance = squares / (count if self._is_kaldi else (count - 1.0).clamp(min=1.0))
        return x / (variance.sqrt() + 1e-5)

    def _constants(self) -> dict[str, Tensor]:
        """Return the buffers by their names. They are computed in float64 and returned in fp32."""
        device = torch.get_default_device()
        with torch.device("cpu"):  # On the meta device, ``arange`` would import the compiler, in 1 s.
            window = self._window_of_form()
            bins = torch.arange(self.n_fft // 2 + 1, dtype=torch.float64)
            frequencies = bins * (self.sample_rate / self.n_fft)
            low, high = slaney_mel(self.f_min), slaney_mel(self.f_max)
            mels = torch.linspace(low, high, self.mels + 2, dtype=torch.float64)
            edges = slaney_hertz(mels)
            constants = {
                "window": F.pad(window, (0, self.n_fft - self.width)),
                "bank": mel_bank(edges, frequencies),
                "edges": edges,
                "frequencies": frequencies,
            }
            if self._spectrum != "fft":
                constants["basis"] = window[:, None] * self._fourier_basis(bins)
            if self.dither != 0.0:
                constants["noise"] = _dither_table()
            return {name: constant.float().contiguous().to(device) for name, constant in constants.items()}

    def _window_of_form(self) -> Tensor:
        """Return the window of the form (samples of the window,)."""
        samples = torch.arange(self.width, dtype=torch.float64)
        phase = samples / max(self.width - 1, 1)
        if self._is_dali or self.form == "kaldi_hann":
            phase = (samples + 0.5 * self._is_dali) / self.width
        cosine = torch.cos(2.0 * math.pi * phase)
        hann = 0.5 - 0.5 * cosine
        return hann**0.85 if self.form == "kaldi" else hann

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
        self._spectrum, self._block_frames = policy.spectrum, policy.feature_frames
        if policy.spectrum != "fft":
            basis = self._constants()["basis"].to(self.window.device)
            self.register_buffer("basis", basis, persistent=False)

    def _check(self) -> None:
        """Raise ConfigError for the first setting that is not valid."""

        def require(is_valid: bool, problem: str) -> None:
            if not is_valid:
                raise ConfigError(problem)

        choices = {
            "form": ("dali", "torch", "parakeet", *_KALDI_FORMS),
            "padding": ("reflect", "constant"),
            "normalise": ("all", "loud", "none"),
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
        is_covered = self.width >= self.hop or not self._is_kaldi
        require(is_covered, f"window_seconds is below hop_seconds, and form={self.form} cannot skip samples")
        require(self.n_fft % 2 == 0, f"n_fft is {self.n_fft}. It must be even")
        require(
            0.0 <= self.f_min < self.f_max <= self.sample_rate / 2,
            f"f_min and f_max are {self.f_min} and {self.f_max} Hz. f_min must be below f_max, both from "
            f"0 to {self.sample_rate / 2} Hz, half the sample rate",
        )
        require(self.log_floor > 0.0, f"log_floor is {self.log_floor}. It must be above 0")
        require(self.splice >= 1, f"splice is {self.splice}. It must be 1 or more")
        require(self.mels >= 1, f"mels is {self.mels}. It must be 1 or more")
