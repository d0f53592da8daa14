"""Counter-based random numbers: every draw is a pure function of its address in the run.

No generator has a state, so a draw does not depend on resume, gradient accumulation or the number
of ranks and data workers. Source: the SplitMix64 finaliser (Steele, Lea and Flood, OOPSLA 2014).
"""

from __future__ import annotations

import hashlib
import zlib
from enum import IntEnum, unique

import numpy as np
from numpy.typing import NDArray


@unique
class RunStream(IntEnum):
    """The second part of an address, after the run's seed. A comment lists the parts that follow."""

    DEVICE_DRAWS = 1  # update, micro-batch: the seed of the device's generator (dropout, augmentation)
    INITIAL_WEIGHTS = 2
    ORDER = 3  # pass, cut: the order of the cuts. Without weights, pass p is epoch p
    SPEED = 4  # pass, cut: its speed
    BATCHES = 5  # epoch, micro-batch: the order of the micro-batches
    CHECKS = 6  # row: which recordings and transcripts of a large set are checked
    HOST_DRAWS = 7  # update, micro-batch: the seed that ``Task.prepare`` gets
    UPDATE_DRAWS = 8  # update: the seed that ``Task.advance`` gets
    CROPS = 9  # pass, cut: where its crop starts
    SHARES = 11  # pass, cut: its turn in a set that has a weight
    HOLD_OUT = 10  # speaker, recording or cut, with seed 0: whether it is held out for validation


# The other seeds have other streams. The parts of their addresses are:
# ``Task.prepare``'s seed, in pretraining, stream
BatchStream = IntEnum("BatchStream", {"FRAMES": 0, "NEGATIVES": 1, "CHANNELS": 2, "NOISE": 3})
# ``Task.prepare``'s seed, in a recogniser, stream. For LAYERS: ``Task.advance``'s seed, stream, layer
EncoderStream = IntEnum("EncoderStream", {"FRAMES": 1, "CHANNELS": 2, "LAYERS": 3})
# the same seed, stream, slice of the batch: the dropout mask of the joint
JointStream = IntEnum("JointStream", {"DROPOUT": 4})
# the embedded corpus's seed, split, stream, utterance. Except for SIZE, also the word's position
DigitsStream = IntEnum("DigitsStream", {"SIZE": 0, "WORD": 1, "GAP": 2})
# FSDD's seed, speaker, pass, (for GAP) utterance, position, stream
FsddStream = IntEnum("FsddStream", {"ORDER": 0, "SIZE": 1, "GAP": 2})

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash each integer (SplitMix64's finaliser)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def bits_at(*address: int | NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return 64 random bits for each address. Its parts broadcast, so one call draws a whole epoch."""
    with np.errstate(over="ignore"):
        state = np.zeros((), np.uint64)
        for part in address:
            word = np.asarray(part).astype(np.uint64)
            state = _mix((state ^ word) + _GOLDEN)
    return state


def seed_at(*address: int) -> int:
    """Return a non-negative 63-bit seed for an address, e.g. ``seed_at(run_seed, update, micro_batch)``."""
    return int(bits_at(*address)) >> 1


def uniform_at(*address: int | NDArray[np.int64]) -> NDArray[np.float64]:
    """Return a uniform draw in [0, 1) with 53 bits for each address."""
    return (bits_at(*address) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def key_of(name: str) -> int:
    """Return a non-negative 63-bit hash of a name, equal in every process (unlike ``hash``)."""
    digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


DITHER_PERIOD = 1 << 18  # samples, 16 s at 16 kHz: far beyond the reach of any window
_HASHED_SAMPLES = 1 << 14


def dither_offset(samples: NDArray[np.float32]) -> int:
    """Return the start of the dither of ``samples`` (S,) in a table of ``DITHER_PERIOD`` samples.

    The start depends only on the samples, so a recording has one transcript under any name. The host computes
    it. Only the beginning of the samples is hashed, because a hash of all samples would cost 0.5 ms for each
    row of a training batch.
    """
    return zlib.crc32(samples[:_HASHED_SAMPLES].tobytes()) % DITHER_PERIOD
