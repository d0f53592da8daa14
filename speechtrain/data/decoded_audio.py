"""Decoded recordings that a process keeps in memory. It decodes each recording of a small set once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from speechtrain.data.formats.lhotse_cuts import Samples


@dataclass(eq=False)
class DecodedAudio:
    """The samples of the recordings of a set, by their row in its index. Without ``is_kept``, none are kept.

    Pickling keeps no samples. So a data worker, which receives a pickled loader, begins without any.
    """

    is_kept: bool = False
    samples: dict[int, Samples] = field(default_factory=dict)

    def get(self, row: int, decode: Callable[[], Samples]) -> Samples:
        """Return the samples of the recording in ``row``. ``decode`` decodes it. Its errors pass through.

        The caller must not change the samples.
        """
        samples = self.samples.get(row)
        if samples is None:
            samples = decode()
            if self.is_kept:
                self.samples[row] = samples
        return samples

    def __reduce__(self) -> tuple[type[DecodedAudio], tuple[bool]]:
        return DecodedAudio, (self.is_kept,)
