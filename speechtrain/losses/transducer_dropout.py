"""The dropout of the joint in the transducer loss: a hash of the seed, the cell and the unit.

A unit is dropped if its random number is low. The number has 16 bits and is read as an int16, from -32768 to
32767. A *word* is an int32 with the numbers of two neighbouring units, the first one in its lower half:

    key of an utterance = mix(mix(utterance + high) + low)       low, high: the halves of the seed
    key of a cell       = mix(65536 * frame + position + key of its utterance)
    key of a word       = mix(mix(word + low) + high)
    random word         = mix(key of the cell + key of the word)

Utterances and words are numbered from 0. They take the halves of the seed in different order, because the key
of utterance i would otherwise be the key of word i.

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

_LOWEST_NUMBER = -32768
_MULTIPLIERS = (0x7FEB352D, 0x846CA68B - 2**32)  # 2**32 is subtracted to write the second one as int32.


class NoDropout:
    """Drops no unit. It has the methods of ``Dropout``."""

    def drop_in_place(self, hidden: Tensor, cells: Cells) -> None:
        pass

    def drop(self, hidden: Tensor, frame: Tensor) -> Tensor:
        return hidden


class Dropout:
    """Sets units of the joint to 0. The module explains how they are chosen.

    ``batch`` is B, ``width`` is H, and ``seed_halves`` (2,) are the lower and the upper half of the seed. A
    cell has W words, half of H.
    """

    def __init__(self, settings: Settings, batch: int, width: int, seed_halves: Tensor) -> None:
        self.width = width
        # The lowest random number of a unit that is kept.
        self.lowest_kept = _LOWEST_NUMBER + settings.dropped_numbers
        low, high = seed_halves[:1], seed_halves[1:]
        utterance = indices(batch, seed_halves).int()
        word = indices((width + 1) // 2, seed_halves).int()
        self.utterance_keys = mix(mix(utterance + high) + low)  # (B,)
        self.word_keys = mix(mix(word + low) + high)  # (W,)
        # The memory for the random words of a chunk of cells.
        self.buffer = seed_halves.new_empty(settings.chunk, len(self.word_keys))

    def drop_in_place(self, hidden: Tensor, cells: Cells) -> None:
        """Set some of the units ``hidden`` (N, H) to 0."""
        cell_keys = _cell_keys(self.utterance_keys[cells.utterance], cells.frame, cells.position)
        words = self.buffer[: len(hidden)]  # (N, W)
        torch.add(cell_keys[:, None], self.word_keys, out=words)
        mix_in_place(words)
        numbers = words.view(torch.int16)[:, : self.width]  # (N, H)
        # The mask replaces the numbers, because memory for it would have to be allocated for each chunk.
        is_kept = numbers.ge_(self.lowest_kept)  # 1 or 0
        hidden *= is_kept

    def drop(self, hidden: Tensor, frame: Tensor) -> Tensor:
        """Return the units ``hidden`` (B, t, P, H) of the frames (t,), some of which are set to 0.

        Gaudi's graphs cannot read an int32 as two int16. So each number is the upper half of an int32 here,
        and is compared with an int32 whose upper half is ``lowest_kept`` and whose lower half is 0. What the
        lower half of the number contains does not change this comparison.
        """
        position = indices(hidden.shape[2], hidden)
        cell_keys = _cell_keys(self.utterance_keys[:, None, None], frame[:, None], position)
        words = mix(cell_keys[..., None] + self.word_keys)  # (B, t, P, W)
        first_numbers = words * 65536  # The lower half of each word moves up.
        second_numbers = words
        numbers = torch.stack((first_numbers, second_numbers), -1).flatten(-2)[..., : self.width]
        is_kept = numbers >= self.lowest_kept * 65536
        return hidden * is_kept


def _cell_keys(utterance_keys: Tensor, frame: Tensor, position: Tensor) -> Tensor:
    """Return the key of each cell. The three tensors are broadcast."""
    cell = frame.int() * 65536 + position.int()
    return mix(cell + utterance_keys)


def mix(word: Tensor) -> Tensor:
    """Return a hash of each int32."""
    for multiplier in _MULTIPLIERS:
        word = _xor_shift(word) * multiplier
    return _xor_shift(word)


def _xor_shift(word: Tensor) -> Tensor:
    """Return ``word ^ (word >>> 16)``, where ``>>>`` fills with zeros."""
    upper_half = torch.bitwise_right_shift(word, 16) & 0xFFFF
    return word ^ upper_half


def mix_in_place(word: Tensor) -> None:
    """Compute ``mix`` in place, in a third of the time."""
    for multiplier in _MULTIPLIERS:
        _xor_shift_in_place(word)
        word *= multiplier
    _xor_shift_in_place(word)


def _xor_shift_in_place(word: Tensor) -> None:
    """Compute ``_xor_shift`` in place: the lower half of each word becomes its xor with the upper half."""
    halves = word.view(torch.int16)  # of each word the lower half, then the upper half (little-endian)
    lower_halves = halves[..., ::2]
    upper_halves = halves[..., 1::2]
    lower_halves ^= upper_halves
