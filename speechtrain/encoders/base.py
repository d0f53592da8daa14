"""The interface of encoders: audio in, frames of a fixed width out."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from speechtrain.batch import Batch


class Encoder(nn.Module, ABC):
    """A front end and a network: (B, S) audio to (B, T, ``width``) frames."""

    width: int
    frozen: bool = False  # while it is, ``encode`` records no graph and the weights stay as they are
    normalise_audio: bool = False  # recordings are to come with zero mean and unit variance

    def encode(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """``forward``, as a recogniser calls it."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            encoded: tuple[Tensor, Tensor] = self(batch)
        return encoded

    @abstractmethod
    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Frames (B, T, width) and their lengths (B,); ``batch.keys`` address evaluation's dither."""

    def advance(self, step: int, seed: int) -> None:
        """The encoder's share of ``Task.advance``."""

    def prepare(self, batch: Batch, seed: int) -> Batch:
        """The encoder's share of ``Task.prepare``: what it draws or counts on the host."""
        return batch

    @abstractmethod
    def frames(self, samples: int) -> int:
        """Frames of ``samples`` samples of audio, on the host."""

    @abstractmethod
    def activation_bytes(self) -> float:
        """Predicted bytes that forward keeps for backward, for each second of a row's audio."""
