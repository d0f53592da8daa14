"""The dropout of the joint in the transducer loss: a hash of the seed, the cell and the unit.

A unit is dropped if its random number is below a threshold. The number has 16 bits. It is half of an int32, a
*word*, which has the numbers of two neighbouring units:

    key of an utterance = mix(mix(utterance + high) + low)       low, high: the halves of the seed
    key of a cell       = mix(65536 * frame + position + key of its utterance)
    key of a word       = mix(mix(word + low) + high)
    random word         = mix(key of the cell + key of the word)

``mix`` has the form of MurmurHash3's finaliser and the multipliers of Wellons' lowbias32, but it is neither.
Its three shifts are by 16 bits, while the second shift of MurmurHash3 is by 13 and that of lowbias32 by 15. A
shift by 16 with an xor is an xor of the two halves of a word, which ``mix_in_place`` computes in place.

No mask is stored, and the result does not depend on the padding or on which other cells are computed.

A product of two int32 must wrap, which means that it keeps its lower 32 bits. CPUs and CUDA do so. Gaudi's
documentation does not say it, so ``benchmarks/first_contact.py`` compares a product there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from speechtrain.losses.transducer_lattice import Cells, Settings, indices

_LOWEST = -32768  # The 16 bits of a number are read as an int16.
_MULTIPLIERS = (0x7FEB352D, 0x846CA68B - 2**32)  # 2**32 is subtracted to write the second one as int32.


class NoDropout:
    """Returns all units unchanged. It has the methods of ``Dropout``."""

    def drop_in_place(self, hidden: Tensor, cells: Cells) -> None:
        pass

    def with_dropped(self, hidden: Tensor, frame: Tensor) -> Tensor:
        return hidden


class Dropout:
    """Sets units of the joint to 0. The module explains how they are chosen.

    ``batch`` is B, ``width`` is H, and ``seed_halves`` (2,) are the lower and the upper half of the seed.
    """

    def __init__(self, settings: Settings, batch: int, width: int, seed_halves: Tensor) -> None:
        self.threshold = _LOWEST + settings.dropped_numbers
        self.width = width
        low, high = seed_halves[:1], seed_halves[1:]
        utterance = indices(batch, seed_halves).int()
        word = indices((width + 1) // 2, seed_halves).int()
        self.utterance_keys = mix(mix(utterance + high) + low)  # (B,)
        self.word_keys = mix(mix(word + low) + high)  # (words of a cell,)
        self.words = seed_halves.new_empty(settings.chunk, len(self.word_keys))

    def drop_in_place(self, hidden: Tensor, cells: Cells) -> None:
        """Set the dropped ones of the units ``hidden`` (N, H) to 0."""
        count = len(hidden)
        keys = _cell_keys(self.utterance_keys[cells.utterance], cells.frame, cells.position)
        words = torch.add(keys[:, None], self.word_keys, out=self.words[:count])
        mix_in_place(words)
        numbers = words.view(torch.int16)[:, : self.width]
        numbers.ge_(self.threshold)  # Each number becomes 1 for a kept unit, and 0 for a dropped one.
        hidden *= numbers

    def with_dropped(self, hidden: Tensor, frame: Tensor) -> Tensor:
        """Return the units ``hidden`` (B, t, P, H) of the frames (t,), with 0 for the dropped ones."""
        position = indices(hidden.shape[2], hidden)
        keys = _cell_keys(self.utterance_keys[:, None, None], frame[:, None], position)
        words = mix(keys[..., None] + self.word_keys)
        # Gaudi's graphs cannot read an int32 as two int16. So each number becomes the upper half of an int32,
        # which is compared with the threshold times 65536. What is in the lower half does not matter, because
        # the lower half of the threshold is 0.
        lower_half_moved_up = words * 65536
        numbers = torch.stack((lower_half_moved_up, words), -1).flatten(-2)
        is_kept = numbers[..., : self.width] >= self.threshold * 65536
        return hidden * is_kept


def _cell_keys(utterance_keys: Tensor, frame: Tensor, position: Tensor) -> Tensor:
    """Return the key of each cell. The three tensors are broadcast."""
    cell = frame.int() * 65536 + position.int()
    return mix(cell + utterance_keys)


def mix(word: Tensor) -> Tensor:
    """Return a hash of each int32."""
    for multiplier in _MULTIPLIERS:
        word = _fold(word) * multiplier
    return _fold(word)


def _fold(word: Tensor) -> Tensor:
    """Return ``word ^ (word >>> 16)``, where ``>>>`` fills with zeros."""
    upper_half = torch.bitwise_right_shift(word, 16) & 0xFFFF
    return word ^ upper_half


def mix_in_place(word: Tensor) -> None:
    """Compute ``mix`` in place, in a third of the time."""
    for multiplier in _MULTIPLIERS:
        _fold_in_place(word)
        word *= multiplier
    _fold_in_place(word)


def _fold_in_place(word: Tensor) -> None:
    halves = word.view(torch.int16)
    lower_half, upper_half = halves[..., ::2], halves[..., 1::2]  # in little-endian order
    lower_half ^= upper_half
