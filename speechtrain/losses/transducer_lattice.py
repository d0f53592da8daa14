"""Settings, inputs, cells and gradients of the transducer loss, which its modules share.

The legend of axes is in ``speechtrain.losses.transducer``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

NEVER = -1e30  # Log-probability of an arc that does not exist. It is finite because inf - inf is NaN.


@dataclass(frozen=True)
class Settings:
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
    delay_penalty: float = 0.0

    @property
    def wide(self) -> torch.dtype:
        """The type of softmaxes and sums, which is fp32 or wider."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def dropped_numbers(self) -> int:
        """How many of the 65536 random numbers drop a unit."""
        return round(self.dropout * 65536)

    @property
    def scale(self) -> float:
        """The factor of the units that are not dropped.

        It multiplies the output layer's weight instead of the units, because the weight has fewer elements.
        """
        return 65536 / (65536 - self.dropped_numbers)

    @property
    def reach(self) -> int:
        """The largest number of diagonals that an arc with a duration leads on."""
        return self.durations[-1] + 1

    def split_logits(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits (…, V) of symbols and the logits (…, K) of durations, from logits (…, V + K)."""
        vocabulary = logits.shape[-1] - len(self.durations)
        return logits[..., :vocabulary], logits[..., vocabulary:]


class Inputs(NamedTuple):
    """The tensor arguments of the autograd functions."""

    encoder: Tensor  # (B, T, H)
    prediction: Tensor  # (B, P, H)
    weight: Tensor  # (V + K, H)
    bias: Tensor  # (V + K,)
    labels: Tensor  # (B, U)
    frame_counts: Tensor  # (B,) the number of frames of each utterance
    label_counts: Tensor  # (B,) the number of labels of each utterance
    seed_halves: Tensor  # (2,) int32, the lower and the upper half of the seed


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


class Cells(NamedTuple):
    """The indices of N cells. All entries are (N,)."""

    flat: Tensor  # the index in the flattened lattice (B · T · P)
    encoder_row: Tensor  # the row of the flattened encoder (B · T, H)
    prediction_row: Tensor  # the row of the flattened prediction (B · P, H)
    utterance: Tensor  # the index in B
    frame: Tensor  # the index in T
    position: Tensor  # the index in P

    @classmethod
    def from_flat(cls, flat: Tensor, frames: int, positions: int) -> Cells:
        """Return the indices of cells ``flat`` (N,) in a lattice with T ``frames`` and P ``positions``."""
        encoder_row = flat // positions
        utterance = encoder_row // frames
        frame = encoder_row - utterance * frames
        position = flat - encoder_row * positions
        prediction_row = utterance * positions + position
        return cls(flat, encoder_row, prediction_row, utterance=utterance, frame=frame, position=position)


def lattice_shape(inputs: Inputs) -> tuple[int, int, int]:
    """Return the lattice's shape (B, T, P)."""
    return inputs.encoder.shape[0], inputs.encoder.shape[1], inputs.prediction.shape[1]


def indices(size: int, like: Tensor) -> Tensor:
    """Return 0 to ``size`` − 1 on the device of ``like``."""
    return torch.arange(size, device=like.device)


def inside_mask(shape: Sequence[int], frame_counts: Tensor, label_counts: Tensor) -> Tensor:
    """Return a mask of ``shape`` (B, T, P), True for the cells in the lattice of their utterance."""
    is_frame_inside = indices(shape[1], frame_counts) < frame_counts[:, None]
    is_position_inside = indices(shape[2], label_counts) <= label_counts[:, None]
    return is_frame_inside[:, :, None] & is_position_inside[:, None, :]


def next_labels(inputs: Inputs, blank: int) -> Tensor:
    """Return the next label (B, P) of each position, or blank after the last label."""
    padded = F.pad(inputs.labels, (0, 1))
    is_after_labels = indices(padded.shape[1], inputs.label_counts) >= inputs.label_counts[:, None]
    return padded.masked_fill(is_after_labels, blank).long()


def skewed(cells: Tensor, fill: float) -> Tensor:
    """Return values of the lattice (B, T, P) by diagonals (B, T + P - 1, P).

    Element [d, u] is the value of cell (d - u, u), or ``fill`` outside the lattice.
    """
    batch, frames, positions = cells.shape
    diagonals = frames + positions - 1
    by_position = cells.transpose(1, 2)
    padded = F.pad(by_position, (0, positions), value=fill)  # (B, P, diagonals + 1)
    # Reading rows that are 1 element shorter than the padded rows moves the values of position u by u.
    without_last_row_end = padded.flatten(1)[:, :-positions]
    return without_last_row_end.reshape(batch, positions, diagonals).transpose(1, 2)


def straight(diagonals: Tensor, frames: int) -> Tensor:
    """Return values of diagonals (B, D, P) as values of the lattice (B, T, P). It inverts ``skewed``."""
    batch, steps, positions = diagonals.shape
    by_position = diagonals.transpose(1, 2).flatten(1)
    # Reading rows that are 1 element longer than a position's diagonals moves the values of position u back.
    padded = F.pad(by_position, (0, positions)).reshape(batch, positions, steps + 1)
    return padded[:, :, :frames].transpose(1, 2)
