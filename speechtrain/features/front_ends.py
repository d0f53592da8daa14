"""The published front ends of ``LogMel``: one class for each ``form``, over shared functions.

A front end has the steps in which published log-mel features differ: pre-emphasis, the ends of a waveform,
the window, the number of columns, the logarithm and the deviation. ``LogMel`` has the other steps.

Legend: B rows, S samples, N samples of a window, P positions, C columns, M mel bins. A column is the log-mel
values of one window.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

Count = TypeVar("Count", int, Tensor)


def quotient(count: Count, divisor: int) -> Count:
    """Return ``count``, an integer or integers (B,), divided by ``divisor`` and rounded down.

    A lazy device would compute ``//`` of a tensor on the host, which divides the recorded graph.
    """
    if isinstance(count, Tensor):
        return torch.div(count, divisor, rounding_mode="floor")
    return count // divisor


def hann(phase: Tensor) -> Tensor:
    """Return Hann's window (N,) at ``phase`` (N,). It is 0 at phase 0 and 1, and 1 at phase ½."""
    cosine = torch.cos(2.0 * math.pi * phase)
    return 0.5 - 0.5 * cosine


def symmetric_phase(width: int) -> Tensor:
    """Return the phases (N,) in float64 of ``width`` samples, of which the last has phase 1."""
    return torch.arange(width, dtype=torch.float64) / max(width - 1, 1)


def emphasised(audio: Tensor, factor: float, before_first: Tensor) -> Tensor:
    """Return each sample of (B, S) minus ``factor`` times the sample before. ``before_first`` is (B, 1)."""
    return audio - factor * torch.cat([before_first, audio[:, :-1]], dim=1)


def reflected(positions: Tensor, lengths: Tensor) -> Tensor:
    """Return the positions (B, P) at which a waveform has the samples of its reflection.

    It is reflected at the first and the last sample, which are not repeated: positions −2 to 4 of three
    samples become 2 1 0 1 2 1 0. ``positions`` is (P,) or (B, P), and ``lengths`` (B, 1) are 1 or more.
    """
    period = (2 * (lengths - 1)).clamp(min=1)
    position_in_period = positions % period
    return torch.minimum(position_in_period, period - position_in_period)


def mirrored(positions: Tensor, lengths: Tensor) -> Tensor:
    """Return the positions (B, P) at which a waveform has the samples of its mirror image.

    The first and the last sample are repeated: positions −2 to 4 of three samples become 1 0 0 1 2 2 1.
    ``positions`` is (P,) or (B, P), and ``lengths`` (B, 1) are 1 or more.
    """
    period = 2 * lengths
    position_in_period = positions % period
    return torch.minimum(position_in_period, period - 1 - position_in_period)


@dataclass(frozen=True)
class FrontEnd(ABC):
    """The steps of log-mel features in which published front ends differ."""

    width: int  # N
    hop: int  # samples from one column to the next
    n_fft: int  # samples of a Fourier transform. A window is padded to it
    preemphasis: float  # each sample is reduced by this factor times the sample before
    padding: str  # content before and after a waveform: reflect | constant (zeros)
    log_floor: float  # smallest energy of the logarithm

    @property
    @abstractmethod
    def left(self) -> int:
        """The number of samples of the first window before the waveform."""

    @abstractmethod
    def window(self) -> Tensor:
        """Return the window (N,) in float64."""

    @abstractmethod
    def columns(self, samples: Count) -> Count:
        """Return the number of columns of ``samples`` samples: an integer, or integers (B,) for each row."""

    @abstractmethod
    def signal(self, audio: Tensor, lengths: Tensor) -> Tensor:
        """Return audio (B, S) of ``lengths`` (B,) after pre-emphasis, extended at both ends of each row.

        Column c of the result (B, S + n_fft) is the window that begins at sample c · hop.
        """

    @abstractmethod
    def logarithm(self, mel: Tensor) -> Tensor:
        """Return the logarithm of mel energies (..., M)."""

    @abstractmethod
    def over_deviation(self, x: Tensor, squares: Tensor, count: Tensor) -> Tensor:
        """Return ``x``, whose mean is 0, divided by its deviation.

        ``squares`` is the sum of the squares of ``count`` values. Both are broadcast to the shape of ``x``.
        """

    def _extended(
        self, audio: Tensor, lengths: Tensor, sources: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Return audio (B, S), extended at both ends of each row, with zeros after that: (B, S + n_fft).

        ``sources`` is ``reflected`` or ``mirrored``.
        """
        ends = lengths[:, None]
        audio = audio * (torch.arange(audio.shape[1], device=audio.device) < ends)
        right = self.n_fft - self.left
        if self.padding == "constant":
            return F.pad(audio, (self.left, right))
        before = torch.arange(-self.left, 0, device=audio.device)
        after = ends + torch.arange(self.width - self.left, device=audio.device)
        row_lengths = ends.clamp(min=1)
        head = audio.gather(1, sources(before, row_lengths))
        tail = audio.gather(1, sources(after, row_lengths))
        padding = audio.new_zeros(audio.shape[0], right)
        signal = torch.cat([head, audio, padding], dim=1)
        # The signal is 0 there. ``scatter`` would divide the recorded graph of a lazy device.
        return signal.scatter_add(1, self.left + after, tail)


class DaliFrontEnd(FrontEnd):
    """``form=dali``: the operators of NVIDIA DALI, as MLPerf's RNN-T (training v1.0) uses them.

    - Pre-emphasis reduces the first sample by itself: x0 − c·x0.
    - The window is Hann's, at the middle of each sample: 0.5 − 0.5·cos(2π(n + ½)/N).
    - n samples have floor(n/hop) + 1 columns, so the last one may begin at the end of the waveform.
    - The logarithm is ln max(x, floor), and the deviation is that of the population.
    """

    @property
    def left(self) -> int:
        return self.width // 2

    def window(self) -> Tensor:
        samples = torch.arange(self.width, dtype=torch.float64)
        return hann((samples + 0.5) / self.width)

    def columns(self, samples: Count) -> Count:
        return quotient(samples, self.hop) + 1

    def signal(self, audio: Tensor, lengths: Tensor) -> Tensor:
        audio = emphasised(audio, self.preemphasis, before_first=audio[:, :1])
        return self._extended(audio, lengths, reflected)

    def logarithm(self, mel: Tensor) -> Tensor:
        return mel.clamp(min=self.log_floor).log()

    def over_deviation(self, x: Tensor, squares: Tensor, count: Tensor) -> Tensor:
        return x * (squares / count).clamp(min=1e-30).rsqrt()


class _FilterbankFrontEnd(FrontEnd):
    """What the front ends after NeMo's ``FilterbankFeatures`` share.

    - Pre-emphasis keeps the first sample.
    - The window is Hann's, with 0 at its first and last sample: 0.5 − 0.5·cos(2πn/(N − 1)).
    - The logarithm is ln(x + floor), and the deviation is that of a sample, plus 1e-5.
    """

    @property
    def left(self) -> int:
        return (self.width + 1) // 2

    def window(self) -> Tensor:
        return hann(symmetric_phase(self.width))

    def signal(self, audio: Tensor, lengths: Tensor) -> Tensor:
        audio = emphasised(audio, self.preemphasis, before_first=torch.zeros_like(audio[:, :1]))
        return self._extended(audio, lengths, reflected)

    def logarithm(self, mel: Tensor) -> Tensor:
        return (mel + self.log_floor).log()

    def over_deviation(self, x: Tensor, squares: Tensor, count: Tensor) -> Tensor:
        variance = squares / (count - 1.0).clamp(min=1.0)
        return x / (variance.sqrt() + 1e-5)


class TorchFrontEnd(_FilterbankFrontEnd):
    """``form=torch``: MLPerf's alternative to DALI, also that of Intel's RNN-T and of NeMo until 2025.

    n samples have ceil(n/hop) columns.
    """

    def columns(self, samples: Count) -> Count:
        return quotient(samples + self.hop - 1, self.hop)


class ParakeetFrontEnd(_FilterbankFrontEnd):
    """``form=parakeet``: Hugging Face's ``ParakeetFeatureExtractor``, also that of NeMo since 2025.

    n samples have floor(n/hop) columns.
    """

    def columns(self, samples: Count) -> Count:
        return quotient(samples, self.hop)


class _KaldiFrontEnd(FrontEnd):
    """What the front ends of sherpa-onnx 2.0.1 for models of NeMo share. It has them from kaldi-native-fbank.

    - With ``padding=reflect``, the waveform is mirrored at both ends, before pre-emphasis.
    - A column begins half a hop later than in the other front ends, so n samples have floor(n/hop + ½).
    - The logarithm is ln(x + floor), and the deviation is that of the population, plus 1e-5.

    Kaldi emphasises each window by itself. Here the whole signal is emphasised, with equal results: the two
    differ only in the first sample of a window, where both windows are 0.
    """

    @property
    def left(self) -> int:
        return self.width // 2 - self.hop // 2

    def columns(self, samples: Count) -> Count:
        return quotient(samples + self.hop // 2, self.hop)

    def signal(self, audio: Tensor, lengths: Tensor) -> Tensor:
        signal = self._extended(audio, lengths, mirrored)
        return emphasised(signal, self.preemphasis, before_first=torch.zeros_like(signal[:, :1]))

    def logarithm(self, mel: Tensor) -> Tensor:
        return (mel + self.log_floor).log()

    def over_deviation(self, x: Tensor, squares: Tensor, count: Tensor) -> Tensor:
        return x / ((squares / count).sqrt() + 1e-5)


class KaldiFrontEnd(_KaldiFrontEnd):
    """``form=kaldi``: the front end of sherpa-onnx for NeMo's transducers.

    The window is Povey's: (0.5 − 0.5·cos(2πn/(N − 1)))^0.85.
    """

    def window(self) -> Tensor:
        return hann(symmetric_phase(self.width)) ** 0.85


class KaldiHannFrontEnd(_KaldiFrontEnd):
    """``form=kaldi_hann``: the front end of sherpa-onnx for NeMo's CTC models.

    The window is Hann's with the period N: 0.5 − 0.5·cos(2πn/N).
    """

    def window(self) -> Tensor:
        samples = torch.arange(self.width, dtype=torch.float64)
        return hann(samples / self.width)


class KaldiOnlineFrontEnd(KaldiHannFrontEnd):
    """``form=kaldi_online``: the front end of sherpa-onnx for the streams of NeMo's transducers.

    It is that of the CTC models, but the logarithm is ln max(x, floor), as in Kaldi.
    """

    def logarithm(self, mel: Tensor) -> Tensor:
        return mel.clamp(min=self.log_floor).log()


FRONT_ENDS: dict[str, type[FrontEnd]] = {
    "dali": DaliFrontEnd,
    "torch": TorchFrontEnd,
    "parakeet": ParakeetFrontEnd,
    "kaldi": KaldiFrontEnd,
    "kaldi_hann": KaldiHannFrontEnd,
    "kaldi_online": KaldiOnlineFrontEnd,
}
"""The front ends by the names of ``form``."""
