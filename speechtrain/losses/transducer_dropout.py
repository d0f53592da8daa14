"""The dropout of the joint in the transducer loss: a hash of the seed, the cell and the unit."""

from __future__ import annotations

import torch
from torch import Tensor

from speechtrain.losses.transducer_lattice import Cells, Settings, indices

_MOST_CELLS_IN_CACHE = 16384  # With more cells in a chunk, the words do not fit a CPU's cache.
_MULTIPLIERS = (0x7FEB352D, 0x846CA68B - 2**32)  # 2**32 is subtracted to write the second one as int32.


class NoDropout:
    """Returns all units unchanged. It has the methods of ``Dropout``."""

    def apply_(self, hidden: Tensor, cells: Cells) -> None:
        pass

    def applied(self, hidden: Tensor, frame: Tensor) -> Tensor:
        return hidden


class Dropout:
    """Sets a unit to 0 if its random number is below a threshold. It is a hash of seed, cell and unit.

    A number has 16 bits. A word is an int32, which has the numbers of two units. The hash is MurmurHash3's
    finaliser with the multipliers of Wellons' lowbias32. No mask is stored, and the result does not depend on
    the padding or on which other cells are computed.

    A product of two int32 must wrap, which means that it keeps its lower 32 bits. CPUs and CUDA do so.
    Gaudi's documentation does not say it, so ``benchmarks/first_contact.py`` compares a product there.
    """

    def __init__(self, settings: Settings, batch: int, width: int, seed_halves: Tensor) -> None:
        self.threshold = settings.dropped_values - 32768  # Numbers are read as int16, from −32768 on.
        self.width = width
        low, high = seed_halves[:1], seed_halves[1:]
        utterance = indices(batch, seed_halves).int()
        word = indices((width + 1) // 2, seed_halves).int()
        self.utterance_keys = mix(mix(utterance + high) + low)  # (B,)
        self.word_keys = mix(mix(word + low) + high)  # (words of a cell,)
        self.words = seed_halves.new_empty(settings.chunk, len(self.word_keys))
        # Hashing with a second buffer is 1.15 times as fast if both buffers fit a CPU's cache. Otherwise its
        # memory traffic, which is five times as high, makes it slower.
        self.shifted_words: Tensor | None = None
        if settings.chunk <= _MOST_CELLS_IN_CACHE:
            self.shifted_words = torch.empty_like(self.words)

    def apply_(self, hidden: Tensor, cells: Cells) -> None:
        """Set the dropped ones of the units ``hidden`` (N, H) to 0."""
        count = len(hidden)
        keys = _cell_keys(self.utterance_keys[cells.utterance], cells.frame, cells.position)
        words = torch.add(keys[:, None], self.word_keys, out=self.words[:count])
        shifted_words = None
        if self.shifted_words is not None:
            shifted_words = self.shifted_words[:count]
        mix_in_place(words, shifted_words)
        numbers = words.view(torch.int16)[:, : self.width]
        hidden *= numbers.ge_(self.threshold)

    def applied(self, hidden: Tensor, frame: Tensor) -> Tensor:
        """Return the units ``hidden`` (B, t, P, H) of the frames (t,), with 0 for the dropped ones."""
        position = indices(hidden.shape[2], hidden)
        keys = _cell_keys(self.utterance_keys[:, None, None], frame[:, None], position)
        words = mix(keys[..., None] + self.word_keys)
        # Gaudi's graphs cannot read an int32 as two int16. So each number becomes the upper half of an int32,
        # which is compared with the threshold times 65536.
        numbers = torch.stack((words * 65536, words), -1).flatten(-2)
        return hidden * (numbers[..., : self.width] >= self.threshold * 65536)


def _cell_keys(utterance_keys: Tensor, frame: Tensor, position: Tensor) -> Tensor:
    """Return a hash of each cell. The three tensors are broadcast."""
    cell = frame.int() * 65536 + position.int()
    return mix(cell + utterance_keys)


def mix(word: Tensor) -> Tensor:
    """Return a hash of each int32 (MurmurHash3's finaliser)."""
    for multiplier in _MULTIPLIERS:
        word = _fold(word) * multiplier
    return _fold(word)


def _fold(word: Tensor) -> Tensor:
    """Return ``word ^ (word >>> 16)``, where ``>>>`` fills with zeros."""
    upper_half = torch.bitwise_right_shift(word, 16) & 0xFFFF
    return word ^ upper_half


def mix_in_place(word: Tensor, shifted_word: Tensor | None) -> None:
    """Compute ``mix`` in place, in a third of the time. ``shifted_word`` is a buffer of the same shape."""
    for multiplier in _MULTIPLIERS:
        _fold_in_place(word, shifted_word)
        word *= multiplier
    _fold_in_place(word, shifted_word)


def _fold_in_place(word: Tensor, shifted_word: Tensor | None) -> None:
    """Compute ``_fold`` in place. Without the buffer ``shifted_word``, the upper half is read in place."""
    if shifted_word is None:
        halves = word.view(torch.int16)
        halves[..., ::2] ^= halves[..., 1::2]  # In little-endian order, the lower half is the first one.
        return
    torch.bitwise_right_shift(word, 16, out=shifted_word)
    shifted_word &= 0xFFFF
    word ^= shifted_word
