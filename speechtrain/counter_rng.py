"""Counter-based random numbers: every number is a pure function of its address.

An address is a tuple of integers, such as (seed of the run, stream, update, micro-batch). No generator has a
state, so a random number does not depend on resume, gradient accumulation or the number of ranks and data
workers.
Source: the SplitMix64 finaliser (Steele, Lea and Flood, OOPSLA 2014).
"""

from __future__ import annotations

import hashlib
import zlib
from enum import IntEnum, unique

import numpy as np
from numpy.typing import NDArray


@unique
class RunStream(IntEnum):
    """The second number of an address, after the seed of the run.

    Each comment lists the numbers that follow, and then what the random number decides. An epoch of a set is
    one use of all its cuts. If the sets have no weights, it is the epoch of the run.
    """

    DEVICE_SEED = 1  # update, micro-batch: the seed of the device's generator (dropout, augmentation)
    INITIAL_WEIGHTS = 2  # nothing: the seed of the initial weights
    ORDER = 3  # epoch of the set, cut: the position of the cut in the order of its set
    SPEED = 4  # epoch of the set, cut: the speed of the cut
    BATCHES = 5  # epoch, micro-batch: the position of the micro-batch in the epoch
    CHECKS = 6  # row: whether a recording or transcript of a large set is checked
    HOST_SEED = 7  # update, micro-batch: the seed for ``Task.prepare``
    UPDATE_SEED = 8  # update: the seed for ``Task.advance``
    CROPS = 9  # epoch of the set, cut: the start of the crop
    SHARES = 11  # epoch of the set, cut: the turn of the cut in a set with a weight
    ACOUSTICS = 12  # epoch of the set, cut: the seed of recorded noise and rooms
    HOLD_OUT = 10  # speaker, recording or cut, with seed 0: whether it is held out for validation


# Addresses that start with another seed than the run's have other streams. Their numbers are:
# seed of ``Task.prepare`` in pretraining, stream
BatchStream = IntEnum("BatchStream", {"FRAMES": 0, "NEGATIVES": 1, "CHANNELS": 2, "NOISE": 3})
# seed of ``Task.prepare`` in a recogniser, stream. For LAYERS: seed of ``Task.advance``, stream, layer
EncoderStream = IntEnum("EncoderStream", {"FRAMES": 1, "CHANNELS": 2, "LAYERS": 3, "CONTEXT": 5})
# the same seed, stream, slice of the batch: the dropout mask of the joint
JointStream = IntEnum("JointStream", {"DROPOUT": 4})
# seed of ACOUSTICS, hash of "noise" or "rooms", number: whether one is used, which one, its start, its level
# seed of data=digits, split, stream, utterance, position of the word (not for SIZE)
DigitsStream = IntEnum("DigitsStream", {"SIZE": 0, "WORD": 1, "GAP": 2})
# seed of data=fsdd, speaker, epoch, utterance (only for GAP), position, stream
FsddStream = IntEnum("FsddStream", {"ORDER": 0, "SIZE": 1, "GAP": 2})

_GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's increment: 2^64 divided by the golden ratio


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a hash of each integer (SplitMix64's finaliser)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def bits_at(*address: int | NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return 64 random bits for each address.

    The numbers of an address broadcast as arrays do, so one call gives the numbers of all cuts of an epoch.
    """
    with np.errstate(over="ignore"):
        state = np.zeros((), np.uint64)
        for number in address:
            word = np.asarray(number).astype(np.uint64)
            state = _mix((state ^ word) + _GOLDEN_RATIO)
    return state


def seed_at(*address: int) -> int:
    """Return a non-negative 63-bit seed for an address, e.g. ``seed_at(run_seed, update, micro_batch)``."""
    return int(bits_at(*address)) >> 1


def uniform_at(*address: int | NDArray[np.int64]) -> NDArray[np.float64]:
    """Return a uniform random number in [0, 1) with 53 bits for each address."""
    return (bits_at(*address) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def key_of(name: str) -> int:
    """Return a non-negative 63-bit hash of a name, equal in every process (unlike ``hash``)."""
    digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


DITHER_PERIOD = 1 << 18
"""Samples in the table of dither (16 s at 16 kHz), much more than in a window of the features."""
_HASHED_SAMPLES = 1 << 14


def dither_offset(samples: NDArray[np.float32]) -> int:
    """Return the position in the table of dither at which the dither of ``samples`` (S,) starts.

    The position depends only on the samples, so equal audio has equal features under any name. Only the first
    samples are hashed, because a hash of all samples would cost 0.5 ms for each row of a training batch.
    """
    return zlib.crc32(samples[:_HASHED_SAMPLES].tobytes()) % DITHER_PERIOD
