"""Random problems of a transducer's loss."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from speechtrain.losses.transducer import transducer_loss
from speechtrain.losses.transducer_dropout import Dropout
from speechtrain.losses.transducer_lattice import Settings

NAMES = ("encoder", "prediction", "weight", "bias")


@dataclass(frozen=True)
class Problem:
    """Inputs in float64, lengths, and a gradient from above that differs by row. Blank is the last id."""

    inputs: tuple[Tensor, ...]
    labels: Tensor
    frames: Tensor
    symbols: Tensor
    upstream: Tensor

    @classmethod
    def draw(
        cls,
        frames: list[int],
        symbols: list[int],
        hidden: int = 6,
        vocabulary: int = 7,
        spread: float = 1.0,
        seed: int = 0,
    ) -> Problem:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        batch, most, positions = len(frames), max(1, *frames), max(symbols) + 1
        weight = normal(vocabulary, hidden) * spread / hidden**0.5
        inputs = (normal(batch, most, hidden), normal(batch, positions, hidden), weight, normal(vocabulary))
        labels = torch.randint(0, vocabulary - 1, (batch, positions - 1), generator=generator)
        lengths = torch.tensor(frames), torch.tensor(symbols)
        return cls(inputs, labels, *lengths, normal(batch))

    @property
    def blank(self) -> int:
        return len(self.inputs[3]) - 1

    def evenly(self) -> Problem:
        """With one gradient from above for all utterances: then the one formed in forward is used."""
        return replace(self, upstream=torch.full_like(self.upstream, -0.7))

    def leaves(self, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        return [x.to(dtype, copy=True).requires_grad_() for x in self.inputs]

    def run(self, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Losses and gradients of ``transducer_loss``."""
        leaves = self.leaves(dtype)
        options = {"blank": self.blank, "compute_dtype": dtype, "skip_below": 0.0} | options
        loss = transducer_loss(
            leaves[0], leaves[1], leaves[2], leaves[3], self.labels, self.frames, self.symbols, **options
        )
        return loss.detach(), torch.autograd.grad((loss * self.upstream).sum(), leaves)


def earliness(frames: int) -> Tensor:
    """How many frames before the middle each of T ``frames`` is (T, 1), in float64."""
    return torch.tensor([(frames - 1) / 2 - t for t in range(frames)], dtype=torch.float64)[:, None]


def plain_settings(dropout: float = 0.0) -> Settings:
    return Settings(
        blank=0,
        activation="relu",
        dropout=dropout,
        fastemit=0.0,
        dtype=torch.float32,
        skip_below=0.0,
        chunk=1,
        keep=0,
    )


def joint_dropout_mask(
    batch: int, frames: int, positions: int, hidden: int, *, rate: float, seed: int
) -> tuple[Tensor, float]:
    """Return the dropout mask (B, T, P, H) of ``transducer_loss``, True for the units that are not dropped.

    The second result is the factor of these units.
    """
    settings = plain_settings(rate)
    dropout = Dropout(settings, batch, hidden, seed_halves=torch.tensor([seed]).view(torch.int32))
    ones = torch.ones(batch, frames, positions, hidden)
    return dropout.drop(ones, torch.arange(frames)) > 0, settings.scale
