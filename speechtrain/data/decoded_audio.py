"""Decoded recordings that a process keeps in memory, so that it decodes each recording of a small set once."""

from __future__ import annotations

import os
from collections.abc import Callable

from speechtrain.data.formats.lhotse_cuts import Samples
from speechtrain.devices import host

_SHARE_OF_FREE_MEMORY = 0.25
"""Share of the host's free memory that the decoded recordings of all processes may use."""


class DecodedAudio:
    """The samples of recordings by their row in an index, at most ``max_bytes`` of them.

    Pickling keeps no samples. So a data worker, which receives a pickled loader, begins without any.
    """

    def __init__(self, max_bytes: int = 0) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._samples: dict[int, Samples] = {}

    def get(self, row: int, decode: Callable[[], Samples]) -> Samples:
        """Return the samples of the recording in ``row``. ``decode`` decodes it. Its errors pass through.

        The caller must not change the samples.
        """
        samples = self._samples.get(row)
        if samples is None:
            samples = decode()
            if self.bytes + samples.nbytes <= self.max_bytes:
                self._samples[row] = samples
                self.bytes += samples.nbytes
        return samples

    def __reduce__(self) -> tuple[type[DecodedAudio], tuple[int]]:
        return DecodedAudio, (self.max_bytes,)


def bytes_of_process(gib: float | str, set_bytes: int, workers: int) -> int:
    """Return the bytes that each process that loads may keep.

    ``gib`` is the value of ``data.decoded_gib``: GiB of a rank, or ``auto``. ``set_bytes`` is the size of the
    decoded training set, and ``workers`` is the number of data workers of a rank. With ``auto``, each process
    keeps the whole set, or nothing if that needs too much memory: a part of a large set is rarely used again.
    """
    processes = max(1, workers)
    if gib != "auto":
        return int(float(gib) * 2**30) // processes
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1)
    free_bytes = _SHARE_OF_FREE_MEMORY * host.free_memory()
    return set_bytes if set_bytes * processes * ranks <= free_bytes else 0
