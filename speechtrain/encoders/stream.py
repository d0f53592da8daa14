"""Streams: the frames of recordings whose samples arrive in pieces.

Legend: B rows, S samples, T frames, W width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from speechtrain.nn.conformer import Context

_MOST_SAMPLES = 100_000
"""Samples of one step. Attention needs memory for each pair of frames of a step."""


@dataclass(frozen=True)
class StreamTiming:
    """When the frames of a stream leave an encoder, in audio time."""

    context: Context
    layers: int  # Each layer reads ``right`` frames beyond the end of a chunk.
    frame_seconds: float  # seconds from one frame to the next

    @property
    def milliseconds(self) -> int:
        """The look-ahead: the audio after a frame that the encoder reads, for the first frame of a chunk."""
        _, chunk, right = self.context
        return round(1000 * self.frame_seconds * (chunk - 1 + self.layers * right))

    def departure(self, frame: int) -> int:
        """Return the number of frames of audio that must arrive until frame number ``frame`` leaves."""
        _, chunk, right = self.context
        chunks = frame // chunk + 1
        return chunks * chunk + self.layers * right


class Stage(Protocol):
    """A part of an encoder whose input arrives in pieces. It stores what later pieces need."""

    def step(self, x: Tensor) -> Tensor:
        """Append ``x`` (B, T, ·) and return the new outputs (B, T', ·), which no further input changes."""

    def finish(self) -> Tensor:
        """Return the last outputs (B, T', ·). The stream has then ended."""


class FrameStream:
    """The frames of B recordings of the same length, whose samples arrive in pieces.

    The frames of all pieces are those of one forward pass of the encoder in evaluation, with the same
    context. The stored state does not grow with the recording.
    """

    def __init__(self, *stages: Stage) -> None:
        self.stages = stages

    @torch.no_grad()
    def step(self, samples: Tensor) -> Tensor:
        """Append samples (B, S) and return the new frames (B, T, W), which no further sample changes.

        S may be any number, and T may be 0.
        """
        frames = []
        for piece in torch.split(samples, _MOST_SAMPLES, dim=1):
            x = piece
            for stage in self.stages:
                x = stage.step(x)
            frames.append(x)
        return torch.cat(frames, dim=1)

    @torch.no_grad()
    def finish(self) -> Tensor:
        """Return the last frames (B, T, W). The stream has then ended."""
        first, *others = self.stages
        x = first.finish()
        for stage in others:
            x = torch.cat([stage.step(x), stage.finish()], dim=1)
        return x
