"""Settings, inputs, cells and results of the transducer loss, which its modules share.

The legend of axes is in ``speechtrain.losses.transducer``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

NEVER = -1e30  # Log-probability of an arc that does not exist. It is finite because inf - inf is NaN.


class Inputs(NamedTuple):
    """The tensor arguments of the autograd functions."""

    encoder: Tensor  # (B, T, H)
    prediction: Tensor  # (B, P, H)
    weight: Tensor  # (V + K, H)
    bias: Tensor  # (V + K,)
    labels: Tensor  # (B, U)
    frames: Tensor  # (B,) the number of frames of each utterance
    symbols: Tensor  # (B,) the number of labels of each utterance
    seed_halves: Tensor  # (2,) int32, the lower and the upper half of the seed


@dataclass(frozen=True)
class Joint:
    """The settings of ``transducer_loss``, which forward and backward share."""

    blank: int
    activation: str
    dropout: float
    fastemit: float
    dtype: torch.dtype  # the type of matmuls
    skip_below: float  # occupancy
    chunk: int  # cells
    keep: int  # bytes
    durations: tuple[int, ...] = ()  # frames
    sigma: float = 0.0

    @property
    def wide(self) -> torch.dtype:
        """The type of softmaxes and sums, which is fp32 or wider."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def dropped_values(self) -> int:
        """The number of values that drop a unit, of the 65536 possible values of a 16-bit draw."""
        return round(self.dropout * 65536)

    @property
    def scale(self) -> float:
        """The factor of the units that are not dropped. It multiplies the weight, which is smaller."""
        return 65536 / (65536 - self.dropped_values)

    def split_logits(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits (…, V) of symbols and the logits (…, K) of durations, from logits (…, V + K)."""
        symbols = logits.shape[-1] - len(self.durations)
        return logits[..., :symbols], logits[..., symbols:]

    def slope_(self, hidden: Tensor) -> Tensor:
        """Overwrite hidden units by the slope of the activation, computed from its output.

        A dropped unit of tanh is 0, and gets the slope 1. The caller must set this slope to 0. The operations
        are in place, because a new tensor takes three times as long.
        """
        if self.activation == "relu":
            return hidden.gt_(0)
        return hidden.square_().neg_().add_(1)


class Cells(NamedTuple):
    """The indices of N cells. All fields are (N,)."""

    flat: Tensor  # the index in the flattened (B, T, P)
    frame_row: Tensor  # the index in the flattened (B, T)
    position_row: Tensor  # the index in the flattened (B, P)
    row: Tensor  # the utterance
    frame: Tensor
    position: Tensor

    @classmethod
    def from_flat(cls, flat: Tensor, frames: int, positions: int) -> Cells:
        """Return the indices of cells ``flat`` (N,) in a lattice with T ``frames`` and P ``positions``."""
        frame_row = flat // positions
        row = frame_row // frames
        frame = frame_row - row * frames
        position = flat - frame_row * positions
        return cls(flat, frame_row, row * positions + position, row, frame, position)


class Posteriors(NamedTuple):
    """The loss, and the posterior probabilities of cells and arcs if the labels are known.

    The share of an arc is the fraction of the paths through its cell that continue by the arc, from 0 to 1.
    """

    loss: Tensor  # (B,)
    occupancy: Tensor  # (B, T, P) probability that a path passes through the cell, 0 outside the lattice
    label_share: Tensor  # (B, T, P) the share of the next label
    duration_shares: tuple[Tensor, ...] = ()  # for each duration: (B, T, P) the share of arcs that have it


class Gradients(NamedTuple):
    """The gradients of the first four of ``Inputs``."""

    encoder: Tensor
    prediction: Tensor
    weight: Tensor
    bias: Tensor

    def for_inputs(self, inputs: Inputs) -> tuple[Tensor | None, ...]:
        """Return the result of an autograd function's backward: the gradients in the types of ``inputs``.

        The function's other six arguments have no gradient.
        """
        gradients = [gradient.to(tensor.dtype) for gradient, tensor in zip(self, inputs, strict=False)]
        return (*gradients, None, None, None, None, None, None)


def indices(size: int, like: Tensor) -> Tensor:
    """Return 0 to ``size`` − 1 on the device of ``like``."""
    return torch.arange(size, device=like.device)


def inside_mask(shape: tuple[int, int, int], frames: Tensor, symbols: Tensor) -> Tensor:
    """Return a mask of ``shape`` (B, T, P), True for the cells in the lattice of their utterance."""
    is_frame_inside = indices(shape[1], frames) < frames[:, None]
    is_position_inside = indices(shape[2], symbols) <= symbols[:, None]
    return is_frame_inside[:, :, None] & is_position_inside[:, None, :]


def lattice_shape(inputs: Inputs) -> tuple[int, int, int]:
    """Return the lattice's shape (B, T, P)."""
    return inputs.encoder.shape[0], inputs.encoder.shape[1], inputs.prediction.shape[1]


def next_labels(inputs: Inputs, blank: int) -> Tensor:
    """Return the next label (B, P) of each position, or blank after the last label."""
    padded = F.pad(inputs.labels, (0, 1))
    beyond = indices(padded.shape[1], inputs.symbols) >= inputs.symbols[:, None]
    return padded.masked_fill(beyond, blank).long()


def lattice_field(diagonals: Tensor, frames: int) -> Tensor:
    """Return values of diagonals (T + P, B, P) as values of the lattice (B, T, P)."""
    return straight(diagonals.transpose(0, 1), frames)


def skewed(field: Tensor, fill: float) -> Tensor:
    """Return values of the lattice (B, T, P) by diagonals (B, T + P - 1, P).

    Element [d, u] is the value of cell (d - u, u), or ``fill`` outside the lattice.
    """
    batch, frames, positions = field.shape
    padded = F.pad(field.transpose(1, 2), (0, positions), value=fill).flatten(1)
    return padded[:, :-positions].reshape(batch, positions, frames + positions - 1).transpose(1, 2)


def straight(diagonals: Tensor, frames: int) -> Tensor:
    """Return values of diagonals (B, D, P) as values of the lattice (B, T, P). It inverts ``skewed``."""
    batch, steps, positions = diagonals.shape
    padded = F.pad(diagonals.transpose(1, 2).flatten(1), (0, positions))
    return padded.reshape(batch, positions, steps + 1)[:, :, :frames].transpose(1, 2)
