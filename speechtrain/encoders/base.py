"""The interface of encoders: audio in, frames of a fixed width out.

Legend: B rows, S samples, T frames, M mel bins, L layers.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from speechtrain.batch import Batch
from speechtrain.counter_rng import EncoderStream, uniform_at
from speechtrain.encoders.stream import FrameStream, StreamTiming
from speechtrain.errors import ConfigError, NeedsWholeRecordings, require_contract
from speechtrain.features.augment import Augment
from speechtrain.features.logmel import LogMel
from speechtrain.nn.conformer import Context

_CHECKED_PIECE = 1237  # samples of a piece, which is no multiple of a hop


class Encoder(nn.Module, ABC):
    """A front end and a network: (B, S) audio to (B, T, ``width``) frames."""

    width: int  # values of an output frame
    sample_rate: int  # Hz. The data module converts recordings to this rate.
    frozen: bool = False  # if True, ``encode`` records no graph and the weights do not change
    normalise_audio: bool = False  # if True, the data layer gives recordings zero mean and unit variance
    reads_padding: bool = False  # if True, the frames of a row depend on the padding of its batch
    skips_parameters: bool = False  # if True, an update may not use some parameter
    has_exact_frames: bool = True  # if False, ``frames`` is a bound, because the audio decides
    timings: Sequence[StreamTiming] = ()  # of the contexts that an evaluation compares
    middle_ctc: float = 0.0  # weight of a recogniser's CTC loss on the frames of ``encode_with_middle``

    def with_features(self, batch: Batch) -> Batch:
        """Return the batch with the features that ``encode`` computes, for several calls of it."""
        return batch

    def encode(self, batch: Batch, context: Context | None = None) -> tuple[Tensor, Tensor]:
        """Return the frames and lengths of ``forward``, without gradients if ``frozen``.

        ``context``, which is one of ``timings``, replaces the encoder's own.

        Recognisers call this. A pretraining model, which trains the encoder itself, calls its parts.
        """
        if context is not None:
            limits = torch.tensor(context, device=batch.audio.device)
            batch = replace(batch, extra={**batch.extra, "context": limits})
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            encoded: tuple[Tensor, Tensor] = self(batch)
        return encoded

    def encode_with_middle(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the frames and lengths of ``encode``, and the frames (B, T, width) of a middle layer.

        Raises ConfigError for an encoder without such frames, whose ``middle_ctc`` is 0.
        """
        raise ConfigError(f"{type(self).__name__} has no middle layer. Set its middle_ctc to 0")

    @abstractmethod
    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return frames (B, T, width) and lengths (B,).

        In evaluation, ``batch.keys`` seed the dither, which is the noise that the front end adds to audio.
        """

    @torch.no_grad()
    def check(self, batch: Batch) -> None:
        """Raise ConfigError if ``forward`` and ``frames`` break their contract for two seconds of a batch."""
        samples = min(batch.audio.shape[1], 2 * self.sample_rate)
        audio_lengths = batch.audio_lengths.clamp(max=samples)
        batch = replace(batch, audio=batch.audio[:, :samples], audio_lengths=audio_lengths)
        output: Any = self(self.prepare(batch, 0))
        parts = output if isinstance(output, tuple) else ()
        is_pair = [isinstance(part, Tensor) for part in parts] == [True, True]
        require_contract(is_pair, self, "forward does not return frames (B, T, width) and lengths (B,)")
        frames, lengths = output
        rows, shape = len(audio_lengths), tuple(frames.shape)
        problem = f"forward returns frames {shape}, but (B, T, width) is ({rows}, T, {self.width})"
        require_contract(len(shape) == 3 and shape == (rows, shape[1], self.width), self, problem)
        counts = lengths.tolist()
        problem = f"forward returns lengths {counts}, which are not an integer for each row"
        require_contract(lengths.shape == (rows,) and not lengths.is_floating_point(), self, problem)
        problem = f"forward returns lengths {counts}, but only {shape[1]} frames"
        require_contract(max(counts) <= shape[1], self, problem)
        frame_counts = [self.frames(length) for length in audio_lengths.tolist()]
        problem = f"forward returns lengths {counts}, but frames() says {frame_counts}"
        require_contract(not self.has_exact_frames or counts == frame_counts, self, problem)
        if not self.reads_padding:
            self._check_padding(batch, frames, counts)
        with contextlib.suppress(NeedsWholeRecordings):
            self._check_stream(batch)

    def _check_padding(self, batch: Batch, frames: Tensor, counts: list[int]) -> None:
        """Raise ConfigError if another second of padding changes ``frames`` (B, T, width)."""
        padded_audio = nn.functional.pad(batch.audio, (0, self.sample_rate))
        padded_frames, _ = self(self.prepare(replace(batch, audio=padded_audio), 0))
        for row, count in enumerate(counts):
            is_equal = _is_close(padded_frames[row, :count], frames[row, :count])
            problem = "the frames of a row depend on its padding. Mask it, or set reads_padding = True"
            require_contract(is_equal, self, problem)

    def _check_stream(self, batch: Batch) -> None:
        """Raise ConfigError if the frames of a stream are not those of one pass, for the first row."""
        context = self.timings[-1].context if self.timings else None
        stream = self.stream(context, keys=batch.keys[:1])
        length = int(batch.audio_lengths[0])
        audio = batch.audio[:1, :length]
        row = replace(batch, audio=audio, audio_lengths=batch.audio_lengths[:1], keys=batch.keys[:1])
        frames, lengths = self.encode(self.prepare(row, 0), context)
        pieces = [stream.step(piece) for piece in torch.split(audio, _CHECKED_PIECE, dim=1)]
        streamed = torch.cat([*pieces, stream.finish()], dim=1)
        count = int(lengths[0])
        problem = f"stream gives {streamed.shape[1]} frames, and forward {count}"
        require_contract(streamed.shape[1] == count, self, problem)
        problem = "the frames of stream are not those of forward with the same context"
        require_contract(_is_close(streamed, frames[:, :count]), self, problem)

    def advance(self, step: int, seed: int) -> None:
        """Prepare for the next update. ``Task.advance`` calls this and explains ``step`` and ``seed``."""

    def prepare(self, batch: Batch, seed: int) -> Batch:
        """Return the batch with the random masks that ``forward`` needs, in ``extra``.

        ``Task.prepare`` calls this on the host, before the batch moves to the device, and explains ``seed``.
        """
        return batch

    def stream(
        self, context: Context | None = None, rows: int = 1, keys: Tensor | None = None
    ) -> FrameStream:
        """Return a stream of ``rows`` recordings of the same length, whose samples arrive in pieces.

        ``context`` limits attention, and the encoder's own is the default. ``keys`` (B,) select the dither,
        as in ``forward``. By default, all are 0.

        Raises NeedsWholeRecordings, a ConfigError, for an encoder that cannot stream.
        """
        name = type(self).__name__
        raise NeedsWholeRecordings(f"{name} needs whole recordings. For a stream, train another encoder")

    @abstractmethod
    def frames(self, samples: int) -> int:
        """Return the number of frames of a row with ``samples`` samples, without a forward pass."""

    @property
    def frame_seconds(self) -> float:
        """Seconds from one frame to the next.

        The frames of 100 s are counted between two lengths, because the ends of a recording add frames.
        """
        seconds = 100
        samples = seconds * self.sample_rate
        return seconds / (self.frames(2 * samples) - self.frames(samples))

    @abstractmethod
    def activation_bytes(self) -> float:
        """Return the predicted bytes that forward stores for backward, for each second of a row's audio."""


class LogMelEncoder(Encoder):
    """An encoder whose network reads the log-mel ``features`` of audio, augmented in training."""

    def __init__(self, features: LogMel, augment: Augment | None = None) -> None:
        super().__init__()
        self.features, self.sample_rate = features, features.sample_rate
        self.augment = augment or Augment()  # By default, nothing is augmented.
        self.has_exact_frames = features.trim_silence_db is None

    def with_features(self, batch: Batch) -> Batch:
        features, lengths = self.augmented(batch)
        return replace(batch, extra={**batch.extra, "features": features, "feature_lengths": lengths})

    def augmented(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the log-mel frames (B, T, M) of the batch and their lengths (B,), augmented in training."""
        if "features" in batch.extra:
            return batch.extra["features"], batch.extra["feature_lengths"]
        audio = self.augment.waveform(batch.audio, batch.audio_lengths)
        warp = self.augment.warp(audio.shape[0], audio.device)
        frames: tuple[Tensor, Tensor] = self.features(
            audio, batch.audio_lengths, keys=batch.keys, warp=warp, mask=self.augment.spectrogram
        )
        return frames


def _is_close(frames: Tensor, expected: Tensor) -> bool:
    """Return whether the frames are equal up to rounding. That of bf16 is about 0.01 of the largest value."""
    return bool(((frames - expected).abs() <= 0.05 * expected.abs().max()).all())


def layer_drop_factors(seed: int, layers: int, probability: float) -> Tensor:
    """Return random factors (L,) of the layers' outputs: 0 with ``probability``, which drops a layer, else 1.

    ``seed`` is the seed of the update, so all micro-batches and ranks drop the same layers.
    """
    numbers = uniform_at(seed, EncoderStream.LAYERS, np.arange(layers, dtype=np.int64))
    return torch.from_numpy((numbers >= probability).astype(np.float32))


class NoEncoder(Encoder):
    """A placeholder for models that read the audio themselves. It is never called."""

    width, sample_rate = 0, 0

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        raise TypeError("encoder=none: this model needs an encoder. Choose one with encoder=NAME")

    def frames(self, samples: int) -> int:
        return samples

    def activation_bytes(self) -> float:
        return 0.0
